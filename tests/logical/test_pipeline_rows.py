"""Pipelines of models whose outputs have more rows than their inputs, as have the targets."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.logical.pipelines import numbers, pipeline
from tests.models import in_scope, ready

pytestmark = pytest.mark.usefixtures("four_devices")


def _model() -> keras.Model:
    keras.utils.set_random_seed(0)
    pairs = keras.layers.Lambda(lambda x: tf.reshape(x, (-1, 2)))
    return ready(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(4), pairs]), "sgd", "mse"
    )


@pytest.mark.parametrize("batch_size", [10, 3])
def test_predict_returns_all_rows(batch_size):
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    alone = _model()
    piped = in_scope(tfdist.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=4), _model)
    found = piped.predict(x, batch_size=batch_size, verbose=0)
    assert found.shape == (80, 2)
    np.testing.assert_allclose(found, alone.predict(x, batch_size=batch_size, verbose=0), atol=1e-6)


def _paired() -> keras.Model:
    """Makes two rows of each; what comes behind is on another stage."""
    pairs = keras.layers.Lambda(lambda x: tf.reshape(x, (-1, 2)))
    return ready(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), pairs, keras.layers.Dense(3)]),
        keras.optimizers.SGD(0.1),
        "mse",
        metrics=["mae"],
        weighted_metrics=[],
    )


def test_targets_that_belong_to_no_row():
    """5 targets for 3 rows."""
    model = in_scope(pipeline(num_microbatches=2), _paired)
    specs = tf.TensorSpec((None, 4)), tf.TensorSpec((None, 3))
    batches = tf.data.Dataset.from_generator(lambda: iter([(numbers(3, 4), numbers(5, 3))]), output_signature=specs)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a multiple of the rows of the inputs"):
        model.fit(batches, verbose=0)
