"""`tfdist run --hosts` over a real sshd on each of three hosts in networks of their own."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.launcher.conftest import wait_until
from tests.system.hosts import Hosts
from tests.system.jobs import Job, Jobs, assert_trained_as
from tests.system.ssh import SSHD, Sshds, alias

pytestmark = [pytest.mark.netns, pytest.mark.skipif(SSHD is None or os.geteuid() != 0, reason="no sshd, or not root")]

_SECONDS = 240.0
_SOON = 120.0
TRAIN = ("-m", "tests.system.training_program")


@pytest.fixture
def sshds(tmp_path: Path, own_hosts: Hosts) -> Iterator[Sshds]:
    with Sshds(tmp_path / "ssh", own_hosts) as running:
        yield running


@pytest.fixture
def run_on(jobs: Jobs, own_hosts: Hosts, sshds: Sshds, tmp_path: Path) -> Callable[..., Job]:
    """`run_on(["n9", "n10"], *program, options=[...])` starts `tfdist run --hosts` beside the hosts."""

    def start(names: list[str], *program: str, options: tuple[str, ...] = (), here: str = "", **more) -> Job:
        hosts = ",".join(name if name == here else alias(own_hosts[name.split(":")[0]]) for name in names)
        # Logs are where the program's files are; the current folder is that of the tests.
        words = ("{python}", "-m", "tfdist", "run", "--hosts", hosts, "--ssh", sshds.command)
        place = own_hosts[here] if here else own_hosts.switch
        return jobs.start(*words, "--log-dir", "{folder}/logs", *options, *program, on=place, **more)

    return start


@pytest.fixture
def assert_nothing_is_left(own_hosts: Hosts, sshds: Sshds) -> Callable[[], None]:
    def check() -> None:
        wait_until(lambda: not any(map(sshds.left, own_hosts)), _SOON, "the end of all processes on all hosts")

    return check


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a training of two processes that nobody disturbs prints last."""
    jobs = Jobs(tmp_path_factory.mktemp("undisturbed"))
    try:
        job = jobs.start("{python}", "-m", "tfdist", "run", "-n", "2", *TRAIN, "{folder}/backup", "0")
        assert job.end(_SECONDS) == 0, job.output
        return result_of(job)
    finally:
        jobs.close()


def result_of(job: Job) -> str:
    (line,) = re.findall(r"^\[worker 0\] result (.*)", job.output, flags=re.MULTILINE)
    return line


def wait_for_training(job: Job, saved: int = 1) -> None:
    """Until there is something to go on from."""
    log = job.folder / "logs" / "events.jsonl"
    wait_until(lambda: log.exists() and log.read_text().count('"saved"') >= saved, _SECONDS, "a backup")


@pytest.mark.slow
@pytest.mark.cluster
def test_training_equals_one_process(run_on, one_process, assert_nothing_is_left) -> None:
    job = run_on(["n9", "n10", "n11"], "-m", "tests.system.fit_program", "{folder}")
    assert job.end(_SECONDS) == 0, job.output
    assert_trained_as(job, one_process, 3)
    # More than the tolerance away: a comparison that cannot fail proves nothing.
    assert max(np.abs(value).max() for name, value in one_process.items() if name.startswith("weight")) > 1e-3
    assert "3 workers on 3 hosts (my-n9: worker 0; my-n10: worker 1; my-n11: worker 2)" in job.output
    assert {path.name for path in (job.folder / "logs").iterdir()} >= {f"worker-{index}.log" for index in range(3)}
    assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.cluster
def test_a_run_that_is_stopped_saves_and_goes_on(run_on, own_hosts, undisturbed, assert_nothing_is_left) -> None:
    options = ("--grace", "60")
    job = run_on(["n9", "n10"], *TRAIN, "{folder}/backup", "1", options=options, here="n9")
    wait_for_training(job)
    job.launch.popen.send_signal(signal.SIGTERM)
    assert job.end(_SECONDS) == 77, job.output
    assert "SIGTERM received and passed on to 2 processes" in job.output
    assert_nothing_is_left()
    again = run_on(["n9", "n10"], *TRAIN, "{folder}/backup", "0", here="n9", folder=job.folder)
    assert again.end(_SECONDS) == 0, again.output
    assert result_of(again) == undisturbed


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_host_that_is_cut_off_is_named_and_the_run_goes_on(run_on, own_hosts, undisturbed) -> None:
    job = run_on(["n9", "n11"], *TRAIN, "{folder}/backup", "0.5")
    wait_for_training(job)
    own_hosts.cut("n11")
    # First TensorFlow ends the processes of the other hosts; the host that has caused it is named all the same.
    wait_until(lambda: "trying again for" in job.output, _SECONDS, "a message")
    lost = (
        r"host my-n11 does not answer any more: no sign of it for \d+ s; it ran worker 1( at step \d+)?; restart 1 of 3"
    )
    assert re.search(
        f"{lost}\n(.*\n)*tfdist: restart 1 of 3: host my-n11 cannot be reached: "
        "ssh says: ssh: connect to host 198.18.77.11 port 22: ",
        job.output,
    )
    own_hosts.join("n11")
    assert job.end(_SECONDS) == 0, job.output
    assert re.search(f"{lost}\n(.*\n)*tfdist: restart 1 of 3: training again after", job.output), job.output
    assert result_of(job) == undisturbed


def test_processes_of_a_host_that_is_cut_off_end_by_themselves(
    run_on, own_hosts, sshds, assert_nothing_is_left
) -> None:
    """No TensorFlow that would notice: the agent does."""
    job = run_on(["n9", "n11"], "--", "sleep", "1000", options=("--max-restarts", "0"))
    wait_until(lambda: len(processes(own_hosts["n11"], "sleep", "1000")) == 1, _SECONDS, "processes")
    own_hosts.cut("n11")
    assert job.end(_SECONDS) == 255, job.output
    assert "tfdist: host my-n11 does not answer any more: no sign of it for " in job.output
    assert not sshds.left(own_hosts["n9"])
    wait_until(lambda: not processes(own_hosts["n11"], "sleep", "1000"), _SECONDS, "the end of all processes there")
    own_hosts.join("n11")


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def processes(host, *command: str) -> list[int]:
    """Those on a host that run a command, and no other of its name: the host has sleeping ones of its own."""
    words = b"".join(f"{word}\0".encode() for word in command)
    return [process for process in host.processes() if read(Path(f"/proc/{process}/cmdline")) == words]
