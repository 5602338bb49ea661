"""Rows of a table that are looked up whatever the rows of the batch, such as positions: one gradient, not one each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.tiers import daily

LENGTH, TOKENS, WIDTH = 6, 11, 4
random = np.random.default_rng(0)
X, Y = random.integers(0, TOKENS, (37, LENGTH)), random.normal(size=(37, 1))


class Lookups(keras.layers.Layer):
    """Adds to the embeddings of tokens those of `ids(tokens)`, perhaps of the same table."""

    def __init__(self, ids: Callable, tables: int) -> None:
        super().__init__()
        tables = [keras.layers.Embedding(TOKENS, WIDTH) for _ in range(tables)]
        self.tokens, self.others, self.ids = tables[0], tables[-1], ids

    def call(self, tokens: Any) -> Any:
        found = self.others(self.ids(tokens))
        return self.tokens(tokens) + (ops.mean(found, axis=0) if self.ids is distances else found)


def positions(tokens: Any) -> Any:
    return ops.arange(ops.shape(tokens)[-1])


def distances(tokens: Any) -> Any:
    """The same row several times."""
    at = ops.arange(LENGTH)
    return ops.abs(at[:, None] - at[None, :])


def of_each_row(tokens: Any) -> Any:
    return ops.broadcast_to(positions(tokens), ops.shape(tokens))


# Which rows, the length of the texts, and how many tables there are.
KINDS: dict[str, tuple[Callable, int | None, int]] = {
    "positions": (positions, LENGTH, 2),
    "positions of texts of any length": (positions, None, 2),
    "a row several times": (distances, LENGTH, 2),
    "positions of each row": (of_each_row, LENGTH, 2),
    "a row several times, in the table of the tokens": (distances, LENGTH, 1),
    "positions of each row, of texts of any length": (of_each_row, None, 2),
}


# By how much weights differ at least where tfdist does not know of these rows.
UNKNOWN = {"positions": 1e-4, "a row several times, in the table of the tokens": 1e-6}


def build(name: str, optimizer: str, **changes: Any) -> keras.Model:
    ids, length, tables = KINDS[name]
    keras.utils.set_random_seed(2)
    inputs = keras.Input((length,), dtype="int64")
    hidden = keras.layers.Dense(3, "tanh")(Lookups(ids, tables)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(hidden)))
    model.compile(optimizer, "mse", **changes)
    return model


def trained(name: str, optimizer: str, **changes: Any) -> list[np.ndarray]:
    model = build(name, optimizer, **changes)
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def gap(strategy: tf.distribute.Strategy, name: str, optimizer: str, **changes: Any) -> float:
    with strategy.scope():
        found = trained(name, optimizer, **changes)
    pairs = zip(found, trained(name, optimizer, **changes), strict=True)
    return max(float(np.max(np.abs(one - other))) for one, other in pairs)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("optimizer", daily(["adam", "rmsprop", "adagrad"], "adam"))
@pytest.mark.parametrize("name", daily(KINDS, *list(KINDS)[:5]))
def test_equals_one_process(mirrored: tf.distribute.Strategy, name: str, optimizer: str) -> None:
    assert gap(mirrored, name, optimizer) < 1e-9


@pytest.mark.nightly
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("changes", [{"jit_compile": True}, {"steps_per_execution": 2}], ids=str)
def test_ways_to_run(mirrored: tf.distribute.Strategy, changes: dict[str, Any]) -> None:
    assert gap(mirrored, "positions", "adam", **changes) < 1e-9


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", UNKNOWN)
def test_negative_control(mirrored: tf.distribute.Strategy, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    state = "tfdist.strategies.data_parallel.state.ReplicaState.is_of_no_row"
    monkeypatch.setattr(state, lambda self, value: False)
    assert gap(mirrored, name, "adam") > UNKNOWN[name]
