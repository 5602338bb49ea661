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

from tests.launcher.conftest import WarmLaunch
from tests.processes import ForkedPopen, forked
from tests.tiers import daily
from tfdist.cluster import ClusterConfig
from tfdist.cluster.ports import reserve
from tfdist.runtime.server_process import ServerWatch
from tfdist.runtime.servers import connect, gone

THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "4", "TF_CPP_MIN_LOG_LEVEL": "2"}
# Importing TensorFlow in several processes at once takes its time on a busy machine.
DEADLINE = 120.0
# What has to follow the death of a process soon.
SOON = 10.0


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
        return [json.loads(line) for line in self.log(0).splitlines() if line.startswith("{")]

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
            process.wait(5)
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
    cluster.wait_until(lambda: len(cluster.told()) >= 3 or cluster.processes[0].poll() is not None)
    devices, other, first = cluster.told()
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
    assert cluster.code(0) == 0
    ended = time.monotonic()
    assert [cluster.code(rank) for rank in (1, 2)] == [0, 0]
    assert time.monotonic() - ended < 5.0
    assert cluster.told()[-1] == {"sums": [20000.0]}
    assert "tfdist:" not in cluster.log(0)
    end = f"tfdist: worker 0 ({cluster.places[0]}) has ended, and worker 2 ({cluster.places[2]}) ends as well\n"
    assert cluster.log(2).count(end) == 1


@pytest.mark.slow
def test_a_killed_server_ends_the_step_and_is_named(start) -> None:
    cluster = start("endless", 3)
    cluster.wait_until(lambda: cluster.told() or cluster.processes[0].poll() is not None)
    assert cluster.told() == [{"running": True}]
    killed = time.time()
    cluster.processes[2].kill()
    cluster.wait_until(lambda: len(cluster.told()) == 3, SOON)
    _, first, second = cluster.told()
    assert first["raised"] in ("UnavailableError", "AbortedError")
    assert 0.0 < first["at"] - killed < 5.0
    assert second["at"] - first["at"] < 5.0
    lines = [line for line in cluster.log(0).splitlines() if line.startswith("tfdist:")]
    assert lines == [f"tfdist: {gone(f'worker 2 ({cluster.places[2]})', 'stage 2', '')}"]
    assert cluster.processes[1].poll() is None
    cluster.stop()
    assert [cluster.code(rank) for rank in (0, 1)] == [0, 0]


@pytest.mark.slow
def test_servers_end_with_a_killed_chief(start) -> None:
    cluster = start("endless", 3)
    cluster.wait_until(lambda: cluster.told() or cluster.processes[0].poll() is not None)
    cluster.processes[0].kill()
    killed = time.monotonic()
    assert [cluster.code(rank) for rank in (1, 2)] == [0, 0]
    assert time.monotonic() - killed < 5.0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_server_that_does_not_come_up_is_named(start) -> None:
    cluster = start("absent", 2)
    cluster.wait_until(lambda: cluster.told() or cluster.processes[0].poll() is not None)
    (told,) = cluster.told()
    assert told["error"] == (
        f"no TensorFlow server within start_timeout=6 s: worker 1 ({cluster.places[1]}); "
        "look into their output for why not"
    )
    assert 5.9 < told["seconds"] < 9.0


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., WarmLaunch]]:
    """Starts `tfdist run` with `served_program`."""
    launches: list[WarmLaunch] = []

    def start(what: str, *options: str) -> WarmLaunch:
        shape = () if "--ps" in options else ("--stages", "2", "--no-warm")
        program = ("-m", "tests.cluster.served_program", what)
        launches.append(WarmLaunch(tmp_path, ["run", *shape, "--log-dir", "logs", *options, *program], {}))
        return launches[-1]

    yield start
    for launch in launches:
        launch.clean_up()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_launcher_restarts_all_after_a_server_was_killed(launched) -> None:
    result = launched("restarted", "--max-restarts", "1").finish(DEADLINE)
    assert result.code == 0, result.err
    lines = [line.removeprefix("[worker 0] ") for line in result.out.splitlines()]
    told = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(step["restart"], step["step"], step["sum"]) for step in told] == [
        ("0", 1, 10000.0),
        ("1", 1, 10000.0),
        ("1", 2, 10000.0),
        ("1", 3, 10000.0),
    ]
    assert re.search(
        r"tfdist: worker 1 was killed by SIGKILL at step 1; restart 1 of 1\n"
        r"tfdist: restart 1 of 1: training again after",
        result.err,
    )
    # The launcher kills it at once, perhaps before it has said so; test_a_killed_server_... is about that.
    for line in (line for line in lines if line.startswith("tfdist: worker 1")):
        assert re.match(
            r"tfdist: worker 1 \(127\.0\.0\.1:\d+\), which holds stage 1, is gone; /.*/logs/worker-1\.log ", line
        )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_preempted_chief_can_save_what_the_servers_hold(launched, tmp_path: Path) -> None:
    launch = launched("preempted")
    launch.wait_for_file("ready", deadline=DEADLINE)
    launch.popen.send_signal(signal.SIGTERM)
    result = launch.finish(DEADLINE)
    assert result.code == 77, result.err
    assert '[worker 0] {"saved": 10000.0}\n' in result.out
    assert "is gone" not in result.out
    assert "SIGTERM received: worker 1" in (tmp_path / "logs/worker-1.log").read_text()


def told_so_far(cluster: Cluster, count: int) -> list[dict]:
    """What the chief has said once it has said so much."""
    cluster.wait_until(lambda: len(cluster.told()) >= count or cluster.processes[0].poll() is not None)
    return cluster.told()


@pytest.mark.slow
def test_a_worker_that_comes_back_serves_again(start) -> None:
    cluster = start("pool", 2, ps=1)
    read, other, same = told_so_far(cluster, 3)
    assert read == {"read": [21.0]}
    for refused in (other, same):
        assert "which this process has joined already" in refused["other"]
    own, chief = f"worker 0 ({cluster.places[1]})", f"chief 0 ({cluster.places[0]})"
    cluster.wait_until(
        lambda: f"tfdist: {own} serves {chief}, as process {cluster.processes[1].pid}\n" in cluster.log(1), SOON
    )
    cluster.processes[1].kill()
    cluster.start_again(1, TFDIST_REPLACEMENT="1")
    assert told_so_far(cluster, 6)[3:] == [{"gone": "worker 0"}, {"back": "worker 0"}, {"read": [21.0]}]
    cluster.wait_until(
        lambda: f"tfdist: {own} serves {chief} again, as process {cluster.processes[1].pid}\n" in cluster.log(1), SOON
    )
    assert cluster.log(1).count("tfdist: ") == 2
    cluster.processes[1].kill()  # once more: a replacement is watched as well
    cluster.start_again(1, TFDIST_REPLACEMENT="2")
    assert told_so_far(cluster, 9)[6:] == [{"gone": "worker 0"}, {"back": "worker 0"}, {"read": [21.0]}]
    cluster.stop()
    assert cluster.code(0) == 0
    ended = time.monotonic()
    assert [cluster.code(rank) for rank in (1, 2)] == [0, 0]
    assert time.monotonic() - ended < 5.0
    assert cluster.log(2).count(f"tfdist: {chief} has ended, and ps 0 ({cluster.places[2]}) ends as well\n") == 1
    assert cluster.log(1).count(f"tfdist: {chief} has ended, and {own} ends as well\n") == 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_chief_of_a_former_job_does_not_make_a_worker_miss_its_own(start) -> None:
    cluster = start("pool", 2, ps=1)
    told_so_far(cluster, 3)
    cluster.processes[1].kill()
    cluster.start_again(1)
    assert told_so_far(cluster, 6)[3:] == [{"gone": "worker 0"}, {"back": "worker 0"}, {"read": [21.0]}]
    cluster.processes[0].kill()
    own, chief = f"worker 0 ({cluster.places[1]})", f"chief 0 ({cluster.places[0]})"
    waits = f"{chief} has ended, soon after {own} had come back; {own} waits for another job"
    cluster.wait_until(lambda: waits in cluster.log(1), SOON)
    assert cluster.code(2) == 0
    for rank in (0, 2):
        cluster.start_again(rank)
    assert told_so_far(cluster, 9)[6] == {"read": [21.0]}
    cluster.stop()
    assert [cluster.code(rank) for rank in (0, 1, 2)] == [0, 0, 0]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_worker_that_waits_for_another_job_can_be_ended(start) -> None:
    cluster = start("pool", 2, ps=1)
    told_so_far(cluster, 3)
    cluster.processes[1].kill()
    cluster.start_again(1)
    told_so_far(cluster, 6)
    cluster.stop()
    assert [cluster.code(rank) for rank in (0, 2)] == [0, 0]
    cluster.wait_until(lambda: "waits for another job" in cluster.log(1), SOON)
    time.sleep(0.5)  # it obeys signals again right after it has said so
    cluster.processes[1].terminate()
    assert cluster.code(1) == -signal.SIGTERM


@pytest.mark.slow
def test_a_killed_parameter_server_is_told(start) -> None:
    cluster = start("pool", 2, ps=1)
    told_so_far(cluster, 3)
    cluster.processes[2].kill()
    assert told_so_far(cluster, 4)[3] == {"gone": "ps 0"}
    cluster.stop()
    assert [cluster.code(rank) for rank in (0, 1)] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("warm", daily(["--warm", "--no-warm"], "--no-warm"))
def test_the_launcher_replaces_a_worker_alone(launched, tmp_path: Path, warm: str) -> None:
    result = launched("replaced", "-n", "2", "--ps", "1", warm).finish(DEADLINE)
    assert result.code == 0, result.err
    lines = [line for line in result.out.splitlines() if line.startswith("[chief 0] {")]
    told = [json.loads(line.removeprefix("[chief 0] ")) for line in lines]
    first, gone_, back, second = told
    assert (first, second) == ({"read": [21.0, 22.0]}, {"read": [21.0, 22.0]})
    assert (gone_, back) == ({"gone": "worker 1"}, {"back": "worker 1"})
    assert result.err.splitlines()[1:] == [
        "tfdist: worker 1 was killed by SIGKILL (logs/worker-1.log); started again (replacement 1 of 3), "
        "the others go on"
    ]
    log = (tmp_path / "logs/worker-1.log").read_text()
    former, _, latter = log.partition("--- replacement 1 ---\n")
    assert re.search(r"^tfdist: worker 1 \(\S+\) serves chief 0 \(\S+\), as process \d+$", former, re.M)
    assert re.search(r"^tfdist: worker 1 \(\S+\) serves chief 0 \(\S+\) again, as process \d+$", latter, re.M)
    assert "has ended, and worker 1" in latter
    assert "replacement" not in (tmp_path / "logs/worker-0.log").read_text()


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
    assert watched.is_over.wait(2.0)


def test_a_reset_is_an_end_too(watched: Watched) -> None:
    connection = watched.begin()
    watched.listener.close()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    assert watched.is_over.wait(2.0)


def test_the_chief_of_another_job_at_the_same_address_is_somebody_else(watched: Watched) -> None:
    connection = watched.begin()
    connection.close()
    with watched.accept() as connection:
        connection.sendall(b'{"roll_call": 1}\n')
        assert watched.is_over.wait(2.0)


def test_a_server_is_waited_for(watched: Watched) -> None:
    place = watched.listener.getsockname()
    watched.listener.close()
    start = time.monotonic()
    assert not watched.watch.reach(within=0.3)
    assert 0.3 <= time.monotonic() - start < 1.0
    later = threading.Timer(0.3, lambda: setattr(watched, "listener", socket.create_server(place)))
    later.start()
    assert watched.watch.reach(within=SOON)
    later.join()


def test_what_is_said_of_a_server_that_is_gone() -> None:
    assert gone("worker 1 (b:1)", "stage 1", "/logs/worker-1.log") == (
        "worker 1 (b:1), which holds stage 1, is gone; /logs/worker-1.log may tell why. With "
        "tfdist.callbacks.BackupAndRestore a run goes on from its last backup when it is started again, which "
        "`tfdist run` does by itself (--max-restarts)"
    )
    assert gone("worker 1 (b:1)", "", "").startswith("worker 1 (b:1) is gone; its output may tell why.")
