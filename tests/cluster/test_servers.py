"""One process that drives the devices of others: real processes, killed and signalled."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import ForkedPopen, forked
from tfdist.cluster import ClusterConfig
from tfdist.cluster.ports import reserve
from tfdist.runtime.servers import ServerWatch, connect, gone

THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "4", "TF_CPP_MIN_LOG_LEVEL": "2"}
# Importing TensorFlow in several processes at once takes its time on a busy machine.
DEADLINE = 120.0
# What follows the death of a process: at once, and on a busy machine later.
SOON = 60.0


class Cluster:
    """Processes of `served_program` in a folder of their own."""

    def __init__(self, folder: Path, what: str, workers: int, ports: tuple[int, ...], ps: int = 0) -> None:
        self.folder = folder
        self.what = what
        self.places = [f"127.0.0.1:{port}" for port in ports]
        self.tasks = [("worker", index) for index in range(workers)]
        jobs = {"worker": self.places}
        if ps:
            self.tasks = [("chief", 0), *self.tasks[:-1], *(("ps", index) for index in range(ps))]
            jobs = {"chief": self.places[:1], "worker": self.places[1:workers], "ps": self.places[workers:]}
        self.config = ClusterConfig(jobs, *self.tasks[0])
        self.processes: list[ForkedPopen | subprocess.Popen[bytes]] = []
        self.former: list[ForkedPopen | subprocess.Popen[bytes]] = []
        for rank in range(len(self.tasks)):
            self.processes.append(self._start(rank))

    def start_again(self, rank: int, **env: str) -> None:
        """Starts another process in the place of one that was killed; its log goes on."""
        self.former.append(self.processes[rank])
        self.former[-1].wait(SOON)
        self.processes[rank] = self._start(rank, **env)

    def _start(self, rank: int, **more: str) -> ForkedPopen | subprocess.Popen[bytes]:
        config = self.config.with_task(*self.tasks[rank]).to_json()
        env = {**os.environ, **THREADS, "TF_CONFIG": config, "PYTHONUNBUFFERED": "1", **more}
        return forked(["-m", "tests.cluster.served_program", self.what], self._log(rank), self.folder, env, rank)

    def log(self, rank: int) -> str:
        return self._log(rank).read_text(errors="replace")

    def told(self) -> list[dict]:
        """What the first process has said."""
        # Whole lines: the last one may still be on its way.
        return [json.loads(line) for line in re.findall(r"^\{.*\n", self.log(0), re.MULTILINE)]

    def said(self, rank: int) -> list[str]:
        """What tfdist has said in a process, but for whom it waits for: on a busy machine it waits for some time."""
        return re.findall(r"^tfdist: (?!waiting for ).*\n", self.log(rank), re.MULTILINE)

    def wait_until(self, condition: Callable[[], object], deadline: float = DEADLINE) -> None:
        end = time.monotonic() + deadline
        while not condition():
            assert time.monotonic() < end, f"waited {deadline} s in vain"
            time.sleep(0.02)

    def code(self, rank: int, deadline: float = SOON) -> int:
        """How a process has ended."""
        try:
            return self.processes[rank].wait(deadline)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.tasks[rank]} did not end within {deadline} s")

    def stop(self) -> None:
        (self.folder / "stop").touch()

    def clean_up(self, show: bool) -> None:
        """Ends every process, that with rank 0 first."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.former:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for rank, process in enumerate(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(SOON)
            if show:
                print(f"--- {self.tasks[rank]}, exit code {process.returncode}\n{self.log(rank)[-4000:]}")

    def _log(self, rank: int) -> Path:
        return self.folder / f"log-{rank}"


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Cluster]]:
    """`start(what, workers, ps=0)` starts a cluster; the workers include a chief."""
    failed_before = request.session.testsfailed
    clusters: list[Cluster] = []
    with contextlib.ExitStack() as stack:

        def begin(what: str, workers: int, ps: int = 0) -> Cluster:
            ports = stack.enter_context(reserve(workers + ps)).ports
            clusters.append(Cluster(tmp_path, what, workers, ports, ps))
            return clusters[-1]

        yield begin
        for cluster in clusters:
            cluster.clean_up(show=request.session.testsfailed > failed_before)


pytestmark = pytest.mark.cluster


@pytest.mark.slow
def test_a_step_across_servers_and_a_quiet_end(start) -> None:
    cluster = start("steps", 3)
    devices, other, first = told_so_far(cluster, 3)
    assert devices == {
        "devices": [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(3)],
        "again": True,
    }
    assert other["other"].startswith("Received: worker 0, rank 0 of 2; cluster: worker 0 (127.0.0.1:1)")
    assert "which this process has joined already" in other["other"]
    assert first == {"sums": [20000.0] * 3}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        cluster.processes[1].send_signal(number)
    refusal = f"received: worker 1 ({cluster.places[1]}) serves until worker 0 ({cluster.places[0]}) has ended\n"
    cluster.wait_until(lambda: cluster.log(1).count(refusal) == 3, SOON)
    cluster.stop()
    assert [cluster.code(rank) for rank in (0, 1, 2)] == [0, 0, 0]
    assert cluster.told()[-1] == {"sums": [20000.0]}
    assert cluster.said(0) == []
    end = f"tfdist: worker 0 ({cluster.places[0]}) has ended, and worker 2 ({cluster.places[2]}) ends as well\n"
    assert cluster.log(2).count(end) == 1


@pytest.mark.slow
def test_a_killed_server_ends_the_step_and_is_named_and_servers_end_with_a_killed_chief(start) -> None:
    cluster = start("endless", 3)
    assert told_so_far(cluster, 1) == [{"running": True}]
    cluster.processes[2].kill()
    cluster.wait_until(lambda: len(cluster.told()) == 3, SOON)
    assert all(step["raised"] in ("UnavailableError", "AbortedError") for step in cluster.told()[1:])
    cluster.wait_until(lambda: cluster.said(0), SOON)  # a thread says it, beside the steps
    assert cluster.said(0) == [f"tfdist: {gone(f'worker 2 ({cluster.places[2]})', 'stage 2', '')}\n"]
    assert cluster.processes[1].poll() is None
    cluster.processes[0].kill()
    assert cluster.code(1) == 0


def told_so_far(cluster: Cluster, count: int) -> list[dict]:
    """What the chief has said once it has said so much."""
    cluster.wait_until(lambda: len(cluster.told()) >= count or cluster.processes[0].poll() is not None)
    return cluster.told()


@pytest.mark.slow
def test_a_worker_that_comes_back_serves_again_and_a_parameter_server_that_is_killed_is_told(start) -> None:
    cluster = start("pool", 2, ps=1)
    read, other, same = told_so_far(cluster, 3)
    assert read == {"read": [21.0]}
    for refused in (other, same):
        assert "which this process has joined already" in refused["other"]
    own, chief = f"worker 0 ({cluster.places[1]})", f"chief 0 ({cluster.places[0]})"
    first = f"tfdist: {own} serves {chief}, as process {cluster.processes[1].pid}\n"
    cluster.wait_until(lambda: first in cluster.log(1), SOON)
    cluster.processes[1].kill()
    cluster.start_again(1, TFDIST_REPLACEMENT="1")
    assert told_so_far(cluster, 6)[3:] == [{"gone": "worker 0"}, {"back": "worker 0"}, {"read": [21.0]}]
    second = f"tfdist: {own} serves {chief} again, as process {cluster.processes[1].pid}\n"
    cluster.wait_until(lambda: second in cluster.log(1), SOON)
    assert cluster.said(1) == [first, second]
    cluster.processes[2].kill()
    assert told_so_far(cluster, 7)[6] == {"gone": "ps 0"}
    cluster.stop()
    assert [cluster.code(rank) for rank in (0, 1)] == [0, 0]
    assert cluster.log(1).count(f"tfdist: {chief} has ended, and {own} ends as well\n") == 1


@pytest.mark.nightly
@pytest.mark.slow
def test_the_chief_of_a_former_job_does_not_make_a_worker_miss_its_own(start) -> None:
    cluster = start("pool", 2, ps=1)
    own, chief = f"worker 0 ({cluster.places[1]})", f"chief 0 ({cluster.places[0]})"
    waits = f"{chief} has ended, soon after {own} had come back; {own} waits for another job"
    for job in range(2):
        assert told_so_far(cluster, 6 * job + 3)[6 * job] == {"read": [21.0]}
        cluster.processes[1].kill()
        cluster.start_again(1)
        assert told_so_far(cluster, 6 * job + 6)[-3:] == [{"gone": "worker 0"}, {"back": "worker 0"}, {"read": [21.0]}]
        cluster.processes[0].kill()
        cluster.wait_until(lambda number=job: cluster.log(1).count(waits) == number + 1, SOON)
        assert cluster.code(2) == 0
        if job == 0:
            for rank in (0, 2):
                cluster.start_again(rank)
    cluster.processes[1].terminate()
    assert cluster.code(1) == -signal.SIGTERM


def test_a_single_task_needs_no_servers() -> None:
    for cluster in (ClusterConfig.single_process(), ClusterConfig({"worker": ["127.0.0.1:2222"]})):
        (device,) = connect(cluster, 1.0)
        assert re.fullmatch(r"/job:localhost/replica:0/task:0/device:(CPU|GPU):0", device)


# --- How the end of a process is noticed ------------------------------------------------------------------------------


class Watched:
    """A `ServerWatch` over a listener of the test."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(SOON)
        self.watch = ServerWatch(f"127.0.0.1:{self.listener.getsockname()[1]}")
        self.is_over = threading.Event()

    def begin(self) -> socket.socket:
        assert self.watch.reach(within=SOON)
        threading.Thread(target=lambda: (self.watch.wait(), self.is_over.set()), daemon=True).start()
        return self.accept()

    def accept(self) -> socket.socket:
        return self.listener.accept()[0]


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.listener.close()


def test_a_server_that_hangs_up_is_called_again(watched: Watched) -> None:
    connection = watched.begin()
    for _ in range(3):
        connection.sendall(b"\0\0\x18\x04")
        connection.close()
        connection = watched.accept()
        assert not watched.is_over.wait(0.1)
    watched.listener.close()
    connection.close()
    assert watched.is_over.wait(SOON)


def test_the_chief_of_another_job_at_the_same_address_is_somebody_else(watched: Watched) -> None:
    connection = watched.begin()
    connection.close()
    with watched.accept() as connection:
        connection.sendall(b'{"roll_call": 1}\n')
        assert watched.is_over.wait(SOON)


def test_a_server_is_waited_for() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # nobody listens there yet, and nobody else can
        watch = ServerWatch(f"127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        assert not watch.reach(within=0.3)
        assert time.monotonic() - start >= 0.3
        later = threading.Timer(0.3, server.listen)
        later.start()
        assert watch.reach(within=SOON)
        later.join()
