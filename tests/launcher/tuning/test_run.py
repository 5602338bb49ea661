"""How tuners end, and what the launcher makes of it. They are small programs here, which import nothing."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launcher.conftest import Launch, wait_until
from tfdist.launcher.arguments import Target
from tfdist.launcher.output import Terminal
from tfdist.launcher.plan import ProcessPlan
from tfdist.tuning import tune_run
from tfdist.tuning.files import read_search, turn_of, write_search
from tfdist.tuning.member import Member
from tfdist.tuning.tune_run import TuneRun, run

pytestmark = pytest.mark.timeout(180)

COMMON = """\
import json, os, pathlib, signal, sys, time
folder = pathlib.Path({folder!r})
def event(kind):
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps(dict(time=time.time(), name="tuner {number}", event=kind)) + "\\n")
def wait(name):
    while not (folder / name).exists():
        time.sleep(0.02)
def first_time(name):
    try:
        return not (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
def meet():
    (folder / "half").write_text(json.dumps(dict(search_id="s", number=1)))
    (folder / "half").replace(folder / "tfdist-search-1.json")
"""
KEEPER = 'event("search"); meet(); wait("done"); event("searched"); time.sleep(1)'


def run_of(folder: Path, *programs: str, restarts: int = 3, trial_timeout: float | None = None) -> TuneRun:
    """A run of tuners that do what the programs say."""
    plans = {
        number: ProcessPlan(
            "tuner",
            number,
            (sys.executable, "-c", COMMON.format(folder=str(folder), number=number) + program),
            dict(os.environ),
        )
        for number, program in enumerate(programs)
    }
    member = Member(0, len(plans), "s", str(folder), restarts, trial_timeout)
    return TuneRun(plans, member, Terminal(io.BytesIO(), is_tty=False, live="tuner 0"), 20.0)


@contextlib.contextmanager
def once_there_is(path: Path, do: Callable[[], None]) -> Iterator[None]:
    """Does something in another thread, as soon as the tuners have made a file."""

    def wait_and_do() -> None:
        wait_until(path.exists, 120.0, path.name)
        do()

    thread = threading.Thread(target=wait_and_do, daemon=True)
    thread.start()
    yield
    thread.join(60)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_tuner_that_ends_in_the_search_is_started_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """By `sys.exit()` in a trial, say."""
    leaves = 'event("trial")\nif first_time("left"): sys.exit(75)\n(folder / "done").touch(); time.sleep(1000)'
    run = run_of(tmp_path, KEEPER, leaves)
    assert run.run() == 0
    text = capsys.readouterr().err
    assert "tuner 1 failed with exit code 75" in text and "started again" in text


def test_one_that_is_killed_before_each_trial_ends_the_search(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = run_of(tmp_path, KEEPER, "os.kill(os.getpid(), 9)", restarts=1)
    assert run.run() == 128 + 9
    assert "not restarted: tuner 1 has failed 2 times in a row before it began a trial" in capsys.readouterr().err


def test_one_that_ends_between_two_searches_is_not(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The negative control: what it leaves then is no trial."""
    between = 'event("search"); meet(); wait("begun"); event("searched"); (folder / "over").touch(); time.sleep(3)'
    run = run_of(tmp_path, between, '(folder / "begun").touch(); wait("over"); sys.exit(0)')
    assert run.run() == 0
    assert "started again" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ends", "code"), [("signal.signal(signal.SIGTERM, lambda *_: os._exit(77))", 77), ("pass", 128 + signal.SIGTERM)]
)
def test_an_idle_tuner_does_not_hide_that_the_other_one_has_saved(tmp_path: Path, ends: str, code: int) -> None:
    keeper = f'{ends}; event("search"); meet(); (folder / "there").touch(); time.sleep(1000)'
    run = run_of(tmp_path, keeper, 'wait("there"); (folder / "idle").touch(); time.sleep(1000)')
    with once_there_is(tmp_path / "idle", interrupt):
        assert run.run() == code
    # What is interrupted may be started again: the others wait.
    assert not (tmp_path / "tfdist-search-ended.json").exists()


def test_tuner_0_forgets_how_its_script_has_ended_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started again with the same folder of logs, it would end the others at once."""

    def heard(run: TuneRun) -> int:
        return (read_search(tmp_path, run._member.search_id, 0) or {"code": 0})["code"]

    (tmp_path / "search.py").touch()
    write_search(Member(0, 2, str(tmp_path), str(tmp_path), 3), 0, code=1)
    monkeypatch.setattr(TuneRun, "run", heard)
    target, shares = Target("script", (str(tmp_path / "search.py"),)), {"cpus_per_worker": 1, "gpus_per_worker": 0}
    more = {"env": {}, "log_dir": str(tmp_path), "grace": 1.0, "output": "first", "max_restarts": 3}
    codes = [run(target, tuners=2, only=only, **shares, **more, trial_timeout=None) for only in (1, 0, 1)]
    assert codes == [1, 0, 0]


def test_the_others_end_with_a_new_end_of_the_script(tmp_path: Path) -> None:
    """Not with that of an earlier start, while tuner 0 is started again."""
    run = run_of(tmp_path, "", "")
    del run._plans[0]
    write_search(run._member, 0, code=1)
    # Then the run has begun, and has read the earlier one.
    with once_there_is(tmp_path / "events.jsonl", lambda: write_search(run._member, 0, code=3)):
        assert run.run() == 3


def test_a_child_that_is_forked_in_a_turn_does_not_keep_it(tmp_path: Path) -> None:
    with turn_of(Member(0, 2, "s", str(tmp_path), 3)):
        child = os.fork()
        if not child:
            time.sleep(1000)
            os._exit(0)
    try:
        with open(tmp_path / ".oracle.lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.nightly
def test_events_in_a_pipe_that_nobody_reads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    saves = "signal.signal(signal.SIGTERM, lambda *_: os._exit(77))"
    run = run_of(tmp_path, f'{saves}; meet(); (folder / "there").touch(); time.sleep(1000)')
    with once_there_is(tmp_path / "there", interrupt):
        assert run.run() == 77


@pytest.mark.nightly
def test_two_searches_with_one_folder_of_logs(launches: list[Launch], tmp_path: Path) -> None:
    (tmp_path / "search.py").write_text("import time; print('runs', flush=True); time.sleep(1000)")
    command = [sys.executable, "-m", "tfdist", "tune", "-n", "1", "--log-dir", "logs", "search.py"]
    first = Launch(tmp_path, command)
    launches.append(first)
    wait_until((tmp_path / "logs" / "tuner-0.log").exists, 60, "the first search")
    launches.append(second := Launch(tmp_path, command))
    result = second.finish()
    assert result.code == 1
    assert "tfdist: Received: the folder of logs logs, in which another search is at work. Expected: one" in result.err
    assert first.popen.poll() is None


def test_a_table_that_nobody_reads(launches: list[Launch], tmp_path: Path) -> None:
    """What is shown at the end is written as all else is: the exit code comes all the same."""
    (tmp_path / "show.py").write_text(SHOW)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"." * 4096)
    os.set_blocking(writing, True)
    launches.append(started := Launch(tmp_path, [sys.executable, "show.py"], stdout=writing))
    os.close(writing)
    assert started.finish().code == 7
    os.close(reading)


SHOW = """\
import sys
from tfdist.tuning.tune_run import show
trial = {"trial": "0", "status": "COMPLETED", "score": 0.5, "error": None, "hyperparameters": {}}
show([{"over": True, "project": "p", "trials": [trial], "objective": "val_loss"}])
sys.exit(7)
"""


def test_a_tuner_that_is_stopped_in_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of its own can end the trial, and the others would wait for it for ever."""
    monkeypatch.setattr(tune_run, "_STOPPED_AFTER", 0.5)
    goes_on = 'event("trial"); event("trial-ended"); time.sleep(3); (folder / "done").touch()'
    stops = f'if first_time("stopped"): event("trial"); os.kill(os.getpid(), signal.SIGSTOP)\n{goes_on}'
    tuning = run_of(tmp_path, KEEPER, stops, trial_timeout=0.5)
    with once_there_is(tmp_path / "done", lambda: None):
        assert tuning.run() == 0
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    replaced = [event for event in events if event["event"] == "replacement"]
    assert [(event["task"], event["kind"], event["cause"]) for event in replaced] == [
        ("tuner 1", "signal", "tuner 1 was killed by SIGKILL")
    ]
