"""`tfdist.on_chief_first`: one process at a time, and what becomes of the others if that one fails or is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import tfdist
from tfdist.cluster.first import PreparationError

# With "fail", the first one fails once another one waits; with "meet", all wait for a second one.
PROGRAM = """
import os, sys, time
from pathlib import Path
import tfdist
from tfdist.cluster import first
log, how, *folder = sys.argv[1:]
class Clock:
    monotonic = time.monotonic
    def sleep(seconds):
        Path(log + ".waits").touch()
        time.sleep(seconds)
first.time = Clock
def say(what):
    with open(log, "a") as file: print(what, os.getpid(), file=file)

@tfdist.on_chief_first("the data", *folder)
def prepare():
    say("begin")
    if Path(log + ".done").exists():
        return say("end")
    if how == "wait": time.sleep(1000)
    while how == "fail" and not Path(log + ".waits").exists(): time.sleep(0.01)
    while how == "meet" and Path(log).read_text().count("begin") < 2: time.sleep(0.01)
    if how == "fail": raise OSError("no space left")
    Path(log + ".done").touch()
    say("end")

prepare()
"""
DEADLINE = 60.0


def start(log: Path, how: str, *folder: str) -> subprocess.Popen:
    env = {**os.environ, "TMPDIR": str(log.parent)}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(log), how, *folder], stderr=subprocess.PIPE, env=env)


def wait_for(log: Path) -> None:
    end = time.monotonic() + DEADLINE
    while not log.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_after_another(tmp_path: Path) -> None:
    started = [start(tmp_path / "log", "work", str(tmp_path / "data" / "new")) for _ in range(3)]
    assert [process.wait(DEADLINE) for process in started] == [0, 0, 0]
    lines = (tmp_path / "log").read_text().split()
    assert lines[::2] == ["begin", "end"] * 3
    assert lines[1::4] == lines[3::4] and len(set(lines[1::4])) == 3


def test_without_it_they_meet(tmp_path: Path) -> None:
    program = PROGRAM.replace("@tfdist", "#")
    command = [sys.executable, "-c", program, str(tmp_path / "log"), "meet"]
    started = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(DEADLINE) for process in started] == [0, 0]
    assert (tmp_path / "log").read_text().split()[::2] == ["begin", "begin", "end", "end"]


def test_those_who_wait_hear_of_a_failure(tmp_path: Path) -> None:
    first = start(tmp_path / "log", "fail")
    wait_for(tmp_path / "log")
    second = start(tmp_path / "log", "fail")
    said = [process.communicate(timeout=DEADLINE)[1].decode() for process in (first, second)]
    assert (first.returncode, second.returncode) == (1, 1)
    assert f"PreparationError: Process {first.pid}: OSError: no space left" in said[1]
    assert (tmp_path / "log").read_text() == f"begin {first.pid}\n"  # the second has not tried
    assert start(tmp_path / "log", "work").wait(DEADLINE) == 0  # who comes later tries again


def test_a_process_that_is_killed_leaves_nothing_locked(tmp_path: Path) -> None:
    first = start(tmp_path / "log", "wait")
    wait_for(tmp_path / "log")
    second = start(tmp_path / "log", "work")
    wait_for(tmp_path / "log.waits")
    assert second.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait(DEADLINE)
    assert second.wait(DEADLINE) == 0
    assert (tmp_path / "log").read_text().split()[::2] == ["begin", "begin", "end"]


def test_a_thread_waits_and_a_nested_call_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = []

    def other() -> None:
        with pytest.raises(PreparationError, match=r"has prepared this for \d+ s, and is not done.*timeout"):
            tfdist.on_chief_first("this", timeout=0.2).__enter__()
        said.append("waited")

    with tfdist.on_chief_first("this"), tfdist.on_chief_first("this"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert said == ["waited"]
    with tfdist.on_chief_first("this", timeout=0.2):
        assert len([*tmp_path.iterdir()]) == 1


def test_a_place_without_locks_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for folder in ("gs://bucket/data", "/proc/nothing"):
        with tfdist.on_chief_first("this", folder):
            assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_only_a_process_of_a_run_watches_its_imports() -> None:
    """Scripts load data before they make a strategy. None of the packages is imported for it."""
    again = "'TFDIST_RUN_ID' in os.environ and tfdist.compat.preparation.prepare_in_turn()"  # as each strategy does
    watching = "sum('tfdist' in type(one).__module__ for one in sys.meta_path)"
    program = f"import os, sys, tfdist; {again}; print({watching}, *sys.modules)"
    found = []
    for env in ({"TFDIST_RUN_ID": "1"}, {}):
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
        )
        count, *modules = done.stdout.split()
        assert not {"tensorflow", "keras", "numpy"} & set(modules)
        found.append(count)
    assert found == ["3", "0"]
