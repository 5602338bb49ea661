"""What is checked before a step is not checked again at every batch; and any attribute may be anything."""

from __future__ import annotations

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.models import in_scope, ready
from tfdist.inspection import model_state

X, Y = np.ones((4, 8), "float32"), np.ones((4, 1), "float32")


def built(strategy: tf.distribute.Strategy) -> keras.Model:
    model = in_scope(
        strategy, lambda: ready(keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]), "sgd", "mse")
    )
    return model


def walks(model: keras.Model, method: str = "train_on_batch") -> int:
    """How often attributes of layers are looked at in a call."""
    with mock.patch.object(model_state, "items_of", wraps=model_state.items_of) as items:
        getattr(model, method)(X, Y)
    return items.call_count


def test_batches_are_not_checked_again(mirrored):
    model = built(mirrored)
    assert walks(model) > 0
    walks(model)
    assert [walks(model), walks(model)] == [0, 0]
    walks(model, "test_on_batch")
    walks(model, "test_on_batch")
    assert [walks(model), walks(model, "test_on_batch")] == [0, 0]
    with mirrored.scope():
        model.compile("adam", "mse")
    assert walks(model) > 0, "compile may have brought anything"


def test_what_is_wrong_after_another_compile_is_refused(mirrored):
    model = built(mirrored)
    for _ in range(3):
        model.train_on_batch(X, Y)
    model.compile(keras.optimizers.SGD(), "mse")
    with pytest.raises(ValueError, match="Received: optimizer 'sgd"):
        model.train_on_batch(X, Y)


def test_attributes_that_hold_themselves(mirrored):
    model = built(mirrored)
    cyclic: dict = {"words": ["a"] * 5}
    cyclic["self"] = cyclic
    object.__setattr__(model, "cyclic", cyclic)
    assert np.isfinite(model.train_on_batch(X, Y))
