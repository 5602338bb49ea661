"""`run_local`: results by rank, exceptions, deadlines and deaths, and no process that outlives it.

Everything once with processes that are started afresh, and once with processes that are forked from a server.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

import tfdist
from tests.processes import preloaded
from tests.tiers import daily
from tfdist.atomic_files import write_atomically
from tfdist.launcher.local import local_cluster
from tfdist.supervision import events
from tfdist.testing import LocalRunError, run_local

pytestmark = pytest.mark.cluster

# In seconds: a run that does not end before its time is over is ended by the timeout of its test.
TOO_LONG = 3600.0


@pytest.fixture(params=daily(["afresh", "forked"], "forked"), autouse=True)
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the processes are started."""
    if request.param == "forked":
        preloaded()
    else:
        monkeypatch.setattr(local_cluster, "fork", lambda *_: None)
    return request.param


@pytest.fixture(autouse=True)
def nothing_is_left(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails if a process of the test, or a child of one, goes on printing into a log after it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    end = time.monotonic() + 60.0
    while found := printing_below(tmp_path):
        assert time.monotonic() < end, f"processes {found} are still there"
        time.sleep(0.02)


def printing_below(folder: Path) -> list[int]:
    """The processes whose standard output is a file below a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "fd" / "1").startswith(f"{folder}/"):
                found.append(int(entry.name))
    return found


def rank() -> int:
    return tfdist.discover().rank


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def test_returns_by_rank(start):
    secret = "of the closure"

    def function(text: str) -> tuple:
        cluster = json.loads(os.environ["TF_CONFIG"])
        described = len(cluster["cluster"]["worker"]), cluster["task"]["index"]
        return described, text, secret, os.environ["MORE"], "tensorflow" in sys.modules

    results = run_local(function, 3, args=("argument",), env={"MORE": "yes"})
    assert results == [((3, i), "argument", secret, "yes", start == "forked") for i in range(3)]


def test_a_process_is_like_a_fresh_one(start, tmp_path, monkeypatch):
    """Its folder, cores, group, open files and path of modules are those that the caller gives it."""

    def function() -> dict:
        return {
            "folder": os.getcwd(),
            "cores": sorted(os.sched_getaffinity(0)),
            "leads its group": os.getpgid(0) == os.getpid() == os.getsid(0),
            "parent": os.getppid(),
            "files": sorted(os.listdir("/proc/self/fd")),
            "input": os.readlink("/proc/self/fd/0"),
            "output": os.readlink("/proc/self/fd/1").partition(":")[0],
            "path": sys.path,
            "variables": {name: os.environ.get(name) for name in ("MORE", "AROUND", events.VARIABLE, "PATH")},
        }

    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/somewhere")
    monkeypatch.setenv("AROUND", "of this process")
    monkeypatch.setenv(events.VARIABLE, "of a run around it")
    os.sched_setaffinity(0, cores[:1])
    try:
        (received,) = run_local(function, 1, env={"MORE": "yes"})
    finally:
        os.sched_setaffinity(0, cores)
    assert received == {
        "folder": str(tmp_path),
        "cores": cores[:1],
        "leads its group": True,
        "parent": os.getpid(),
        "files": ["0", "1", "2", "3"],  # 3: the folder that is listed
        "input": "/dev/null",
        "output": "pipe",
        "path": sys.path,
        "variables": {"MORE": "yes", "AROUND": "of this process", events.VARIABLE: None, "PATH": os.environ["PATH"]},
    }


def test_logical_devices():
    def function() -> int:
        import tensorflow as tf

        return len(tf.config.list_logical_devices("CPU"))

    assert run_local(function, 1, devices_per_worker=3) == [3]


def test_an_exception_comes_back_as_the_cause(tmp_path):
    class OwnError(Exception):
        pass

    def function() -> None:
        # Rank 1 has the lock until its process has ended.
        lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
        if rank() == 0:
            wait_for(tmp_path / "locked")
            fcntl.flock(lock, fcntl.LOCK_EX)
            raise ValueError("later")
        fcntl.flock(lock, fcntl.LOCK_EX)
        (tmp_path / "locked").touch()
        print("just before")
        raise OwnError("of rank 1", 42)

    with pytest.raises(LocalRunError) as error:
        run_local(function)
    # The class travels by value: it is equal in all but identity.
    assert type(error.value.__cause__).__name__ == "OwnError"
    assert error.value.__cause__.args == ("of rank 1", 42)
    assert error.value.ranks[0] == 1
    message = str(error.value)
    assert message.startswith("Rank 1 of 2 failed.\n")
    assert "--- rank 1, exit code 1, last lines:\njust before\nTraceback" in message
    assert "OwnError: ('of rank 1', 42)" in message


def test_parameter_servers():
    """The chief returns; the others serve, and end by themselves."""

    def function(text: str) -> tuple:
        cluster = tfdist.discover()
        if not cluster.is_chief:
            os._exit(0)
        return text, {job: len(places) for job, places in cluster.jobs.items()}, cluster.task_type

    results = run_local(function, 3, ps=2, args=("argument",))
    assert results == [("argument", {"chief": 1, "worker": 3, "ps": 2}, "chief")]


def test_a_result_that_cannot_be_pickled():
    def function() -> object:
        return threading.Lock()

    with pytest.raises(LocalRunError) as error:
        run_local(function, 1)
    assert "could not be pickled" in str(error.value.__cause__)


def test_a_function_that_leaves_no_path_to_modules():
    def function() -> str:
        os.chdir("/")
        sys.path.clear()
        return "there"

    assert run_local(function, 1) == ["there"]


def test_the_end_of_a_process_is_that_of_a_script(tmp_path: Path):
    """Threads come to their end, and exit handlers run, also after an exception: nothing of a user is lost."""

    def function(fails: bool) -> None:
        import atexit

        def last() -> None:
            threading.main_thread().join()
            (tmp_path / "thread").touch()

        threading.Thread(target=last).start()
        atexit.register(print, "last words", end="")
        print("an open line", end="", file=sys.stderr)
        if fails:
            raise ValueError
        atexit.register((tmp_path / "handler").touch)

    assert run_local(function, 1, args=(False,), timeout=60) == [None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["handler", "thread"]
    (tmp_path / "thread").unlink()
    with pytest.raises(LocalRunError, match=r"(?s)an open line.*ValueError\nlast words$"):
        run_local(function, 1, args=(True,), timeout=60)
    assert (tmp_path / "thread").exists()


def test_deadline(tmp_path, monkeypatch):
    ended, printed = tmp_path / "pid of who ends", tmp_path / "printed"

    def function() -> None:
        if rank() == 0:
            write_atomically(str(ended), str(os.getpid()).encode())
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("child", subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid)
        printed.touch()
        signal.pause()

    def clock() -> float:
        """Time is up when rank 1 has printed, and nothing is left of rank 0."""
        is_up = printed.exists() and ended.exists() and not Path("/proc", ended.read_text()).exists()
        return TOO_LONG if is_up else 0.0

    # `run_local` asks for the time whenever it looks after its processes.
    monkeypatch.setattr(local_cluster, "time", mock.Mock(wraps=time, monotonic=clock))
    with pytest.raises(LocalRunError) as error:
        run_local(function, timeout=5)
    assert str(error.value).startswith("Rank 1 of 2 did not end.\nKilled after 5 s: rank 1.\n--- rank 0, exit code 0")
    assert "--- rank 1, killed, last lines:\nchild " in str(error.value)
    assert error.value.ranks == (1,)
    assert error.value.__cause__ is None


def test_who_ends_without_a_result_is_blamed():
    def killed() -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    def exits_as_a_server() -> None:
        if tfdist.discover().task_type == "ps":
            os._exit(7)
        signal.pause()

    for function, tasks, blamed, said, number in (
        (killed, {"workers": 2}, "Rank 1 of 2", "rank 1, exit code -9", 1),
        (exits_as_a_server, {"workers": 1, "ps": 1}, "Ps 0 of 3", "ps 0, exit code 7", 2),
    ):
        with pytest.raises(LocalRunError) as error:
            run_local(function, **tasks, timeout=TOO_LONG)
        assert str(error.value).startswith(f"{blamed} failed.\n")
        assert f"--- {said}, last lines:" in str(error.value)
        assert error.value.ranks[0] == number


def test_an_interrupt_leaves_no_process(tmp_path, monkeypatch):
    """Ctrl-C while the function runs."""

    def function() -> None:
        (tmp_path / f"runs-{rank()}").touch()
        signal.pause()

    def clock() -> float:
        if len(list(tmp_path.glob("runs-*"))) == 2:
            raise KeyboardInterrupt
        return 0.0

    # `run_local` asks for the time whenever it looks after its processes.
    monkeypatch.setattr(local_cluster, "time", mock.Mock(wraps=time, monotonic=clock))
    with pytest.raises(KeyboardInterrupt):
        run_local(function)
