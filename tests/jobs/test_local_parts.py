"""The queue's parts: who a process is, how an attempt ended, what each job gets of the machine."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdist.jobs.engine import engine_of
from tfdist.jobs.local.attempt import after_end, code_from_events, is_due, outcome, share
from tfdist.jobs.record import Record, Records
from tfdist.jobs.request import Request, SubmitError
from tfdist.launcher.arguments import Target
from tfdist.supervision.events import EventLog
from tfdist.supervision.identity import Identity, host_in_file_name, shown_host, this_host

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_process_is_known_until_it_ends() -> None:
    process = subprocess.Popen(SLEEP)
    try:
        identity = Identity.of(process.pid)
        assert identity is not None and identity.is_alive
        assert identity.signal(signal.SIGTERM)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        # Its number is still taken by what is left of it, the exit code.
        assert not identity.is_alive
        assert Identity.of(process.pid) is None
    finally:
        process.kill()
        assert process.wait(10) == -signal.SIGTERM
    assert not identity.is_alive and not identity.signal(signal.SIGTERM)


@pytest.mark.parametrize("other", [{"start": 5}, {"boot": "another"}])
def test_a_stranger_with_the_number_gets_no_signal(other: dict) -> None:
    process = subprocess.Popen(SLEEP)
    try:
        identity = Identity.of(process.pid)
        assert identity is not None
        stranger = dataclasses.replace(identity, **other)
        assert not stranger.is_alive and not stranger.signal(signal.SIGKILL)
        time.sleep(0.1)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize(
    ("code", "stop", "expected"),
    [
        (0, None, ("succeeded", "")),
        (0, "cancelled", ("succeeded", "")),
        (3, None, ("failed", "exit code 3")),
        (-9, None, ("failed", "killed by signal 9")),
        (77, None, ("queued", "preempted, goes on from its last backup")),
        (
            74,
            None,
            (
                "failed",
                "exit code 74: it was stopped, and could not save; `tfdist logs` shows why, and where it goes on",
            ),
        ),
        (77, "cancelled", ("cancelled", "")),
        (143, "cancelled", ("cancelled", "")),
        (None, "cancelled", ("cancelled", "")),
        (77, "time limit", ("failed", "time limit")),
        (None, None, ("lost", "its process vanished without a word: killed, or the machine was switched off")),
    ],
)
def test_how_an_attempt_ended(code: int | None, stop: str | None, expected: tuple[str, str]) -> None:
    result = outcome(code, stop)
    assert (result.state, result.detail) == expected


def test_a_preempted_job_waits_for_its_next_run() -> None:
    record = Record("local-1", "local", "x", 0.0, "/", [], 1, 0, {"attempt": 2, "started": time.time() - 99})
    waits = after_end(record, 77, lived=99).details
    preempted = (3, "queued", "preempted, goes on from its last backup")
    assert (waits["attempt"], waits["state"], waits["detail"]) == preempted
    assert is_due(record.with_details(**waits)) and is_due(record)
    short = after_end(record, 77, lived=1)
    assert not is_due(short)
    # Set by another version, or before the machine was restarted.
    assert is_due(short.with_details(due=time.time())) and is_due(short.with_details(due=short.details["due"] + 99))
    ended = after_end(record, 1, lived=1).details
    assert (ended["state"], ended["attempt"], time.time() - ended["ended"] < 5) == ("failed", 2, True)


def test_the_exit_code_that_the_launcher_has_written_down(tmp_path: Path) -> None:
    path, log = tmp_path / "events.jsonl", EventLog(str(tmp_path), "launcher")
    assert code_from_events(path, 0) is None
    log.write("start", restart=0)
    assert code_from_events(path, 0) is None
    log.write("gave-up", reason="", exit_code=3)
    EventLog(str(tmp_path), "worker 0").write("complete")
    with path.open("a") as file:
        file.write('{"half a line')
    assert code_from_events(path, 0) == 3
    # The next attempt has not said anything, has ended after the clock was set back, has begun another log.
    size = path.stat().st_size
    assert code_from_events(path, size) is None
    with path.open("a") as file:
        file.write(json.dumps({"time": 5.0, "name": "launcher", "event": "complete", "restarts": 0}) + "\n")
    assert (code_from_events(path, size), code_from_events(path, 10 * size)) == (0, 0)


def test_setting_the_clock_does_not_change_how_long_a_process_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(SLEEP)
    try:
        identity = Identity.of(process.pid)
        assert identity is not None
        monkeypatch.setattr(time, "time", lambda: 4e9)
        # The kernel counts hundredths of seconds.
        assert -0.1 < identity.age < 30
    finally:
        process.kill()
        process.wait(10)
    assert identity.age < 60


@pytest.mark.parametrize("missing", ["Linux before 5.3", "a sandbox", "Python for an older system"])
def test_without_descriptors_of_processes_signals_are_sent_all_the_same(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.ENOSYS if missing.startswith("Linux") else errno.EPERM, "pidfd_open")

    if missing.startswith("Python"):
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", refused)
    process = subprocess.Popen(SLEEP)
    try:
        identity = Identity.of(process.pid)
        assert identity is not None
        assert not dataclasses.replace(identity, start=5).signal(signal.SIGKILL)
        assert identity.signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait(10)
    assert not identity.signal(signal.SIGTERM)


def test_the_names_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    host = this_host()
    monkeypatch.setattr("socket.gethostname", lambda: "node-7.of/here")
    assert host == this_host(), "a machine may be renamed while a process runs"
    host = this_host.__wrapped__()
    assert shown_host(host) == "node-7.of/here"
    assert host_in_file_name(host).startswith("node-7.of-here")


def test_jobs_that_run_at_the_same_time_share_the_machine() -> None:
    assert [share(range(8), place, 3) for place in range(3)] == [range(0, 2), range(2, 5), range(5, 8)]
    assert share(["0"], 1, 2) == ["0"]
    assert share([0, 1, 2], 0, 1) == [0, 1, 2]


def test_a_dry_run_shows_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    target = Target("script", ("train.py", "--text", "a b"))
    request = Request("local", target, workers=3, ps=1, cpus_per_worker=2, gpus_per_worker=0, max_restarts=0, grace=9)
    words = shlex.split(engine_of("local", Records(tmp_path / "jobs")).dry_run(request))
    assert words[1:] == [
        *["-m", "tfdist", "run", "-n", "3", "--ps", "1", "--grace", "9", "--max-restarts", "0", "--log-dir"],
        *["FOLDER/logs", "--cpus-per-worker", "2", "--gpus-per-worker", "0", "train.py", "--text", "a b"],
    ]
    assert not (tmp_path / "jobs").exists()


def test_what_does_not_exist_is_refused_before_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = engine_of("local", Records(tmp_path / "jobs"))
    with pytest.raises(SubmitError, match=r"nowhere\.py: no such script"):
        engine.submit(Request("local", Target("script", ("nowhere.py",))))
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("TFDIST_LOCAL_JOBS", "none")
    with pytest.raises(SubmitError, match=r"Received: TFDIST_LOCAL_JOBS='none'. Expected: how many jobs"):
        engine.submit(Request("local", Target("script", ("train.py",))))
    assert not (tmp_path / "jobs").exists()
