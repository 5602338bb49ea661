"""Three hosts in networks of their own, parts of which fail, are slow, or are not to be used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.launcher.conftest import wait_until
from tests.system.hosts import NAMES, Hosts
from tests.system.jobs import FIT, MEET, Job, Jobs, assert_trained_as

pytestmark = pytest.mark.netns

_SECONDS = 180.0


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
        ("n11", ["missing: rank 2;", "missing: rank 2;", "as rank 2 on n11 saw it: n9:"]),
        ("n9", ["missing: rank 1, rank 2;", "as rank 1 on n10 saw it: n9:", "as rank 2 on n11 saw it: n9:"]),
    ],
    ids=["another host", "the host of rank 0"],
)
def test_a_host_that_is_cut_at_the_start_is_named(own_hosts, jobs, cut, words):
    own_hosts.cut(cut)
    started = start_on_all(jobs, own_hosts, MEET, MEETING_TEST_TIMEOUT="20")
    assert [job.end(_SECONDS) for job in started] == [3, 3, 3]
    errors = {task["node"]: task for task in started[0].found()}
    for name, word in zip(NAMES, words, strict=True):
        assert word in errors[name]["error"]
        assert errors[name]["seconds"] > 18.0


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
def test_a_host_that_is_cut_in_training_is_noticed(own_hosts, jobs):
    started = start_on_all(jobs, own_hosts, (*FIT, "--steps=20000"))
    signs = [started[0].folder / f"trains-{rank}" for rank in range(3)]
    wait_until(lambda: all(sign.exists() for sign in signs), _SECONDS, "training")
    own_hosts.cut("n11")
    # TensorFlow's own heartbeats: after ten seconds without one, a process is given up.
    began = time.monotonic()
    assert [job.end(_SECONDS) for job in started] == [1, 1, 1]
    assert time.monotonic() - began > 5.0
    for job in started[:2]:
        assert "stopped sending heartbeats" in job.output and "/job:worker/replica:0/task:2" in job.output
    assert "CoordinationService/Heartbeat" in started[2].output


def test_the_check_names_hosts_that_do_not_reach_each_other(own_hosts, jobs):
    """Each of them reaches rank 0, so that all meet, and training would hang."""
    check = ("{python}", "-m", "tfdist", "check", "--no-tensorflow", "--timeout", "30")
    started = start_on_all(jobs, own_hosts, check)
    assert [job.end(_SECONDS) for job in started] == [0, 0, 0], [job.output for job in started]
    assert started[0].output.splitlines()[-1] == "ready"
    own_hosts.separate("n10", "n11")
    started = start_on_all(jobs, own_hosts, check)
    assert [job.end(_SECONDS) for job in started] == [1, 1, 1], [job.output for job in started]
    lines = started[0].output.splitlines()
    (verdict,) = [line for line in lines if line.startswith("not ready: ")]
    assert verdict.startswith("not ready: worker 1 on n10 does not reach worker 2 on n11 (")
    assert "Expected: all ports of all hosts are open to each other" in verdict
    (other,) = [line for line in lines if line.startswith("also: ")]
    assert other.startswith("also: worker 2 on n11 does not reach worker 1 on n10 (")
    assert sum("blocked" in line for line in lines) == 2


def test_a_worker_whose_network_is_cut_is_left_out_and_taken_in_again(own_hosts, tmp_path):
    """`LocalStepsStrategy(min_workers=1)`: rank 2 trains on until an exchange, and takes part again later."""
    cluster = {"worker": [f"{host.address}:5000" for host in own_hosts]}
    processes, logs = [], [tmp_path / f"worker-{rank}.log" for rank in range(3)]
    for rank, (host, log) in enumerate(zip(own_hosts, logs, strict=True)):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
        program = host.command(sys.executable, "-m", "tests.cluster.coming_program", str(tmp_path), "cut")
        with log.open("wb") as file:
            env = {**os.environ, "TF_CONFIG": config}
            processes.append(subprocess.Popen(program, stdout=file, stderr=subprocess.STDOUT, env=env))

    def wait_for(condition):
        wait_until(lambda: condition() or any(one.poll() for one in processes), _SECONDS, "the workers")
        assert condition(), [log.read_text()[-3000:] for log in logs]

    try:
        wait_for(lambda: list(tmp_path.glob("trains-2-*")))
        (tmp_path / "struck").touch()
        own_hosts.cut("n11")
        wait_for(lambda: "go on without it" in logs[0].read_text())
        own_hosts.join("n11")
        (tmp_path / "left-out").touch()
        wait_for(lambda: all(one.poll() == 0 for one in processes))
    finally:
        for one in processes:
            one.kill()
            one.wait()
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(3)]
    assert "takes part from here on" in logs[0].read_text()
    assert found[0]["weights"] == found[1]["weights"] == found[2]["weights"]
    assert found[0]["history"] == found[1]["history"] == found[2]["history"]
    assert len(list(tmp_path.glob("trains-*"))) == 3
