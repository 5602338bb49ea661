"""The lock on a folder of backups: one training at a time, and none is locked out by one that is dead."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault_tolerance.forked_jobs import SOURCE, ForkedJobs
from tests.fault_tolerance.job import SECONDS, Job
from tests.fault_tolerance.trials import at
from tfdist.checkpoint.lock import FolderInUseError, FolderLock, FolderLostError
from tfdist.checkpoint.store import CheckpointStore
from tfdist.supervision.exit_codes import REFUSED
from tfdist.supervision.identity import own_boot

HOLDER = """
import os, sys, time
from tfdist.checkpoint.lock import FolderLock
lock = FolderLock(sys.argv[1])
child = os.fork()  # it outlives its parent, as a data loader may
if not child: print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """A process that holds a folder, and the id of its child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=SOURCE, stdout=subprocess.PIPE, text=True
    )
    child = int(process.stdout.readline())
    yield process, child
    os.kill(child, signal.SIGKILL)
    process.kill()
    process.wait()
    process.stdout.close()


def test_another_process_holds_it(tmp_path: Path, holder: tuple[subprocess.Popen, int]) -> None:
    process, _ = holder
    began = time.monotonic()
    with pytest.raises(FolderInUseError) as caught:
        FolderLock(str(tmp_path), patience=0.3)
    assert time.monotonic() - began > 0.3
    assert str(caught.value) == (
        f"Received: backup_dir {str(tmp_path)!r}, to which process {process.pid} on {socket.gethostname()} writes the "
        "backups of its training. Expected: one training at a time in a folder. Wait for that one, end it, or pass "
        "another backup_dir."
    )


def test_a_dead_process_holds_nothing(tmp_path: Path, holder: tuple[subprocess.Popen, int]) -> None:
    process, child = holder
    process.kill()
    process.wait()
    os.kill(child, 0)
    lock = FolderLock(str(tmp_path), patience=0.0, elsewhere=0.0)
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n{own_boot()}\n"
    lock.release()
    assert os.listdir(tmp_path) == []


TAKER = """
import pathlib, sys, time
from tfdist.checkpoint.lock import FolderLock
lock = FolderLock(sys.argv[1], patience=0.0)
folder = pathlib.Path(sys.argv[1], "checkpoint-00000001")
folder.mkdir()
(folder / "manifest.json").write_text("theirs")
print("has", flush=True)
sys.stdin.read()
lock.release()
"""


@pytest.mark.parametrize("removed", ["the lock", "the folder"])
def test_who_has_lost_the_folder_leaves_alone_what_is_there(tmp_path: Path, removed: str) -> None:
    folder = tmp_path / "backup"
    folder.mkdir()
    lock = FolderLock(str(folder))
    store = CheckpointStore(folder, max_to_keep=1, guard=lock.check)
    if removed == "the folder":
        store.write({}, {})
        shutil.rmtree(folder)
        folder.mkdir()
    else:
        (folder / ".lock").unlink()
    words = [sys.executable, "-c", TAKER, str(folder)]
    with subprocess.Popen(words, cwd=SOURCE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "has\n"
        theirs = (folder / ".lock").read_text()
        told = rf"another process has taken over the folder {folder}, since \.lock in it was removed\. Let only one"
        with pytest.raises(OSError, match=told):
            store.write({}, {})
        with pytest.raises(FolderLostError, match=told):
            store.clear()
        lock.release()
        assert (folder / ".lock").read_text() == theirs
        assert "FolderInUseError" in other_process(folder).stderr
        assert sorted(os.listdir(folder)) == [".lock", "checkpoint-00000001"]
        process.stdin.close()
        assert process.wait(SECONDS) == 0
    with pytest.raises(FolderLostError):
        lock.check()  # also when that one has ended: it has written newer backups
    assert (folder / "checkpoint-00000001" / "manifest.json").read_text() == "theirs"


def test_a_folder_that_somebody_has_removed_is_taken_again(tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    folder.mkdir()
    lock = FolderLock(str(folder))
    store = CheckpointStore(folder, guard=lock.check)
    before = len(os.listdir("/proc/self/fd"))
    shutil.rmtree(folder)
    store.write({}, {})
    assert "FolderInUseError" in other_process(folder).stderr
    (folder / ".lock").unlink()
    store.write({}, {})
    assert "FolderInUseError" in other_process(folder).stderr
    assert store.names() == ["checkpoint-00000001", "checkpoint-00000002"]
    assert len(os.listdir("/proc/self/fd")) == before
    lock.release()
    assert not (folder / ".lock").exists()


def other_process(folder: Path, script: str = "") -> subprocess.CompletedProcess:
    """What another process says that wants the folder at once."""
    program = (
        f"import sys; from tfdist.checkpoint.lock import FolderLock; {script}\n"
        "FolderLock(sys.argv[1], patience=0.0, elsewhere=0.0); print('had')"
    )
    return subprocess.run(
        [sys.executable, "-c", program, str(folder)], cwd=SOURCE, capture_output=True, text=True, timeout=SECONDS
    )


@pytest.mark.parametrize(
    ("folder", "file"),
    [(0o755, 0o600), (0o2770, 0o660), (0o1777, 0o666)],
)
def test_whoever_may_write_may_lock(tmp_path: Path, folder: int, file: int) -> None:
    path = tmp_path / "backup"
    path.mkdir()
    path.chmod(folder)
    before = os.umask(0o077)
    try:
        lock = FolderLock(str(path))
    finally:
        os.umask(before)
    assert stat.S_IMODE((path / ".lock").stat().st_mode) == file
    lock.release()


def test_nothing_that_a_link_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "backup" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        FolderLock(str(tmp_path / "backup"), patience=0.0)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_machine_that_may_be_dead_is_waited_for(
    tmp_path: Path, holder: tuple[subprocess.Popen, int], caplog: pytest.LogCaptureFixture
) -> None:
    process, _ = holder
    (tmp_path / ".lock").write_text("process 5 on another-host\nanother boot\n")
    began = time.monotonic()
    with pytest.raises(FolderInUseError) as caught:
        FolderLock(str(tmp_path), patience=0.0, elsewhere=0.5)
    assert time.monotonic() - began > 0.5
    assert str(caught.value).endswith(f"or pass another backup_dir. If its machine is dead, remove {tmp_path}/.lock.")
    assert caplog.messages == [f"Waiting for process 5 on another-host, which has the folder {tmp_path}, for up to 0 s"]
    ender = threading.Timer(0.5, process.kill)
    ender.start()
    FolderLock(str(tmp_path), patience=0.0, elsewhere=SECONDS).release()
    ender.join()


def test_without_locks_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning) as caught:
        lock = FolderLock(str(tmp_path), patience=0.2)
    assert [str(warning.message) for warning in caught] == [
        f"The folder {tmp_path} cannot be locked: [Errno 37] No locks available. Nothing keeps a second "
        "training from writing its backups there: start only one, or pass a backup_dir on a file system with locks."
    ]
    lock.release()


JOB = Job(backup={"save_freq": 4, "asynchronous": False}).light


@pytest.mark.nightly
@pytest.mark.slow
def test_two_trainings_in_one_folder(jobs: ForkedJobs, tmp_path: Path) -> None:
    first = jobs.start(JOB.with_(kill={**at(9), "signal_number": int(signal.SIGSTOP)}), tmp_path)
    deadline = time.monotonic() + SECONDS
    while not list(tmp_path.glob("backup/checkpoint-*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    second = jobs.run(JOB, tmp_path)
    first.kill()
    assert first.wait().code == -signal.SIGKILL
    assert second.code == REFUSED, second.log
    pid = first.process.pid
    assert re.search(
        rf"FolderInUseError: Received: backup_dir '{tmp_path}/backup', to which process {pid} on \S+ writes", second.log
    )
    assert second.result["steps of this process"] == 0
    third = jobs.run(JOB, tmp_path)
    assert third.code == 0, third.log
    assert "The fit goes on at step " in third.log
