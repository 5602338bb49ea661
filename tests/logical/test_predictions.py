"""`predict` on two replicas of one process equals one: values of all kinds, and outputs without rows."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.models import in_scope, ready
from tests.predicted_values import OUTPUTS, Returns, X, assert_same, own_loop, predictions
from tests.tiers import daily

# Rows over four replicas whose shares, as floats, do not add up to 1.
UNEVEN = 35


@pytest.mark.parametrize(
    "name",
    daily(OUTPUTS, "ragged", "large whole numbers", "means and sums", "of means and sums", "sizes", "moved rows"),
)
def test_equals_one_process(mirrored, recwarn, name):
    found, expected = (predictions(strategy, [name])[name] for strategy in (mirrored, tf.distribute.get_strategy()))
    assert_same(found, expected, name)
    if name == "of means and sums":
        assert not [one for one in recwarn if "Received" in str(one.message)]


def test_own_loops_gather_ragged_and_sparse(mirrored):
    looped = own_loop(mirrored, ["ragged", "sparse"])
    assert looped["ragged"] == OUTPUTS["ragged"](tf.constant(X[:4])).to_list()
    assert looped["sparse"][2] == [4, 2]


def test_a_gather_of_columns_of_ragged_rows_is_refused(mirrored):
    ragged = mirrored.run(lambda: tf.ragged.constant([[1], [2, 3]]))
    with pytest.raises(ValueError, match=r"Received: axis=1 to gather a RaggedTensor. Expected: axis=0."):
        mirrored.gather(ragged, axis=1)


def test_a_gather_along_the_last_axis(mirrored):
    text = mirrored.run(lambda: tf.constant([["a"], ["b"]]))
    assert mirrored.gather(text, axis=-1).numpy().tolist() == [[b"a", b"a"], [b"b", b"b"]]


def test_a_maximum_over_the_batch_is_averaged_with_a_warning(mirrored):
    model = in_scope(mirrored, lambda: ready(Returns(lambda x: (x, tf.reduce_max(x))), "sgd", "mse"))
    with pytest.warns(UserWarning, match=r"Received: an output of shape \(\) .* and the average is returned. Expected"):
        _, maxima = model.predict(X[:4], batch_size=4, verbose=0)
    np.testing.assert_allclose(maxima, [(3 + 7) / 2])


def test_whole_numbers_are_averaged_without_a_loss(four_devices):
    """The weights of replicas add up to 1 but for the last digit."""
    strategy = tfdist.MirroredStrategy(four_devices)
    model = in_scope(strategy, lambda: ready(Returns(lambda x: (x, tf.reduce_max(tf.cast(x, tf.int32)))), "sgd", "mse"))
    with pytest.warns(UserWarning, match="and the average is returned"):
        _, maxima = model.predict(np.ones((UNEVEN, 2), "float32"), batch_size=UNEVEN, verbose=0)
    assert maxima == 1


class Dense(Returns):
    def __init__(self, function):
        super().__init__(lambda x: function(self.dense(x)))
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")


BUILT_BY_PREDICT = {
    "a mean": lambda rows: tf.reduce_mean(rows, 0, keepdims=True),
    "a sum": lambda rows: tf.reduce_sum(rows),
    "rows that are kept": lambda rows: tf.boolean_mask(rows, rows[:, 0] > 20),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", BUILT_BY_PREDICT)
def test_a_model_that_predict_builds(mirrored, recwarn, name):
    found = []
    for strategy in (mirrored, tf.distribute.get_strategy()):
        with strategy.scope():
            model = Dense(BUILT_BY_PREDICT[name])
        found.append(model.predict(X, batch_size=4, verbose=0))
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert not [one for one in recwarn if "Received" in str(one.message)]
