"""A folder with the backups of another fit: refused, finished or not, and with the first difference."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import KILLED, Case, Trials, at, interrupted
from tests.tiers import daily
from tfdist.checkpoint.training_state import difference, normalised
from tfdist.supervision.exit_codes import REFUSED

JOB = Job(backup={"save_freq": 4, "asynchronous": False}).light.with_(epochs=2)
KILL = at(8)


def changed(name: str, model: str, received: str, expected: str, finished: bool = False) -> Any:
    before = JOB if finished else JOB.with_(kill=KILL)
    return pytest.param(Case(name, (before, JOB.with_(model=model))), received, expected, id=name)


CHANGES = [
    changed("rate", "light, another rate", "optimizers[0].config.learning_rate is 0.05", "0.02"),
    changed("rate, finished", "light, another rate", "optimizers[0].config.learning_rate is 0.05", "0.02", True),
    changed("loss", "light, another loss", "loss is 'mse'", "'binary_crossentropy'"),
]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("case", "received", "expected"), CHANGES)
def test_refused(case: Case, received: str, expected: str, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED if case.jobs[0].kill else 0, REFUSED]
    folder = outcome.folder / "backup"
    assert outcome.log.rstrip().endswith(
        f"ValueError: The backup is of another fit. Received: {received}. Expected, as saved: {expected}. The folder "
        f"is {folder}. To train this one, delete that folder or pass another backup_dir; to go on with the saved one, "
        "make the model and compile it as before."
    )
    assert outcome.steps[1] == 0


LONGER = JOB.with_(epochs=4)
SAME = [
    interrupted("what cannot be serialised", JOB.with_(model="unserialisable"), KILL),
    interrupted(
        "a rate that callbacks have changed", LONGER.with_(callbacks=("schedule",), fits=2), {**at(7), "fit": 2}
    ),
    Case("a longer schedule", (JOB.with_(model="light, cosine"), LONGER.with_(model="light, cosine"))),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", daily(SAME), ids=str)
def test_the_same_fit(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED if job.kill else 0 for job in case.jobs]
    if case.name != "a longer schedule":  # which is another one than that of the first epochs
        assert outcome.differences == []


RENAMED = Case("other names, finished", (JOB, JOB.with_(model="light, after others")))
FEWER = Case("fewer epochs", (JOB, JOB.with_(epochs=1)))
SEED = Case("another seed", (JOB, JOB.with_(hook="another seed")))
FEWER_EPOCHS = (
    "Received: epochs=1. The finished fit has 2 epochs. To train for fewer, delete the folder {folder} or pass another "
    "backup_dir."
)
ANOTHER_SEED = (
    "Received: keras.utils.set_random_seed(8). The backup is of a fit with the seed 1, and goes on with that one."
)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "warnings"),
    daily([(RENAMED, []), (FEWER, [FEWER_EPOCHS]), (SEED, [ANOTHER_SEED])], "another seed"),
    ids=lambda value: str(value) if isinstance(value, Case) else "",
)
def test_what_the_user_is_told(case: Case, warnings: list[str], trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert (outcome.codes, outcome.steps[1]) == ([0, 0], 0)
    assert outcome.runs[1].result["fit 1: epochs"] == [0, 1]
    folder = outcome.folder / "backup"
    assert re.search(
        rf"The fit is finished: {folder}/checkpoint-\d+\. To start over, delete the folder {folder} or pass another "
        r"backup_dir\.",
        outcome.log,
    )
    assert re.findall(r"UserWarning: (.*)", outcome.log) == [text.format(folder=folder) for text in warnings]


def identity(rate: Any = 0.1, units: int = 3, replicas: int = 1, start: int = 0) -> dict[str, Any]:
    layers = [{"class_name": "Dense", "config": {"name": f"dense_{start + i}", "units": units + i}} for i in range(2)]
    config = {"model": {"layers": layers, "output_layers": [[f"dense_{start + 1}", 0, 0]]}}
    return {**normalised({**config, "optimizers": [{"config": {"learning_rate": rate}}]}), "replicas": replicas}


SCHEDULE = {"class_name": "CosineDecay", "config": {"decay_steps": 100}}
LONGER_SCHEDULE = {"class_name": "CosineDecay", "config": {"decay_steps": 200}}


@pytest.mark.parametrize(
    ("now", "more_epochs", "expected"),
    [
        ({}, False, None),
        ({"start": 7}, False, None),
        ({"units": 4}, True, "Received: model.layers[0].config.units is 4. Expected, as saved: 3."),
        ({"rate": 0.2}, True, "Received: optimizers[0].config.learning_rate is 0.2. Expected, as saved: 0.1."),
        ({"rate": 0.2, "replicas": 2}, False, None),
        (
            {"rate": SCHEDULE, "replicas": 2},
            True,
            "Received: optimizers[0].config.learning_rate is {'class_name': 'CosineDecay', 'config': "
            "{'decay_steps': 100}}. Expected, as saved: 0.1.",
        ),
    ],
)
def test_differences(now: dict[str, Any], more_epochs: bool, expected: str | None) -> None:
    assert difference(identity(), identity(**now), more_epochs) == expected


@pytest.mark.parametrize("more_epochs", [False, True])
def test_a_schedule_may_depend_on_the_number_of_epochs(more_epochs: bool) -> None:
    found = difference(identity(SCHEDULE), identity(LONGER_SCHEDULE), more_epochs)
    said = "Received: optimizers[0].config.learning_rate.config.decay_steps is 200. Expected, as saved: 100."
    assert found == (None if more_epochs else said)


@pytest.mark.parametrize("version", ["3.14.0", "3.15.1"])
def test_options_that_only_one_version_of_keras_has(version: str) -> None:
    saved = identity({"config": {"epsilon": 0.001}}) | {"keras": "3.14.0"}
    now = identity({"config": {"epsilon": 0.001, "renorm": False}}) | {"keras": version}
    found = difference(saved, now, False)
    same = version == "3.14.0"
    assert found == (
        "Received: optimizers[0].config.learning_rate.config.renorm is False. Expected, as saved: None."
        if same
        else None
    )
    now = identity({"config": {"epsilon": 0.1, "renorm": False}}) | {"keras": version}
    assert "optimizers[0].config.learning_rate.config.epsilon is 0.1. Expected, as saved: 0.001." in difference(
        saved, now, False
    )


def test_normalised() -> None:
    config = {
        "name": "model_3",
        "layers": [{"name": "dense_4", "batch_shape": (2, 5)}, {"name": "dense_9", "shared_object_id": 7, "seed": 8}],
        "inbound": [["dense_9", 0], ["dense_4", 1]],
        "function": {"class_name": "__lambda__", "config": {"code": "xyz"}},
        "value": list(range(100)),
        "other": {"not a number": float("nan"), "function": len},
    }
    found = normalised(config)
    assert re.fullmatch(r"100 items, [0-9a-f]{12}", found.pop("value"))
    assert difference(found, normalised({**config, "value": 0}), False) is not None
    assert repr(found) == repr(
        {
            "name": "model",
            "layers": [{"name": "dense", "batch_shape": [5]}, {"name": "dense_1"}],
            "inbound": [["dense_1", 0], ["dense", 1]],
            "function": "<lambda>",
            "other": {"not a number": float("nan"), "function": "len"},
        }
    )
