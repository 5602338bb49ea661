"""What cannot be resumed exactly: refused, or resumed at the ends of epochs with a warning, never silently wrong."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfdist
from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import KILLED, Case, Trials, at
from tests.tiers import daily
from tfdist.checkpoint.store import CheckpointStore
from tfdist.supervision.exit_codes import REFUSED

pytestmark = pytest.mark.slow

KILL = at(8)
BACKUP = {"save_freq": 1, "asynchronous": False}
JOB = Job(epochs=3, callbacks=("csv",), validation="", backup=BACKUP)


def at_ends_of_epochs(name: str, reason: str, data: str, **options: Any) -> Any:
    job = JOB.light.with_(data=data, epochs=3, **options)
    return pytest.param(Case(name, (job.with_(kill=KILL), job)), reason, id=name)


OBSTACLES = [
    at_ends_of_epochs(
        "generator", "the data come from a Generator, not a tf.data.Dataset", "generator", fit={"steps_per_epoch": 15}
    ),
    at_ends_of_epochs(
        "augmentation layer",
        "it changes a variable (a Keras augmentation layer counts its random numbers), which starts at 0 again; put "
        "the layer into the model, or use tf.image.stateless_random_* in map",
        "augmentation layer",
    ),
    at_ends_of_epochs(
        "PyDataset that draws",
        "Noisy.__getitem__ draws from the global random state of Python, NumPy or TensorFlow; draw from a "
        "generator that is made from the index instead, such as np.random.default_rng(index)",
        "PyDataset, np.random",
    ),
    at_ends_of_epochs(
        "PyDataset that changes",
        "Reshuffled changes in on_epoch_begin or on_epoch_end; give it get_state() and set_state(state), and that can "
        "be saved",
        "PyDataset, forgetful",
    ),
]
# Their data begin anew with each process or epoch, so that even a resumed epoch sees the same.
SAME_AGAIN = ("generator",)


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "reason"), OBSTACLES)
def test_resumes_at_ends_of_epochs_and_says_so(case: Case, reason: str, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, 0]
    warning = (
        f"UserWarning: BackupAndRestore saves at the ends of epochs only: {reason}. After a kill, the epoch that it "
        "interrupted is trained again from its beginning, on the data that the new process gives."
    )
    for run in outcome.runs:
        assert run.log.count(warning) == 1
    # Killed at step 9 of the second epoch, of which nothing is saved.
    assert "goes on at step 0 of epoch 2, after " in outcome.log
    assert outcome.steps[1] == outcome.reference.result["steps of this process"] * 2 // 3
    assert outcome.runs[1].result["fit 1: epochs"] == [0, 1, 2]
    assert len(outcome.runs[1].result["fit 1: history/loss"]) == 3
    if case.name in SAME_AGAIN:
        assert outcome.differences == []


def changed(name: str, error: str, **changes: Any) -> Any:
    job = JOB.with_(**changes.pop("before", {}))
    return pytest.param(Case(name, (job.with_(kill=KILL), job.with_(**changes))), error, id=name)


CHANGES = [
    changed(
        "a wider model",
        r"StateMismatchError: The backup is of another model or optimizer\. Received: model/2 is \S*kernel with shape "
        r"\[4, 9\] and dtype float32\. Expected, as saved: \S*kernel with shape \[4, 8\] and dtype float32\. Build and "
        r"compile the model as before, or pass another backup_dir to start over\.",
        model="wider",
    ),
    changed(
        "another batch size",
        r"ValueError: The backup was made within an epoch of other data\. Received: number of batches: 8\. Expected, "
        r"as saved: 15\. Pass the same data \(with the same seeds\) as before, or another backup_dir to start over\.",
        fit={"batch_size": 8},
    ),
    changed(
        "data that cannot be resumed",
        r"ValueError: The backup was made within an epoch of data whose position could be found again\. Received data "
        r"for which it cannot: it runs Python code .*\. Expected: the same data as before; or pass another backup_dir",
        before={"data": "dataset in order"},
        data="from_generator",
    ),
    changed(
        "two backups",
        r"ValueError: Received: two BackupAndRestore callbacks in one fit\. Expected: one; a resumed fit can only "
        r"follow one\.",
        backup={**BACKUP, "times": 2},
    ),
]


@pytest.mark.parametrize(("case", "error"), daily(CHANGES))
def test_refuses_what_does_not_fit_the_backup(case: Case, error: str, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, 1 if case.name == "two backups" else REFUSED]
    last = outcome.log.strip().splitlines()[-1]
    assert re.match(rf"(\w+\.)*{error}", last), last
    assert outcome.steps[1] == 0
    # The backup is as it was: with the right script the fit can go on.
    newest = CheckpointStore(str(outcome.folder / "backup"), writer=False).newest()
    assert (newest.meta["epoch"], newest.meta["steps"]) == (1, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"save_freq": 0},
            "Received: save_freq=0. Expected 'epoch', a number of steps from 1, or a duration above 0, such as "
            "'10min', '30s' or '2h'.",
        ),
        ({"save_freq": "0s"}, "Received: save_freq='0s'. Expected 'epoch', a number of steps from 1, or a duration"),
        ({"delete_checkpoint": "no"}, "Received: delete_checkpoint='no'. Expected: True or False."),
        ({"max_to_keep": 0}, "Received: max_to_keep=0. Expected: an integer of at least 1, since the newest backup"),
        ({"backup_dir": ""}, "Received: backup_dir=''. Expected: the path of a folder, such as 'backup'."),
    ],
)
def test_refuses_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        tfdist.callbacks.BackupAndRestore(**{"backup_dir": "backup", **options})
    assert str(caught.value).startswith(message)


def test_refuses_the_callback_of_keras_beside_it(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callbacks = [module.callbacks.BackupAndRestore(str(tmp_path / module.__name__)) for module in (keras, tfdist)]
    with pytest.raises(
        ValueError, match=r"Received: keras.callbacks.BackupAndRestore beside that of tfdist\. Expected"
    ):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), callbacks=callbacks, verbose=0)


def test_arguments_are_those_of_keras() -> None:
    own, of_keras = (
        list(inspect.signature(module.callbacks.BackupAndRestore).parameters.values()) for module in (tfdist, keras)
    )
    assert [(p.name, p.default) for p in own[: len(of_keras)]] == [(p.name, p.default) for p in of_keras]
    assert {p.kind for p in own[len(of_keras) :]} == {inspect.Parameter.KEYWORD_ONLY}
    assert tfdist.callbacks.BackupAndRestore("backup", "epoch", True, False, max_to_keep=1).max_to_keep == 2


def test_the_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tfdist.callbacks.BackupAndRestore("~/backup").backup_dir == f"{tmp_path}/backup"
    assert tfdist.callbacks.BackupAndRestore(Path("~/backup")).backup_dir == f"{tmp_path}/backup"
    assert tfdist.callbacks.BackupAndRestore("gs://bucket/~").backup_dir == "gs://bucket/~"


def test_a_folder_that_cannot_be(trials: Trials, tmp_path: Path) -> None:
    (tmp_path / "backup").write_text("a file")
    ended = trials.jobs.run(JOB.light, tmp_path)
    assert ended.code == 1
    assert (
        "OSError: BackupAndRestore cannot use its folder. Received: backup_dir 'backup': [Errno 17] File exists: "
        f"'{tmp_path}/backup'. Expected: a folder that this process can make and write to. Pass another backup_dir."
    ) in ended.log
    assert ended.result["steps of this process"] == 0
