"""`batch_shares=[3, 1]` on two logical devices: rows of the feature table equal one process, as with equal shares."""

from __future__ import annotations

import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.features import reference
from tests.features.running import differences_of
from tests.features.table import FEATURES
from tests.logical.conftest import DEVICES
from tests.tiers import daily
from tfdist.strategies.data_parallel import strategy as data_parallel

# Rows that are labelled and such that are not are cut by their own numbers, which only equal pieces divide.
NAMES = tuple(name for name in FEATURES if "of other numbers, in one batch" not in name)
DAILY = (
    "last batch of one row (81 rows)",
    "BatchNormalization in a custom train_step, uneven",
)


@pytest.fixture(scope="module")
def unequal(four_devices) -> tfdist.MirroredStrategy:
    return tfdist.MirroredStrategy(DEVICES, batch_shares=[3, 1])


@pytest.mark.parametrize("name", daily(NAMES, *DAILY))
def test_equals_one_process(unequal, name):
    assert differences_of(unequal, name, reference.folder()), "nothing was compared"


@pytest.mark.parametrize("method", ["dataset", "arrays", "on_batch", "own loop"])
def test_each_device_gets_its_share(unequal, method):
    """Rows of a step on each device, as the step sees them."""
    seen: dict[int, set[int]] = {0: set(), 1: set()}

    def note(x: tf.Tensor) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        tf.numpy_function(lambda i, n: seen[int(i)].add(int(n)), [replica, tf.shape(x)[0]], [])

    class Noting(keras.Sequential):
        def test_step(self, data: tuple) -> dict:
            note(data[0])
            return super().test_step(data)

    x, y = np.ones((16, 4), "float32"), np.ones((16, 1), "float32")
    with unequal.scope():
        model = Noting([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    if method == "dataset":
        model.evaluate(dataset, verbose=0)
    elif method == "arrays":
        model.evaluate(x, y, batch_size=8, verbose=0)
    elif method == "on_batch":
        model.test_on_batch(x[:8], y[:8])
    else:
        for batch in unequal.experimental_distribute_dataset(dataset):
            unequal.run(lambda x, y: note(x), args=batch)
    assert seen == {0: {6}, 1: {2}}


@pytest.mark.parametrize("shares", ["equal", [], [1, 0], [1, -2], [1, float("nan")], [1, float("inf")], 3, [True, 2]])
def test_no_shares_are_refused(four_devices, shares):
    with pytest.raises(ValueError, match=re.escape(f"Received: batch_shares={shares!r}. Expected: a list of positive")):
        tfdist.MirroredStrategy(DEVICES, batch_shares=shares)


def test_shares_of_other_devices_are_refused(four_devices):
    with pytest.raises(
        ValueError, match=r"batch_shares=\[2\.0, 1\.0, 1\.0\] for 2 devices\. Expected: a number for each"
    ):
        tfdist.MirroredStrategy(DEVICES, batch_shares=[2, 1, 1])
    # There is nothing to be shared.
    assert tfdist.MirroredStrategy(DEVICES[:1], batch_shares=[2, 1])._ends_of_pieces is None


def test_shares_may_be_an_array(four_devices):
    assert tfdist.MirroredStrategy(DEVICES, batch_shares=np.array([3, 1]))._ends_of_pieces == (0.75, 1.0)


def test_devices_of_one_process_are_not_timed(four_devices):
    with pytest.raises(
        ValueError, match=r"batch_shares='auto' with several devices in one process.* Expected: a number"
    ):
        tfdist.MirroredStrategy(DEVICES, batch_shares="auto")
    # There is nothing to be shared.
    assert tfdist.MirroredStrategy(DEVICES[:1], batch_shares="auto")._automatic_shares is None


def test_shards_of_the_users_own_are_said_to_have_no_shares(unequal, caplog):
    with unequal.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((np.ones((16, 4)), np.ones((16, 1)))).batch(4)

    with caplog.at_level(logging.WARNING, "tfdist"):
        for _ in range(2):
            model.fit(unequal.distribute_datasets_from_function(of_worker), verbose=0)
    (message,) = (record.getMessage() for record in caplog.records if "batch_shares" in record.getMessage())
    assert message == data_parallel._SHARES_ARE_FOR_GLOBAL_BATCHES % [3.0, 1.0]
