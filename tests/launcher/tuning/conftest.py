"""Searches as users start them, of trials that take no training."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.conftest import Launch, Result, wait_until

# The processes import TensorFlow, on a machine that does other things as well.
DEADLINE = 240.0

# Each trial leaves a line, and waits for the file "go" if the test wants it to.
SCRIPT = """\
import os, pathlib, signal, sys, time
import keras_tuner

here = pathlib.Path(__file__).parent
print("script runs", flush=True)

class Search(keras_tuner.RandomSearch):
    def run_trial(self, trial):
        x = trial.hyperparameters.Float("x", 0.0, 1.0)
        with open(here / "ran", "a") as file:
            file.write(f"{trial.trial_id} {self.tuner_id} {os.getpid()}\\n")
        IN_TRIAL
        return (x - 0.5) ** 2

space = keras_tuner.HyperParameters()
space.Float("x", 0.0, 1.0)
tuner = Search(max_trials=TRIALS, seed=3, hyperparameters=space, directory=here / "out", project_name="p", MORE)
tuner.search()
with open(here / "after", "a") as file:
    file.write(f"{tuner.tuner_id} {tuner.get_best_hyperparameters()[0].get('x')!r}\\n")
"""
WAIT = 'while not (here / "go").exists(): time.sleep(0.05)'


class Search(Launch):
    """A running `tfdist tune`."""

    def __init__(self, folder: Path, *options: str, script: str, env: Mapping[str, str] | None = None) -> None:
        (folder / "search.py").write_text(script)
        command = [sys.executable, "-m", "tfdist", "tune", *options, "search.py"]
        super().__init__(folder, command, env={"TF_CPP_MIN_LOG_LEVEL": "3", **(env or {})})

    def ran(self) -> list[tuple[str, str, int]]:
        """Trial, tuner and process of each run of a trial that was begun."""
        path = self.folder / "ran"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(trial, tuner, int(pid)) for trial, tuner, pid in map(str.split, lines)]

    def wait_for_trials(self, count: int) -> list[tuple[str, str, int]]:
        """Waits until so many runs of trials have begun."""
        wait_until(lambda: len(self.ran()) >= count or self.popen.poll() is not None, DEADLINE, f"{count} trials")
        assert len(self.ran()) >= count, self.finish()
        return self.ran()

    def kill(self, tuner: str) -> str:
        """Kills the process of a tuner, and returns the trial that it was in."""
        trial, _, pid = next(one for one in reversed(self.ran()) if one[1] == tuner)
        os.kill(pid, signal.SIGKILL)
        return trial

    def go(self) -> None:
        """Lets the trials end."""
        (self.folder / "go").touch()

    def succeed(self) -> Result:
        """Waits for its end, which has to be a good one."""
        result = self.finish(DEADLINE)
        assert result.code == 0, result
        return result

    def trials(self, project: str = "out/p") -> dict[str, dict[str, Any]]:
        """What KerasTuner's files say of each trial."""
        found = [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{project}/trial_*/trial.json"))]
        return {trial["trial_id"]: trial for trial in found}

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        (path,) = self.folder.glob("tfdist-logs/*/events.jsonl")
        return [event for event in map(json.loads, path.read_text().splitlines()) if event["event"] == kind]


def script(trials: int = 6, in_trial: str = "pass", more: str = "") -> str:
    """The script, with what happens in its trials."""
    lines = textwrap.indent(textwrap.dedent(in_trial), " " * 8).strip()
    return SCRIPT.replace("IN_TRIAL", lines).replace("TRIALS", str(trials)).replace("MORE", more)


@pytest.fixture
def tune(launches: list[Launch], tmp_path: Path) -> Callable[..., Search]:
    """`tune("-n", "2", script=text)` starts a search; several may run at once."""

    def start(*options: str, script: str, **more: Any) -> Search:
        launches.append(Search(tmp_path, *options, script=script, **more))
        return launches[-1]

    return start


def values_of(trials: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The hyperparameters' values of each trial."""
    return {name: trial["hyperparameters"]["values"] for name, trial in trials.items()}


def statuses_of(trials: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """The states of the trials, in their order."""
    return [trials[name]["status"] for name in sorted(trials)]
