"""Tuners are killed and fail: no trial is lost, and none is run twice but the one whose tuner was killed."""

from __future__ import annotations

import collections
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.tuning.conftest import DEADLINE, WAIT, Search, script, statuses_of

pytestmark = pytest.mark.slow

Tune = Callable[..., Search]


def runs(search: Search) -> dict[str, int]:
    return dict(collections.Counter(trial for trial, _, _ in search.ran()))


@pytest.mark.nightly
def test_a_killed_tuner_loses_no_trial(tune: Tune, tmp_path: Path) -> None:
    search = tune("-n", "2", script=script(in_trial=WAIT, more="overwrite=True"))
    begun = search.wait_for_trials(2)
    assert {tuner for _, tuner, _ in begun} == {"tuner0", "tuner1"}
    killed = search.kill("tuner1")
    search.wait_for_trials(3)
    search.go()
    result = search.succeed()
    assert runs(search) == {str(trial): 1 + (str(trial) == killed) for trial in range(6)}
    trials = search.trials()
    assert statuses_of(trials) == ["COMPLETED"] * 6
    # The script goes on behind the search in one process.
    assert [line.split()[0] for line in (tmp_path / "after").read_text().splitlines()] == ["tuner0"]
    assert "tuner 1 was killed by SIGKILL" in result.err
    assert [event["task"] for event in search.events("replacement")] == ["tuner 1"]
    assert "search finished: 6 trials" in result.out
    search.assert_nothing_is_left()
    shown = subprocess.run(
        [sys.executable, "-m", "tfdist", "monitor", "--once"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    best = min(trials.values(), key=lambda trial: trial["score"])
    assert f"6 of 6 trials done, 0 running; best default_objective {best['score']:.6g}" in shown
    assert f"tuner 1 takes up trial {killed} again" in shown or "trial 5: score" in shown


@pytest.mark.nightly
def test_the_killed_oracle_goes_on(tune: Tune) -> None:
    """The process that keeps the oracle is killed, and what it has is still there when it is started again."""
    search = tune("-n", "2", script=script(in_trial=WAIT, more="overwrite=True"))
    search.wait_for_trials(2)
    killed = search.kill("tuner0")
    # The other one ends its trial meanwhile, and waits for the oracle with that.
    search.go()
    search.succeed()
    assert runs(search) == {str(trial): 1 + (str(trial) == killed) for trial in range(6)}
    assert statuses_of(search.trials()) == ["COMPLETED"] * 6


@pytest.mark.nightly
def test_the_launcher_is_started_again(tune: Tune) -> None:
    """Without overwrite=True, a search goes on where it was interrupted."""
    wait = f'if trial.trial_id > "2":\n    {WAIT}'
    first = tune("-n", "2", script=script(in_trial=wait))
    first.wait_for_trials(5)
    first.popen.send_signal(signal.SIGINT)
    assert first.finish(DEADLINE).code == 128 + signal.SIGINT
    first.assert_nothing_is_left()
    done = [name for name, trial in first.trials().items() if trial["status"] == "COMPLETED"]
    assert done == ["0", "1", "2"]
    first.go()
    second = tune("-n", "2", script=script(in_trial=wait))
    second.succeed()
    assert runs(second) == {"0": 1, "1": 1, "2": 1, "3": 2, "4": 2, "5": 1}
    assert statuses_of(second.trials()) == ["COMPLETED"] * 6


@pytest.mark.nightly
def test_a_trial_that_kills_its_tuner_fails(tune: Tune) -> None:
    deadly = 'if trial.trial_id == "1": os.kill(os.getpid(), signal.SIGKILL)'
    search = tune("-n", "2", "--max-restarts", "1", script=script(in_trial=deadly))
    search.succeed()
    assert runs(search) == {"0": 1, "1": 2, "2": 1, "3": 1, "4": 1, "5": 1}
    assert statuses_of(search.trials()) == ["COMPLETED", "FAILED", *["COMPLETED"] * 4]
    assert search.trials()["1"]["message"] == "Its tuner was killed or lost 2 times (--max-restarts 1)."


@pytest.mark.nightly
def test_a_trial_that_takes_too_long_fails(tune: Tune) -> None:
    """In both tuners, of which one keeps the oracle. No exception would end these trials."""
    text = script(in_trial='if trial.trial_id in "01": threading.Event().wait()').replace("os,", "os, threading,")
    search = tune("-n", "2", "--trial-timeout", "15", "--max-restarts", "0", script=text)
    result = search.succeed()
    assert runs(search) == {str(trial): 1 for trial in range(6)}
    trials = search.trials()
    assert statuses_of(trials) == ["FAILED"] * 2 + ["COMPLETED"] * 4
    assert trials["0"]["message"] == trials["1"]["message"] == "It took longer than 15 s (--trial-timeout)."
    assert sorted(event["task"] for event in search.events("replacement")) == ["tuner 0", "tuner 1"]
    begun = {event["trial"]: event["time"] for event in search.events("trial")}
    ended = {event["trial"]: event["time"] - begun[event["trial"]] for event in search.events("trial-ended")}
    assert min(ended["0"], ended["1"]) >= 14.9 and len(ended) == 6
    assert "failed: It took longer than 15 s (--trial-timeout)." in result.out
    search.assert_nothing_is_left()


@pytest.mark.nightly
def test_a_failed_trial_is_tried_again(tune: Tune) -> None:
    text = script(
        in_trial="""\
            failed = here / f"failed-{trial.trial_id}"
            if trial.trial_id in "14" and (trial.trial_id == "4" or not failed.exists()):
                failed.touch()
                raise ValueError("no luck")""",
        more="max_retries_per_trial=1",
    )
    search = tune("-n", "2", script=text)
    result = search.succeed()
    assert runs(search) == {"0": 1, "1": 2, "2": 1, "3": 1, "4": 2, "5": 1}
    assert statuses_of(search.trials()) == [*["COMPLETED"] * 4, "FAILED", "COMPLETED"]
    assert "ValueError: no luck" in search.trials()["4"]["message"]
    assert "failed: ValueError: no luck" in result.out
