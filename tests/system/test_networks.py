"""Three hosts in networks of their own, parts of which fail, are slow, or are not to be used."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.launcher.conftest import wait_until
from tests.system.hosts import NAMES, Hosts
from tests.system.jobs import FIT, MEET, Job, Jobs, assert_met, assert_trained_as

pytestmark = pytest.mark.netns

_SECONDS = 60.0


def start_on_all(jobs: Jobs, hosts: Hosts, command: tuple[str, ...], **env: str) -> list[Job]:
    """Starts a task on each host, by nothing but variables; all in one folder."""
    started: list[Job] = []
    for rank, name in enumerate(NAMES):
        own = {"TFDIST_RANK": str(rank), "TFDIST_SIZE": str(len(NAMES)), "TFDIST_MEETING": NAMES[0], **env}
        folder = started[0].folder if started else None
        started.append(jobs.start(*command, on=hosts[name], env=own, folder=folder))
    return started


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ("n11", ["Expected: rank 2 as well", "Expected: rank 2 as well", "as rank 2 on n11 saw it: n9:"]),
        ("n9", ["Expected: ranks 1, 2 as well", "as rank 1 on n10 saw it: n9:", "as rank 2 on n11 saw it: n9:"]),
    ],
    ids=["another host", "the host of rank 0"],
)
def test_a_host_that_is_cut_at_the_start_is_named(own_hosts, jobs, cut, words):
    own_hosts.cut(cut)
    started = start_on_all(jobs, own_hosts, MEET, MEETING_TEST_TIMEOUT="5")
    assert [job.end(_SECONDS) for job in started] == [3, 3, 3]
    errors = {task["node"]: task for task in started[0].found()}
    for name, word in zip(NAMES, words, strict=True):
        assert word in errors[name]["error"]
        assert 4.5 < errors[name]["seconds"] < 13.0


def test_hosts_that_are_not_cut_meet(own_hosts, jobs):
    own_hosts.cut("n11")
    own_hosts.join("n11")
    started = start_on_all(jobs, own_hosts, MEET)
    assert [job.end(_SECONDS) for job in started] == [0, 0, 0], [job.output for job in started]
    found = assert_met(started[0], 3)
    assert [place[0] for place in found[0]["places"]] == [host.address for host in own_hosts]


def test_the_interface_that_is_asked_for_is_used(own_hosts_in_two_networks, jobs):
    # In the first network only rank 0 reaches everybody.
    hosts = own_hosts_in_two_networks
    hosts.separate("n10", "n11")
    for interface, answers in (("eth0", [[0, 1, 2], [0, 1, None], [0, None, 2]]), ("eth1", [[0, 1, 2]] * 3)):
        started = start_on_all(jobs, hosts, MEET, TFDIST_INTERFACE=interface)
        assert [job.end(_SECONDS) for job in started] == [0, 0, 0], [job.output for job in started]
        found = started[0].found()
        assert [task["answers"] for task in found] == answers
        own = [host.addresses[int(interface[-1])] for host in hosts]
        assert [place[0] for place in found[0]["places"]] == own


def test_the_other_network_may_be_cut(own_hosts_in_two_networks, jobs):
    hosts = own_hosts_in_two_networks
    for name in NAMES:
        hosts.cut(name)
    env = {"TFDIST_INTERFACE": "eth1", "TFDIST_MEETING": hosts["n9"].addresses[1]}
    started = start_on_all(jobs, hosts, MEET, **env)
    assert [job.end(_SECONDS) for job in started] == [0, 0, 0], [job.output for job in started]
    assert_met(started[0], 3)


def test_an_interface_that_is_not_there(own_hosts, jobs):
    started = start_on_all(jobs, own_hosts, MEET, TFDIST_INTERFACE="eth1")
    assert [job.end(_SECONDS) for job in started] == [3, 3, 3]
    for task in started[0].found():
        words = "Received: the network interface 'eth1', which is none of this machine's, which are eth0, lo. "
        assert task["error"].startswith(words)


@pytest.mark.slow
@pytest.mark.cluster
def test_training_in_a_slow_network_equals_one_process(own_hosts, jobs, one_process):
    own_hosts.limit(megabits=200)
    started = start_on_all(jobs, own_hosts, FIT)
    assert [job.end(180) for job in started] == [0, 0, 0], [job.output for job in started]
    assert_trained_as(started[0], one_process, 3)
    assert {int(np.load(started[0].folder / f"bucket-{rank}.npy")) for rank in range(3)} == {4 << 20}
    # More than what fits into the burst had to wait.
    for host in own_hosts:
        (waited,) = re.findall(r"overlimits (\d+)", host.run("tc", "-s", "qdisc", "show", "dev", "eth0"))
        assert int(waited) > 20


@pytest.mark.slow
@pytest.mark.cluster
def test_what_compression_leaves_on_the_wire(own_hosts, jobs):
    """Counted by the interfaces: with all headers, the meeting and the heartbeats."""

    def sent(*options: str) -> int:
        before = _sent_by(own_hosts)
        started = start_on_all(jobs, own_hosts, (*FIT, *options))
        assert [job.end(180) for job in started] == [0, 0, 0], [job.output for job in started]
        return _sent_by(own_hosts) - before

    short, steps = 10, 110
    whole = sent(f"--steps={steps}") - sent(f"--steps={short}")
    little = sent("--rank=4", f"--steps={steps}") - sent("--rank=4", f"--steps={short}")
    # In a ring of three, each sends two thirds of the gradients of 271,873 weights, twice.
    assert whole == pytest.approx((steps - short) * 3 * 4 / 3 * 4 * 271_873, rel=0.05)
    # The factors of kernels of 16 x 512 and 512 x 512, and what is sent as it is, go to the first host and back.
    numbers = 4 * (16 + 512) + 4 * (512 + 512) + 512 + 512 + 512 + 1
    assert little == pytest.approx((steps - short) * 2 * 2 * 4 * numbers, rel=0.25)
    assert little < whole / 20


def _sent_by(hosts: Hosts) -> int:
    shown = [json.loads(host.run("ip", "-s", "-j", "link", "show", "dev", "eth0"))[0] for host in hosts]
    return sum(link["stats64"]["tx"]["bytes"] for link in shown)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_host_that_is_cut_in_training_is_noticed(own_hosts, jobs):
    started = start_on_all(jobs, own_hosts, (*FIT, "--steps=20000"))
    signs = [started[0].folder / f"trains-{rank}" for rank in range(3)]
    wait_until(lambda: all(sign.exists() for sign in signs), 120, "training")
    own_hosts.cut("n11")
    # TensorFlow's own heartbeats: after ten seconds without one, a process is given up.
    began = time.monotonic()
    assert [job.end(40) for job in started] == [1, 1, 1]
    assert 5.0 < time.monotonic() - began < 30.0
    for job in started[:2]:
        assert "stopped sending heartbeats" in job.output and "/job:worker/replica:0/task:2" in job.output
    assert "CoordinationService/Heartbeat" in started[2].output


def test_hosts_are_gone_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), Hosts(tmp_path) as hosts:
        assert [host.run("hostname") for host in hosts] == [f"{name}\n" for name in NAMES]
        networks = {os.stat(f"/proc/{host.holder.pid}/ns/net").st_ino for host in (hosts.switch, *hosts)}
        left = subprocess.Popen(hosts["n9"].command("sleep", "100"))
        assert len(networks) == 4
        wait_until(lambda: left.pid in hosts["n9"].processes(), 5, "the command to be on its host")
        _ = 1 / 0
    assert left.wait(5) == -signal.SIGKILL
    assert not networks & set(networks_in_use())


def networks_in_use() -> Iterator[int]:
    """The network namespaces of all processes."""
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            yield entry.stat().st_ino


def test_the_check_names_hosts_that_do_not_reach_each_other(own_hosts, jobs):
    """Each of them reaches rank 0, so that all meet, and training would hang."""
    own_hosts.separate("n10", "n11")
    started = start_on_all(jobs, own_hosts, ("{python}", "-m", "tfdist", "check", "--no-tensorflow", "--timeout", "30"))
    assert [job.end(_SECONDS) for job in started] == [1, 1, 1], [job.output for job in started]
    lines = started[0].output.splitlines()
    (verdict,) = [line for line in lines if line.startswith("not ready: ")]
    assert verdict.startswith("not ready: worker 1 on n10 does not reach worker 2 on n11 (")
    assert "Expected: all ports of all hosts are open to each other" in verdict
    (other,) = [line for line in lines if line.startswith("also: ")]
    assert other.startswith("also: worker 2 on n11 does not reach worker 1 on n10 (")
    assert sum("blocked" in line for line in lines) == 2


def test_the_check_is_content_with_hosts_that_reach_each_other(own_hosts, jobs):
    started = start_on_all(jobs, own_hosts, ("{python}", "-m", "tfdist", "check", "--no-tensorflow", "--timeout", "30"))
    assert [job.end(_SECONDS) for job in started] == [0, 0, 0], [job.output for job in started]
    assert started[0].output.splitlines()[-1] == "ready"
