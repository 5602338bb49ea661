"""A policy with a budget: what is chosen, when, and that training stays what it is."""

from __future__ import annotations

import functools
import logging

import keras
import numpy as np
import pytest
from keras import layers

import tfdist
from tests.models import in_scope, ready
from tests.tiers import daily
from tfdist import memory
from tfdist.memory.modes import applied

ROWS, WIDTH, DEPTH = 256, 32, 4
NAMES = [f"block_{index}" for index in range(DEPTH)]


def build() -> keras.Model:
    x = inputs = keras.Input((WIDTH,))
    for name in NAMES:
        inner = [layers.Dense(8 * WIDTH, activation="gelu"), layers.Dropout(0.2), layers.Dense(WIDTH)]
        x = keras.Sequential([keras.Input((WIDTH,)), *inner], name=name)(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def compiled() -> keras.Model:
    keras.utils.set_random_seed(0)
    return ready(build(), "sgd", "mse")


def batches(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, WIDTH)).astype("float32"), np.ones((rows, 1), "float32")


def trained(model: keras.Model) -> list[np.ndarray]:
    model.fit(*batches(3 * ROWS), batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def same(ours, others, tolerance: float = 0.0) -> bool:
    return all(np.allclose(one, other, rtol=0, atol=tolerance) for one, other in zip(ours, others, strict=True))


def policy(share: float, **more) -> memory.MemoryPolicy:
    """A budget of so much of what plain training needs."""
    return memory.MemoryPolicy("auto", NAMES, budget=int(share * plain_total()), **more)


@functools.cache
def plain_total() -> int:
    model = compiled()
    return memory.choose(model, ROWS, memory.MemoryPolicy("auto", NAMES, budget="1TB")).plain


@functools.cache
def plain_weights() -> list[np.ndarray]:
    return trained(compiled())


@functools.cache
def chosen_for(share: float) -> memory.Choice:
    return memory.choose(compiled(), ROWS, policy(share))


@pytest.mark.nightly
def test_more_blocks_are_run_again_for_less_memory():
    counts, added = [], []
    for share in (1.0, 0.8, 0.6):
        model = compiled()
        choice = chosen_for(share)
        assert choice.chosen <= choice.budget
        modes = [choice.policy.mode_of(name) for name in NAMES]
        counts.append(modes.count("recompute"))
        added.append(choice.added)
        # What is told is what a report finds.
        device = memory.report(model, ROWS, choice.policy)["CPU:0"]
        assert choice.chosen == pytest.approx(device.total + 0.1 * device.step, abs=2)
    assert counts[0] == 0 and added[0] == 0.0
    assert counts == sorted(counts) and len(set(counts)) == 3
    # One more forward pass of all blocks is a third of a step.
    assert added == sorted(added) and added[-1] <= 1 / 3 + 1e-9


@pytest.mark.nightly
def test_an_impossible_budget_says_what_the_least_is():
    model = compiled()
    with pytest.raises(
        ValueError, match=r"budget='1 MB' for a step of model '.*' that needs at least (\d\S+) MB"
    ) as error:
        memory.choose(model, ROWS, memory.MemoryPolicy("auto", NAMES, budget="1 MB"))
    assert applied(model) is None
    least = float(str(error.value).split("at least ")[1].split(" MB")[0]) * 1e6
    assert 0 < least < chosen_for(0.6).chosen


def test_the_table_names_every_block():
    choice = chosen_for(0.6)
    lines = str(choice).splitlines()
    modes = [choice.policy.mode_of(name) for name in NAMES]
    assert lines[0].startswith(f"{modes.count('recompute')} of {DEPTH} blocks keep less: a step needs ")
    rows = [line.split() for line in lines if line.strip().startswith("block_")]
    assert [row[0] for row in rows] == NAMES
    assert [row[1] for row in rows] == modes
    assert sum(float(row[-1]) for row in rows) == pytest.approx(100 * choice.added, abs=0.5)


@pytest.mark.nightly
def test_fit_chooses_and_trains_the_same(caplog):
    model = compiled()
    memory.apply(model, policy(0.6))
    caplog.set_level(logging.WARNING, "tfdist")
    assert same(trained(model), plain_weights())
    assert "blocks keep less: a step needs" in caplog.text and "block_0" in caplog.text
    assert applied(model).is_automatic
    assert memory.report(model, ROWS)["CPU:0"].total <= 0.6 * plain_total()
    # Larger batches need another choice, and there is none.
    with pytest.raises(ValueError, match="needs at least"):
        model.fit(*batches(40 * ROWS), batch_size=20 * ROWS, verbose=0)
    memory.remove(model)
    assert applied(model) is None
    model.fit(*batches(40 * ROWS), batch_size=20 * ROWS, verbose=0)


@pytest.mark.parametrize("tolerance", daily([1e-6, 0.0], "1e-06"))
def test_nothing_is_changed_where_it_fits(caplog, tolerance):
    model = compiled()
    chosen = policy(1.1)
    memory.apply(model, chosen)
    caplog.set_level(logging.INFO, "tfdist")
    assert same(trained(model), plain_weights(), tolerance)
    told = [record for record in caplog.records if record.name == "tfdist"]
    assert [record.levelname for record in told] == ["INFO", "INFO"]
    assert "estimating a training step under 1 to 5 plans" in told[0].getMessage()
    assert f"0 of {DEPTH} blocks keep less: a step needs {plain_total() / 1e6:.4g} MB" in told[1].getMessage()


def test_blocks_that_are_found_say_which_layers_they_are():
    model = ready(
        keras.Sequential([keras.Input((WIDTH,)), *(layers.Dense(WIDTH, name=f"layer_{i}") for i in range(9))]),
        "sgd",
        "mse",
    )
    choice = memory.choose(model, ROWS, memory.MemoryPolicy("auto", budget="1GB"))
    assert choice.layers["block_0"] == "layer_0 to layer_2"
    [line] = [line for line in str(choice).splitlines() if line.strip().startswith("block_2")]
    assert line.endswith("layer_6 to layer_8")
    report = memory.report(model, ROWS, "recompute")
    assert report.layers == choice.layers and "layer_6 to layer_8" in str(report)
    assert memory.report(model, ROWS, memory.MemoryPolicy("recompute", ["layer_1"])).layers == {}


@pytest.mark.nightly
def test_under_a_strategy(mirrored, four_devices):
    chosen = policy(0.6, host=mirrored.extended.worker_devices[0])
    expected = in_scope(mirrored, lambda: trained(compiled()))
    mirrored_with = tfdist.MirroredStrategy(list(mirrored.extended.worker_devices), memory=chosen)
    model = in_scope(mirrored_with, compiled)
    assert same(trained(model), expected)
    assert applied(model).is_automatic


def test_batches_of_unknown_size():
    model = compiled()
    memory.apply(model, policy(0.6))

    def rows():
        for n in (3, 5):
            yield batches(n)

    with pytest.raises(ValueError, match=r"batches whose shapes are not all known.*drop_remainder=True.*generators"):
        model.fit(rows(), verbose=0)


def test_what_cannot_be_chosen(four_devices):
    model = compiled()
    with pytest.raises(ValueError, match=r"policy=None. Expected: tfdist.memory.MemoryPolicy\('auto'"):
        memory.choose(model, ROWS)
    with pytest.raises(ValueError, match=r"block 'block_9'. Expected: the name of a layer, such as"):
        memory.apply(model, memory.MemoryPolicy("auto", ["block_9"], budget="1GB"))
    offloaded = in_scope(tfdist.HostOffloadStrategy("CPU:1", "CPU:0"), compiled)
    with pytest.raises(ValueError, match="under HostOffloadStrategy, which has one of its own"):
        memory.choose(offloaded, ROWS, memory.MemoryPolicy("auto", budget="1GB"))
    model.compile("adam", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match=r"mode 'auto' or 'swap', which needs the graph.*Expected: run_eagerly=False"):
        memory.apply(model, policy(0.6))
