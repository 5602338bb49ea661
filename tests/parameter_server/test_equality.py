"""Everything is as in one process: with one execution at a time, and in synchronous training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import pytest

from tests.parameter_server.sections import found, run_sections
from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(330)]

_DEADLINE = 300
NAMES = ("SGD", "Adam", "Adagrad", "AdamW", "clipnorm", "schedule", "average", "accumulation", "loss scale")


def equality(mode: str, wanted: Collection[str]) -> dict[str, Any]:
    """In the chief: the largest differences, for each optimizer and number of steps in an execution."""
    import keras

    import tfdist
    from tests.parameter_server.models import (
        VOCABULARY,
        Kept,
        click_model,
        clicks,
        dense_model,
        gaps,
        make_optimizer,
        rows,
    )

    strategy = tfdist.ParameterServerStrategy(mode=mode, max_inflight=1, start_timeout=120)
    x, y = clicks()
    validation = clicks(100, seed=5)
    sections: dict[str, Callable[[], Any]] = {}
    for name in NAMES:

        def of_optimizer(name: str = name) -> dict[str, float]:
            return gaps(strategy, lambda: click_model(make_optimizer(name)), x, y, validation_data=validation)

        sections[name] = of_optimizer
    for steps in (1, 4, 32):

        def of_steps(steps: int = steps) -> dict[str, float]:
            def build() -> keras.Model:
                return click_model(make_optimizer("Adam"), steps_per_execution=steps)

            return gaps(strategy, build, x, y, validation_data=validation)

        sections[f"steps {steps}"] = of_steps
    sections["dropout"] = lambda: gaps(
        strategy, lambda: dense_model("adam", keras.layers.Dropout(0.3), keras.layers.GaussianNoise(0.1)), *rows()
    )
    sections["kept state"] = lambda: gaps(strategy, lambda: dense_model("adam", Kept()), *rows())
    sections["small batches"] = lambda: gaps(strategy, lambda: dense_model("sgd"), *rows(7), batch_size=1)
    sections["batches of three"] = lambda: gaps(strategy, lambda: dense_model("sgd"), *rows(65), batch_size=3)

    def places() -> dict[str, list[str]]:
        with strategy.scope():
            model = click_model(make_optimizer("Adam"))
        model.fit(x, y, epochs=1, verbose=0)
        tables = [v for v in model.variables if v.shape and v.shape[0] == VOCABULARY]
        assert len(tables) == 1
        metrics = [variable for metric in model.metrics for variable in metric.variables]
        every = {"model": model.variables, "optimizer": model.optimizer.variables, "metrics": metrics}
        return {name: sorted({v.value.device for v in variables}) for name, variables in every.items()}

    sections["places"] = places
    return run_sections({name: sections[name] for name in wanted})


SECTIONS = [
    *NAMES,
    *(f"steps {steps}" for steps in (1, 4, 32)),
    "dropout",
    "kept state",
    "small batches",
    "batches of three",
]
# What `make test` runs: equality is looked at in `test_features.py`, too.
DAILY = {"async": (), "sync": ("dropout", "kept state", "places")}
# Where variables are does not change what is computed: with one parameter server a few will do.
ON_ONE_SERVER = ("Adam", "Adagrad", "steps 4", "places")


@functools.cache
def _results(mode: str, ps: int, names: tuple[str, ...]) -> dict[str, Any]:
    (outcome,) = run_local(equality, workers=2, ps=ps, timeout=_DEADLINE, args=(mode, names))
    return outcome


def result(mode: str, name: str, ps: int = 2) -> Any:
    """What a section has found, in the run that it belongs to."""
    if ps == 1:
        names = ON_ONE_SERVER
    elif name in DAILY[mode]:
        names = DAILY[mode]
    else:
        names = tuple(section for section in SECTIONS if section not in DAILY[mode])
    return found(_results(mode, ps, names), name)


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.exhaustive
def test_one_execution_at_a_time(name):
    gaps = result("async", name)
    assert gaps.keys() == {"weights", "optimizer", "history", "evaluate", "predict"}
    # Several steps in one function may be fused otherwise, and Adagrad's rows are updated by themselves.
    assert max(gaps.values()) <= (1e-6 if name in ("steps 4", "steps 32", "Adagrad") else 0.0), gaps


def test_state_of_layers_is_brought_together():
    gaps = result("sync", "kept state")
    assert max(gaps.values()) <= 1e-6, gaps


@pytest.mark.parametrize("name", [name for name in SECTIONS if name not in ("dropout", "kept state")])
@pytest.mark.exhaustive
def test_synchronous(name):
    gaps = result("sync", name)
    assert max(gaps.values()) <= 1e-6, gaps


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ON_ONE_SERVER[:3])
def test_synchronous_with_one_server(name):
    gaps = result("sync", name, ps=1)
    assert max(gaps.values()) <= 1e-6, gaps


def test_each_shard_has_its_own_dropout_mask():
    gaps = result("sync", "dropout")
    assert 1e-4 < gaps["weights"] < 0.5, gaps


@pytest.mark.parametrize("ps", daily([1, 2], "2"))
def test_where_variables_are(ps):
    places = result("sync", "places", ps)
    servers = [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(ps)]
    assert places["model"] == servers
    assert places["optimizer"] == servers
    assert places["metrics"] == ["/job:chief/replica:0/task:0/device:CPU:0"]


# --- Backup workers, and what is not equal ----------------------------------------------------------------------------


def of_mode(mode: str, backup_workers: int) -> dict[str, Any]:
    """In the chief: the largest differences of a training with several executions at a time."""
    import tfdist
    from tests.parameter_server.models import click_model, clicks, gaps, make_optimizer

    strategy = tfdist.ParameterServerStrategy(mode=mode, backup_workers=backup_workers, start_timeout=120)

    def train() -> dict[str, Any]:
        seen = gaps(strategy, lambda: click_model(make_optimizer("Adam")), *clicks())
        return {"gaps": seen, "shards": strategy._num_shards}

    return run_sections({"training": train})


@functools.cache
def results_of_mode(mode: str, backup_workers: int) -> dict[str, Any]:
    (outcome,) = run_local(of_mode, workers=2, ps=1, timeout=_DEADLINE, args=(mode, backup_workers))
    return found(outcome, "training")


@pytest.mark.exhaustive
def test_backup_workers_change_no_result():
    outcome = results_of_mode("sync", 1)
    assert outcome["shards"] == 1
    assert max(outcome["gaps"].values()) <= 1e-6, outcome


def test_asynchronous_training_is_not_equal():
    """What finds no difference above would find one here."""
    gaps = results_of_mode("async", 0)["gaps"]
    assert gaps["weights"] > 1e-5, gaps
