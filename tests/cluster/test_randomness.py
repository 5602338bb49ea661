"""Random numbers on several processes: one order of the data, one set of weights, a mask of its own on every replica.

Every process sets another seed here, as scripts do that add the rank to it.
"""

from __future__ import annotations

import functools
import traceback
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.features.table import BATCH, mlp, rows
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

_DEADLINE = 150
_ROWS, _SIZE, _EPOCHS = 48, 8, 3


class Failure(str):
    """A traceback in place of a result."""


class Seen(layers.Layer):
    """One weight a row of the data; its gradient is the number of times that the row was seen."""

    def build(self, shape: tuple) -> None:
        self.seen = self.add_weight(shape=(shape[-1], 1), initializer="zeros", name="seen")

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, self.seen)


class Masks(layers.Layer):
    """One weight a row and feature; its gradient is the Dropout mask that the row got."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = layers.Dropout(0.5)

    def build(self, shape: tuple) -> None:
        self.masks = self.add_weight(shape=(shape[-1], 64), initializer="zeros", name="masks")

    def call(self, x: Any, training: bool = False) -> Any:
        own = keras.ops.matmul(x, self.masks)
        return keras.ops.sum(own * self.dropout(keras.ops.ones_like(own), training=training), -1, keepdims=True)


def reading(strategy: Any, layer: type, columns: int, learning_rate: float) -> keras.Model:
    """A model whose weights are minus what its layer has counted: the loss is the output itself."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((columns,)), layer()])
        model.compile(keras.optimizers.SGD(learning_rate), lambda y_true, y_pred: y_pred)
    return model


def times_seen(strategy: Any, make_data: Any, **arguments: object) -> list[float]:
    """How often `fit` has seen each row."""
    model = reading(strategy, Seen, _ROWS, float(_SIZE))
    model.fit(*make_data(), epochs=_EPOCHS, verbose=0, **arguments)
    return (-model.get_weights()[0][:, 0]).tolist()


def masks_of_rows(strategy: Any, n: int) -> np.ndarray:
    """The Dropout masks that `n` rows got in one step."""
    keras.utils.set_random_seed(5)
    model = reading(strategy, Masks, n, float(n))
    model.fit(np.eye(n, dtype="float32"), np.zeros((n, 1)), batch_size=n, shuffle=False, verbose=0)
    return -model.get_weights()[0]


def dropout_and_norm() -> keras.Model:
    optimizer = lambda: keras.optimizers.Adam(0.01)  # noqa: E731
    return mlp(layers.BatchNormalization, lambda: layers.Dropout(0.5), optimizer=optimizer)()


def shuffled_weights(strategy: Any) -> list[np.ndarray]:
    """Weights before and after training on data that `fit` shuffles."""
    with strategy.scope():
        model = mlp(layers.BatchNormalization)()
    before = model.get_weights()
    model.fit(*rows(90), batch_size=BATCH, epochs=2, shuffle=True, verbose=0)
    return before + model.get_weights()


def state_after_training(strategy: Any) -> dict[str, list[bytes]]:
    """The bytes of every variable of a trained model, one value a local replica."""
    with strategy.scope():
        model = dropout_and_norm()
    model.fit(*rows(90), batch_size=BATCH, epochs=2, verbose=0)
    generators = [g for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", [])]
    assert generators, "the model should have a seed generator"
    variables = [*model.variables, *model.optimizer.variables, *(g.state for g in generators)]
    return {
        f"{i} {v.path}": [np.asarray(x).tobytes() for x in strategy.experimental_local_results(v.value)]
        for i, v in enumerate(variables)
    }


def everything() -> dict[str, Any]:
    """Runs on every process."""
    import tensorflow as tf

    import tfdist

    rank = tfdist.discover().rank
    one = tf.distribute.get_strategy()
    keras.utils.set_random_seed(100 + rank)
    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=40)
    found: dict[str, Any] = {}

    def note(name: str, function: Any, *arguments: Any, seed: int | None = 200 + rank, **more: Any) -> None:
        print("check:", name, flush=True)
        if seed is not None:
            keras.utils.set_random_seed(seed)
        try:
            found[name] = function(*arguments, **more)
        except Exception:
            found[name] = Failure(traceback.format_exc())

    def arrays() -> tuple:
        return np.eye(_ROWS, dtype="float32"), np.zeros((_ROWS, 1))

    def dataset() -> tuple:
        return (tf.data.Dataset.from_tensor_slices(arrays()).shuffle(_ROWS).batch(_SIZE),)

    note("seed before the strategy", shuffled_weights, strategy, seed=None)
    note("seed before the strategy, one process", shuffled_weights, one, seed=100)
    note("seed after the strategy", shuffled_weights, strategy)
    note("seed after the strategy, one process", shuffled_weights, one, seed=200)
    note("numpy arrays", times_seen, strategy, arrays, batch_size=_SIZE, shuffle=True)
    note("tf.data", times_seen, strategy, dataset)
    note("masks", masks_of_rows, strategy, 8)
    note("masks, one process", masks_of_rows, one, 2)
    note("global", state_after_training, strategy)
    note("local", state_after_training, tfdist.MultiWorkerMirroredStrategy(batch_norm="local"))
    return found


@functools.cache
def results() -> list[dict[str, Any]]:
    return run_local(everything, devices_per_worker=2, timeout=_DEADLINE)


def check(rank: int, name: str) -> Any:
    """What one check found on one rank."""
    found = results()[rank][name]
    assert not isinstance(found, Failure), f"rank {rank}: {found}"
    return found


@pytest.mark.timeout(_DEADLINE + 30)
class TestRandomness:
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_ranks_with_seeds_of_their_own_equal_one_process_with_the_chiefs(self, when):
        name = f"seed {when} the strategy"
        expected = check(0, f"{name}, one process")
        count = len(expected) // 2
        for rank in range(2):
            received = check(rank, name)
            for a, b in zip(expected[:count], received[:count], strict=True):
                np.testing.assert_array_equal(b, a, err_msg=f"rank {rank}: initial weights")
            for a, b in zip(expected[count:], received[count:], strict=True):
                np.testing.assert_allclose(b, a, atol=1e-5, err_msg=f"rank {rank}: weights after training")

    @pytest.mark.parametrize("data", ["numpy arrays", "tf.data"])
    def test_every_row_is_seen_once_an_epoch(self, data):
        for rank in range(2):
            assert check(rank, data) == [_EPOCHS] * _ROWS, f"rank {rank}"

    def test_dropout_masks_differ_between_replicas(self):
        masks = check(0, "masks")
        assert (masks == check(1, "masks")).all()
        assert set(np.unique(masks).tolist()) == {0.0, 2.0}
        assert len({mask.tobytes() for mask in masks}) == 8, "two rows got the same mask"

    def test_first_replica_has_the_masks_of_one_process(self):
        np.testing.assert_array_equal(check(0, "masks")[:2], check(0, "masks, one process"))

    @pytest.mark.parametrize("batch_norm", ["global", "local"])
    def test_all_replicas_end_with_the_same_bits(self, batch_norm):
        chief, other = (check(rank, batch_norm) for rank in range(2))
        assert len(chief) > 15
        assert any("moving_variance" in name for name in chief)
        for (name, values), others in zip(chief.items(), other.values(), strict=True):
            assert len(values) == 2, name
            assert len({*values, *others}) == 1, f"{name} differs between the replicas"
