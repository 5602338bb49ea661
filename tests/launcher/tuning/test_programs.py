"""Scripts as users write them, against the same in one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.conftest import Launch, wait_until
from tests.launcher.tuning.conftest import DEADLINE, WAIT, Search, script, statuses_of, values_of
from tests.unit.pages import blocks_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Tune = Callable[..., Search]

MODEL = """\
import os, pathlib, signal, sys, time
import keras, keras_tuner, numpy as np
import tfdist

here = pathlib.Path(__file__).parent
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(1, keepdims=True)

def build(hp):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(hp.Choice("units", [2, 4])), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(hp.Choice("rate", [0.1, 0.01])), "mse")
    return model

class Note(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        with open(here / "epochs", "a") as file:
            file.write(f"{epoch} {os.getpid()}\\n")
        ON_EPOCH

if __name__ == "__main__":
    tuner = keras_tuner.GridSearch(build, "val_loss", directory=here / "out", project_name="p")
    tuner.search(
        x, y, epochs=4, batch_size=16, validation_data=(x[:16], y[:16]), verbose=0, callbacks=[Note() CALLBACKS]
    )
"""

# A trial waits until so many tuners have begun one: short ones would be over before the second tuner is there.
ALL_THERE = 'while len({{line.split()[1] for line in open(here / "ran")}}) < {}: time.sleep(0.05)'


def model_script(on_epoch: str = "pass", callbacks: str = "") -> str:
    lines = on_epoch.replace("\n", "\n        ")
    return MODEL.replace("ON_EPOCH", lines).replace("CALLBACKS", callbacks)


def serial(folder: Path, text: str, project: str = "out/p") -> dict[str, dict[str, Any]]:
    """The trials of a script without tfdist."""
    folder.mkdir()
    (folder / "search.py").write_text(text)
    subprocess.run([sys.executable, "search.py"], cwd=folder, check=True, timeout=DEADLINE, capture_output=True)
    found = Search.__new__(Search)
    found.folder = folder
    return found.trials(project)


def by_values(trials: Mapping[str, Mapping[str, Any]], item: str) -> dict[str, Any]:
    """Of each trial, found by its values: a grid is not always searched in the same order."""
    return {str(sorted(trial["hyperparameters"]["values"].items())): trial[item] for trial in trials.values()}


def test_a_script_without_a_search_runs_once_and_says_so(tune: Tune, tmp_path: Path) -> None:
    search = tune("-n", "3", script='print("script runs", flush=True)')
    result = search.finish(DEADLINE)
    assert result.code == 1
    assert result.out.count("script runs") == 1
    assert "Received: a script that has ended without a call of tuner.search()" in result.err
    assert len(list(tmp_path.glob("tfdist-logs/*/tuner-*.log"))) == 1


def test_a_script_that_fails_before_its_search(tune: Tune) -> None:
    result = tune("-n", "3", script='raise ValueError("no data")').finish(DEADLINE)
    assert result.code == 1
    assert "ValueError: no data" in result.err
    assert "started again" not in result.err


@pytest.mark.nightly
def test_a_random_search_equals_that_of_one_process(tune: Tune, tmp_path: Path) -> None:
    text = script(in_trial=f'if "TFDIST_TUNE" in os.environ:\n    {ALL_THERE.format(3)}')
    search = tune("-n", "3", script=text)
    search.succeed()
    trials, alone = search.trials(), serial(tmp_path / "alone", text)
    assert len(trials) == 6
    assert {tuner for _, tuner, _ in search.ran()} == {"tuner0", "tuner1", "tuner2"}
    assert values_of(trials) == values_of(alone)
    assert {name: one["score"] for name, one in trials.items()} == {name: one["score"] for name, one in alone.items()}


@pytest.mark.nightly
def test_a_grid_search_of_models_equals_that_of_one_process(tune: Tune, tmp_path: Path) -> None:
    search = tune("-n", "2", script=model_script())
    search.succeed()
    alone = serial(tmp_path / "alone", model_script())
    assert statuses_of(alone) == ["COMPLETED"] * 4
    assert by_values(search.trials(), "score") == by_values(alone, "score")


@pytest.mark.nightly
def test_hyperband(tune: Tune) -> None:
    """Its later trials go on with the weights of earlier ones, which another tuner may have trained."""
    search = 'keras_tuner.Hyperband(build, "val_loss", max_epochs=2, factor=2, seed=3,'
    text = model_script().replace('keras_tuner.GridSearch(build, "val_loss",', search)
    text = text.replace('hp.Choice("rate", [0.1, 0.01])', 'hp.Float("rate", 0.01, 0.1)')
    running = tune("-n", "2", script=text)
    running.succeed()
    assert statuses_of(running.trials()) == ["COMPLETED"] * 5


@pytest.mark.nightly
def test_a_killed_trial_goes_on_exactly(tune: Tune, tmp_path: Path) -> None:
    """With BackupAndRestore: the epochs that were done are not done again, and nothing changes."""
    backup = ', tfdist.callbacks.BackupAndRestore(str(here / "backup"), asynchronous=False)'
    stop = (
        'if epoch == 2 and not (here / "killed").exists():\n    (here / "killed").touch()\n    os.kill(os.getpid(), 9)'
    )
    search = tune("-n", "1", script=model_script(on_epoch=stop, callbacks=backup))
    search.succeed()
    epochs = [line.split()[0] for line in (tmp_path / "epochs").read_text().splitlines()]
    assert epochs == [*"012", *"23", *("0123" * 3)]
    alone = serial(tmp_path / "alone", model_script())
    assert by_values(search.trials(), "score") == by_values(alone, "score")
    assert by_values(search.trials(), "best_step") == by_values(alone, "best_step")
    # The negative control: another seed gives other scores.
    other = serial(tmp_path / "other", model_script().replace("set_random_seed(1)", "set_random_seed(2)"))
    assert by_values(other, "score") != by_values(alone, "score")


@pytest.mark.nightly
@pytest.mark.parametrize("project", ["q", "p"])
def test_two_searches_in_a_script(tune: Tune, tmp_path: Path, project: str) -> None:
    """The second one may overwrite the first one's project."""
    again = """
tuner = Search(max_trials=3, seed=4, hyperparameters=space, directory=here / "out", project_name="PROJECT",
               overwrite=True)
tuner.search()
(here / "last").write_text(f"{tuner.tuner_id}")
"""
    # Those of the second search wait until both tuners are in it.
    wait = f"""\
        if (here / "after").exists():
            while (here / "after").read_text().count("\\n") < 2: time.sleep(0.05)
        else:
            {ALL_THERE.format(2)}"""
    first = script(trials=3, in_trial=wait, more="overwrite=True")
    search = tune("-n", "2", script=first + again.replace("PROJECT", project))
    search.succeed()
    assert statuses_of(search.trials("out/p")) == statuses_of(search.trials(f"out/{project}")) == ["COMPLETED"] * 3
    assert len(search.ran()) == 6
    # Between the searches both go on, and find the same.
    lines = sorted((tmp_path / "after").read_text().splitlines())
    assert [line.split()[0] for line in lines] == ["tuner0", "tuner1"]
    assert len({line.split()[1] for line in lines}) == 1
    assert (tmp_path / "last").read_text() == "tuner0"
    assert len(list(tmp_path.glob("tfdist-logs/*/tfdist-search-[0-9].json"))) == 2


@pytest.mark.nightly
def test_a_project_of_each_process_is_refused(tune: Tune) -> None:
    text = script(in_trial=WAIT).replace('here / "out"', "__import__('tempfile').mkdtemp()")
    result = tune("-n", "2", script=text).finish(DEADLINE)
    assert result.code == 1, result
    assert "Received: the project folder" in result.err and "Give the tuner a fixed directory=" in result.err


@pytest.mark.nightly
def test_the_guide(tune: Tune, tmp_path: Path) -> None:
    (block,) = blocks_of("docs/tuning.md", "python")
    search = tune("-n", "2", script=block.text)
    result = search.succeed()
    (path,) = tmp_path.glob("tfdist-logs/*/tfdist-search-1.json")
    found = json.loads(path.read_text())
    assert found["over"] and len(found["trials"]) == 6 and found["objective"] == "val_accuracy"
    assert "[tuner 0] accuracy of the best one: 0.87" in result.out
    assert "[tuner 1]" not in result.out and "failed call to cuInit" not in result.err
    assert (tmp_path / "best.keras").exists()
    alone = serial(tmp_path / "alone", block.text, "search/digits")
    assert {trial["trial"]: trial["score"] for trial in found["trials"]} == {
        name: trial["score"] for name, trial in alone.items()
    }


class TestSeveralMachines:
    """A job array, of which each element is a launcher."""

    @pytest.mark.nightly
    def test_elements_share_a_search(self, launches: list[Launch], tmp_path: Path) -> None:
        def element(index: int) -> Search:
            text = script(in_trial=WAIT, more="overwrite=True")
            launches.append(Search(tmp_path, "-n", "2", "--only", str(index), "--log-dir", "logs", script=text))
            return launches[-1]

        second, first = element(1), element(0)
        first.wait_for_trials(2)
        # The first element is lost as its host is, and Slurm starts it again.
        killed = first.kill("tuner0")
        os.kill(first.popen.pid, signal.SIGKILL)
        wait_until(lambda: not first.marked(), DEADLINE, "the end of the first element")
        first = element(0)
        first.wait_for_trials(3)
        first.go()
        result, other = first.finish(DEADLINE), second.finish(DEADLINE)
        assert (result.code, other.code) == (0, 0), (result, other)
        assert "search finished: 6 trials" in result.out and "search finished" not in other.out
        counts = [trial for trial, _, _ in first.ran()]
        assert {name: counts.count(name) for name in "012345"} == {name: 1 + (name == killed) for name in "012345"}
        assert statuses_of(first.trials()) == ["COMPLETED"] * 6
