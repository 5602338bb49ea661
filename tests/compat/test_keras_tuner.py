"""What `tfdist tune` changes in KerasTuner is still needed: a test here fails once KerasTuner does without a change."""

from __future__ import annotations

import inspect
from pathlib import Path

import keras
import keras_tuner
import pytest
from keras_tuner.engine.base_tuner import BaseTuner
from keras_tuner.engine.trial import Trial

from tfdist.tuning.member import Member
from tfdist.tuning.patches import Searches, patches

ALL = patches(Searches(Member(0, 1, "s", "/logs", 3)))


def grid() -> keras_tuner.oracles.GridSearchOracle:
    space = keras_tuner.HyperParameters()
    space.Choice("a", [1, 2, 3])
    return keras_tuner.oracles.GridSearchOracle(keras_tuner.Objective("score", "min"), hyperparameters=space)


def tuner_of(folder: Path, oracle: keras_tuner.Oracle, **more: bool) -> BaseTuner:
    return BaseTuner(oracle, directory=str(folder), project_name="p", **more)


def complete(oracle: keras_tuner.Oracle, trial: Trial) -> None:
    oracle.update_trial(trial.trial_id, {"score": 1.0})
    trial.status = "COMPLETED"
    oracle.end_trial(trial)


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: patch.target)
def test_what_is_changed_is_there(patch) -> None:
    """Each change installs itself, once, in a process of its own; here its place is looked up."""
    assert patch.package == "keras_tuner"
    assert patch.original() is not None or patch.is_new


def test_the_methods_take_what_is_passed_on() -> None:
    assert list(inspect.signature(BaseTuner.search).parameters) == ["self", "fit_args", "fit_kwargs"]
    names = list(inspect.signature(keras_tuner.Tuner._configure_tensorboard_dir).parameters)
    assert names == ["self", "callbacks", "trial", "execution"]
    places = ["self", "oracle", "hypermodel", "directory", "project_name", "overwrite", "kwargs"]
    assert list(inspect.signature(BaseTuner.__init__).parameters) == places


def test_a_grid_that_is_reloaded_has_forgotten_its_place(tmp_path: Path) -> None:
    tuner = tuner_of(tmp_path, grid())
    complete(tuner.oracle, tuner.oracle.create_trial("tuner0"))
    tuner.save()
    again = tuner_of(tmp_path, grid())
    assert len(again.oracle.trials) == 1
    assert again.oracle.create_trial("tuner0").status == "STOPPED"
    # Without the reload it goes on.
    assert tuner.oracle.create_trial("tuner0").status == "RUNNING"


def test_the_state_of_an_oracle_is_saved_before_a_trial_has_left_it(tmp_path: Path) -> None:
    tuner = tuner_of(tmp_path, grid())
    tuner.save()
    trial = tuner.oracle.create_trial("tuner0")
    complete(tuner.oracle, trial)
    again = tuner_of(tmp_path, grid())
    assert again.oracle.create_trial("tuner0").trial_id == trial.trial_id


def test_a_tuner_that_is_killed_in_its_first_trial_starts_anew(tmp_path: Path) -> None:
    """keras-tuner issue 976: its own file is written after a trial."""
    tuner = tuner_of(tmp_path, grid())
    tuner.oracle.create_trial("tuner0")
    assert (tmp_path / "p" / "oracle.json").exists()
    assert not tuner_of(tmp_path, grid()).oracle.trials


def test_files_are_written_in_place(tmp_path: Path) -> None:
    """Who reads one meanwhile finds a part of it: the file stays the same one."""
    tuner = tuner_of(tmp_path, grid())
    tuner.save()
    before = (tmp_path / "p" / "oracle.json").stat().st_ino
    tuner.save()
    assert (tmp_path / "p" / "oracle.json").stat().st_ino == before


def test_backups_of_all_trials_share_a_folder(tmp_path: Path) -> None:
    tuner = keras_tuner.RandomSearch(
        lambda hp: keras.Sequential(), "loss", max_trials=1, directory=str(tmp_path), project_name="p"
    )
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    trial = Trial(keras_tuner.HyperParameters(), trial_id="0")
    tuner._configure_tensorboard_dir([backup], trial, 0)
    assert backup.backup_dir == str(tmp_path / "backup")
