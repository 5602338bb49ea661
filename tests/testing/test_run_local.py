"""`run_local`: results by rank, exceptions, deadlines and deaths, and no process that outlives it.

Everything once with processes that are started afresh, and once with processes that are forked from a server.
"""

from __future__ import annotations

import contextlib
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

import pytest

import tfdist
from tests.processes import preloaded
from tests.tiers import daily
from tfdist.launcher.local import local_cluster
from tfdist.supervision import events
from tfdist.testing import LocalRunError, run_local

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]


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
    """Fails if a process of the test, or a child of one, still prints into a log two seconds after it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    end = time.monotonic() + 2.0
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


def test_returns_by_rank(start):
    secret = "of the closure"

    def function(text: str) -> tuple:
        cluster = json.loads(os.environ["TF_CONFIG"])
        described = len(cluster["cluster"]["worker"]), cluster["task"]["index"]
        return described, text, secret, os.environ["MORE"], "tensorflow" in sys.modules

    results = run_local(function, 3, args=("argument",), env={"MORE": "yes"}, timeout=30)
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
        (received,) = run_local(function, 1, env={"MORE": "yes"}, timeout=30)
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

    assert run_local(function, 1, devices_per_worker=3, timeout=60) == [3]


def test_an_exception_comes_back_as_the_cause():
    class OwnError(Exception):
        pass

    def function() -> None:
        if rank() == 0:
            time.sleep(1.0)
            raise ValueError("later")
        print("just before")
        raise OwnError("of rank 1", 42)

    began = time.monotonic()
    with pytest.raises(LocalRunError) as error:
        run_local(function, timeout=20)
    assert time.monotonic() - began < 15
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

    results = run_local(function, 3, ps=2, args=("argument",), timeout=30)
    assert results == [("argument", {"chief": 1, "worker": 3, "ps": 2}, "chief")]


def test_a_result_that_cannot_be_pickled():
    def function() -> object:
        return threading.Lock()

    with pytest.raises(LocalRunError) as error:
        run_local(function, 1, timeout=30)
    assert "could not be pickled" in str(error.value.__cause__)


def test_a_function_that_leaves_no_path_to_modules():
    def function() -> str:
        os.chdir("/")
        sys.path.clear()
        return "there"

    assert run_local(function, 1, timeout=30) == ["there"]


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


def test_deadline():
    def function() -> None:
        if rank() == 0:
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("child", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(LocalRunError) as error:
        run_local(function, timeout=3)
    assert 2.5 < time.monotonic() - began < 12
    assert str(error.value).startswith("Rank 1 of 2 did not end.\nKilled after 3 s: rank 1.\n--- rank 0, exit code 0")
    assert "--- rank 1, killed, last lines:\nchild " in str(error.value)
    assert error.value.ranks == (1,)
    assert error.value.__cause__ is None


def test_who_ends_without_a_result_is_blamed():
    def killed() -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def exits_as_a_server() -> None:
        if tfdist.discover().task_type == "ps":
            os._exit(7)
        time.sleep(60)

    for function, tasks, blamed, said, number in (
        (killed, {"workers": 2}, "Rank 1 of 2", "rank 1, exit code -9", 1),
        (exits_as_a_server, {"workers": 1, "ps": 1}, "Ps 0 of 3", "ps 0, exit code 7", 2),
    ):
        with pytest.raises(LocalRunError) as error:
            run_local(function, **tasks, timeout=20)
        assert str(error.value).startswith(f"{blamed} failed.\n")
        assert f"--- {said}, last lines:" in str(error.value)
        assert error.value.ranks[0] == number


def test_an_interrupt_leaves_no_process():
    """Ctrl-C while the function runs."""

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            run_local(lambda: time.sleep(60), timeout=50)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
