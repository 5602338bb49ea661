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
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault_tolerance.forked_jobs import SECONDS, SOURCE, ForkedJobs
from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import at
from tfdist.checkpoint.folder_lock import FolderInUseError, FolderLock, _is_alive_here
from tfdist.supervision.identity import Identity

HOLDER = """
import os, sys, time
from tfdist.checkpoint.folder_lock import FolderLock
lock = FolderLock(sys.argv[1])
child = os.fork()  # it outlives its parent, as a data loader may
if not child: print(os.getpid(), flush=True)
time.sleep(60)
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


def test_a_process_that_takes_the_place_of_a_dead_one_is_not_that_one() -> None:
    """In containers, both have the same number on a host of the same name; the file server may still keep the lock."""
    own = Identity.of(os.getpid())
    name = f"process {os.getpid()} on {socket.gethostname()}"
    assert _is_alive_here(f"{name}\n{own.start} {own.boot}")
    assert not any(map(_is_alive_here, [name, f"{name}\n{own.start - 1} {own.boot}", f"{name}\n{own.start} other"]))


@pytest.mark.parametrize("lack", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_it_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: int) -> None:
    opened = os.open

    def refuse(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(lack, os.strerror(lack), path)
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(RuntimeWarning, match="cannot be locked"):
        FolderLock(str(tmp_path)).release()


def test_a_file_that_was_just_removed_elsewhere_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, stale = os.stat, [True, True]

    def fail_twice(path: object, *args: object, **options: object) -> os.stat_result:
        if str(path).endswith(".lock") and stale:
            stale.pop()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stat(path, *args, **options)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "stat", fail_twice)
    lock = FolderLock(str(tmp_path))
    assert not stale and len(os.listdir("/proc/self/fd")) == before + 1
    lock.release()


def test_another_process_holds_it(tmp_path: Path, holder: tuple[subprocess.Popen, int]) -> None:
    process, _ = holder
    began = time.monotonic()
    with pytest.raises(FolderInUseError) as caught:
        FolderLock(str(tmp_path), patience=0.3)
    assert 0.3 < time.monotonic() - began < 2.0
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
    own = Identity.of(os.getpid())
    named = f"process {os.getpid()} on {socket.gethostname()}\n{own.start} {own.boot}\n"
    assert (tmp_path / ".lock").read_text() == named
    lock.release()
    assert os.listdir(tmp_path) == []


def test_it_is_had_as_soon_as_it_is_released(tmp_path: Path, holder: tuple[subprocess.Popen, int]) -> None:
    process, _ = holder
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(FolderInUseError):
        FolderLock(str(tmp_path), patience=0.0)
    subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({process.pid}, 9)"]).wait()
    FolderLock(str(tmp_path)).release()


def test_one_process_may_come_back(tmp_path: Path) -> None:
    first, again = FolderLock(str(tmp_path)), FolderLock(str(tmp_path / "." / ""), patience=0.0)
    again.release()
    first.release()
    assert os.listdir(tmp_path) == []


def other_process(folder: Path, script: str = "") -> subprocess.CompletedProcess:
    """What another process says that wants the folder at once."""
    program = (
        f"import sys; from tfdist.checkpoint.folder_lock import FolderLock; {script}\n"
        "FolderLock(sys.argv[1], patience=0.0, elsewhere=0.0); print('had')"
    )
    return subprocess.run(
        [sys.executable, "-c", program, str(folder)], cwd=SOURCE, capture_output=True, text=True, timeout=SECONDS
    )


def test_a_copy_of_the_folder_does_not_let_go_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    folder.mkdir()
    lock = FolderLock(str(folder))
    shutil.copytree(folder, tmp_path / "copy")
    assert (tmp_path / "copy" / ".lock").read_text() == (folder / ".lock").read_text()
    assert "FolderInUseError" in other_process(folder).stderr
    lock.release()
    assert other_process(folder).stdout == "had\n"


def test_a_lock_of_an_earlier_version_counts(tmp_path: Path) -> None:
    with open(tmp_path / ".lock", "w") as file:
        file.write("process 1 on here")
        file.flush()
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert "to which process 1 on here writes" in other_process(tmp_path).stderr


@pytest.mark.parametrize(
    ("folder", "file"),
    [(0o700, 0o600), (0o755, 0o600), (0o775, 0o660), (0o2770, 0o660), (0o777, 0o666), (0o1777, 0o666)],
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


def as_nobody(folder: Path) -> str:
    """What a user without rights gets who wants the folder; a fork, since that user may see none of our files."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = "nothing"
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            FolderLock(str(folder), patience=0.0, elsewhere=0.0).release()
            text = "had"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, text.encode())
            os._exit(0)
    os.close(write)
    with open(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A folder to which all users may write, in a folder that all may enter."""
    with tempfile.TemporaryDirectory(prefix="tfdist-test-") as outer:
        os.chmod(outer, 0o711)
        folder = Path(outer, "backup")
        folder.mkdir()
        folder.chmod(0o777)
        yield folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_other_users_find_it_locked(everybodys: Path) -> None:
    lock = FolderLock(str(everybodys))
    assert f"FolderInUseError: Received: backup_dir '{everybodys}', to which process {os.getpid()} " in as_nobody(
        everybodys
    )
    lock.release()
    assert as_nobody(everybodys) == "had"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_who_may_write_and_not_lock_is_told(everybodys: Path) -> None:
    (everybodys / ".lock").touch(0o644)
    assert as_nobody(everybodys) == (
        "PermissionError: [Errno 13] Permission denied: this user may write to the folder, but may not lock it, so "
        "that another training might write at the same time. If none uses the folder, remove the file: "
        f"'{everybodys}/.lock'"
    )
    everybodys.chmod(0o755)
    assert as_nobody(everybodys) == "had"  # nothing can be written there


def test_nothing_that_a_link_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "backup" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        FolderLock(str(tmp_path / "backup"), patience=0.0)
    assert (tmp_path / "mine").read_text() == "mine"
    (tmp_path / "backup" / ".lock").unlink()
    os.mkfifo(tmp_path / "backup" / ".lock")
    with pytest.raises(OSError, match="it is there, and is not a file"):
        FolderLock(str(tmp_path / "backup"), patience=0.0)


def test_a_machine_that_may_be_dead_is_waited_for(
    tmp_path: Path, holder: tuple[subprocess.Popen, int], caplog: pytest.LogCaptureFixture
) -> None:
    process, _ = holder
    (tmp_path / ".lock").write_text("process 5 on another-host")
    began = time.monotonic()
    with pytest.raises(FolderInUseError) as caught:
        FolderLock(str(tmp_path), patience=0.0, elsewhere=0.5)
    assert time.monotonic() - began > 0.5
    assert str(caught.value).endswith(
        f"or pass another backup_dir. If its machine is dead, remove {tmp_path}/.lock: the file server has kept the "
        "lock for the 0 s that this process has waited."
    )
    assert caplog.messages == [f"Waiting for process 5 on another-host, which has the folder {tmp_path}, for up to 0 s"]
    ender = threading.Timer(0.5, process.kill)
    ender.start()
    FolderLock(str(tmp_path), patience=0.0, elsewhere=SECONDS).release()
    ender.join()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.warns(RuntimeWarning) as caught:
        lock = FolderLock(str(tmp_path), patience=0.2)
    assert [str(warning.message) for warning in caught] == [
        f"The folder {tmp_path} cannot be locked: [Errno {number}] {os.strerror(number)}. Nothing keeps a second "
        "training from writing its backups there: start only one, or pass a backup_dir on a file system with locks."
    ]
    lock.release()


def test_a_service_for_locks_that_starts_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = fcntl.fcntl, []

    def late(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) < 3:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return original(*arguments)

    monkeypatch.setattr(fcntl, "fcntl", late)
    lock = FolderLock(str(tmp_path))
    assert "FolderInUseError" in other_process(tmp_path).stderr
    lock.release()


def test_a_file_system_with_locks_of_posix_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", unknown)
    lock = FolderLock(str(tmp_path))
    assert "FolderInUseError" in other_process(tmp_path).stderr
    lock.release()


UNCAUGHT = """
import sys
import keras, numpy as np
import tfdist
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
try:
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[tfdist.callbacks.BackupAndRestore(sys.argv[1])])
except tfdist.callbacks.FolderInUseError:
    if sys.argv[2] == "caught":
        raise SystemExit(5)
    raise
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("raised", 78), ("caught", 5)])
@pytest.mark.exhaustive
def test_who_is_refused_is_not_started_again(tmp_path: Path, how: str, code: int) -> None:
    lock = FolderLock(str(tmp_path))
    try:
        ended = subprocess.run(
            [sys.executable, "-c", UNCAUGHT, str(tmp_path), how],
            env={**os.environ, "TFDIST_EVENT_LOG": f"{tmp_path}/events.jsonl"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    finally:
        lock.release()
    assert ended.returncode == code, ended.stderr
    events = (tmp_path / "events.jsonl").read_text() if how == "raised" else ""
    assert ('"event": "refused"' in events) == (how == "raised")
    assert ("FolderInUseError: Received: backup_dir" in ended.stderr) == (how == "raised")


JOB = Job(backup={"save_freq": 4}).light


@pytest.mark.slow
def test_two_trainings_in_one_folder(jobs: ForkedJobs, tmp_path: Path) -> None:
    first = jobs.start(JOB.with_(kill={**at(9), "signal_number": int(signal.SIGSTOP)}), tmp_path)
    deadline = time.monotonic() + SECONDS
    while not list(tmp_path.glob("backup/checkpoint-*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    second = jobs.run(JOB, tmp_path)
    first.kill()
    assert first.wait().code == -signal.SIGKILL
    assert second.code == 1, second.log
    pid = first.started.result()
    assert re.search(
        rf"FolderInUseError: Received: backup_dir 'backup', to which process {pid} on \S+ writes", second.log
    )
    assert second.result["steps of this process"] == 0
    third = jobs.run(JOB, tmp_path)
    assert third.code == 0, third.log
    assert "The fit goes on at step " in third.log


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.cluster
def test_all_workers_hear_of_it(jobs: ForkedJobs, tmp_path: Path) -> None:
    job = JOB.with_(strategy="workers", model="light, replicated")
    (tmp_path / "backup").mkdir()
    lock = FolderLock(str(tmp_path / "backup"))
    try:
        ended = jobs.run_workers([job, job], tmp_path)
    finally:
        lock.release()
    for run in ended:
        assert run.code == 1, run.log
        assert f"FolderInUseError: Received: backup_dir 'backup', to which process {os.getpid()} on " in run.log
    again = jobs.run_workers([job, job], tmp_path)
    assert [run.code for run in again] == [0, 0], "\n".join(run.log for run in again)
