"""How tuners end, and what the launcher makes of it. They are small programs here, which import nothing."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.launcher.conftest import wait_until
from tfdist.launcher.run_plan import ProcessPlan
from tfdist.launcher.terminal import Terminal
from tfdist.tuning.member import MEETING
from tfdist.tuning.tune_run import TuneRun

pytestmark = pytest.mark.timeout(180)

COMMON = f"""\
import json, os, pathlib, signal, sys, time
folder = pathlib.Path({{folder!r}})
def event(kind):
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps(dict(time=time.time(), name="tuner {{number}}", event=kind)) + "\\n")
def wait(name):
    while not (folder / name).exists():
        time.sleep(0.02)
def first_time(name):
    try:
        return not (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
def meet():
    (folder / "half").write_text(json.dumps(dict(search_id="s", hosts=[], port=1)))
    (folder / "half").replace(folder / {MEETING!r})
"""
KEEPER = 'event("search"); meet(); wait("done"); event("searched"); time.sleep(1)'


def run_of(folder: Path, *programs: str, restarts: int = 3) -> TuneRun:
    """A run of tuners that do what the programs say."""
    plans = {
        number: [
            ProcessPlan(
                "tuner",
                number,
                (sys.executable, "-c", COMMON.format(folder=str(folder), number=number) + program),
                dict(os.environ),
            )
        ]
        for number, program in enumerate(programs)
    }
    return TuneRun(plans, "s", restarts, folder, Terminal(io.BytesIO(), is_tty=False, live="tuner 0"), 20.0)


def test_a_tuner_that_ends_in_the_search_is_started_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """By `sys.exit(0)` in a trial, say: the trial would be at work for ever."""
    leaves = 'event("trial")\nif first_time("left"): sys.exit(0)\n(folder / "done").touch(); time.sleep(1000)'
    run = run_of(tmp_path, KEEPER, leaves)
    assert run.run() == 0
    text = capsys.readouterr().err
    assert "tuner 1 has ended in the middle of the search with exit code 0" in text and "started again" in text


def test_no_restarts_left_for_one_that_ends_in_the_search(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = run_of(tmp_path, KEEPER, 'event("trial"); sys.exit(0)', restarts=0)
    assert run.run() == 1
    assert "tuner 1 has ended in the middle of the search with exit code 0" in capsys.readouterr().err


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

    def interrupt() -> None:
        wait_until((tmp_path / "idle").exists, 120.0, "both tuners")
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=interrupt, daemon=True)
    sender.start()
    assert run.run() == code
    sender.join(10)
    # Who is interrupted may be started again: the others wait.
    assert "ended" not in json.loads((tmp_path / MEETING).read_text())
