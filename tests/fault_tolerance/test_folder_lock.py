"""The lock on a folder of backups: one training at a time, and none is locked out by one that is dead."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault_tolerance.forked_jobs import SECONDS, SOURCE, ForkedJobs
from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import at
from tfdist.checkpoint.folder_lock import FolderInUseError, FolderLock

HOLDER = """
import os, sys, time
from tfdist.checkpoint.folder_lock import FolderLock
lock = FolderLock(sys.argv[1])
child = os.fork()  # it outlives its parent, as a data loader may
if child: print(child, flush=True)
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
    began = time.monotonic()
    lock = FolderLock(str(tmp_path), patience=0.0)
    assert time.monotonic() - began < 0.1
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"
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
