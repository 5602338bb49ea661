"""Random numbers on several processes: one order of the data, one set of weights, a mask of its own on every replica.

Every process sets another seed here, as scripts do that add the rank to it.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.cluster.attempt import attempt, error_of, found_on
from tests.cluster.counting import EPOCHS, ROWS, SIZE, masks_of_rows, one_hot_rows, times_seen
from tests.features.table import BATCH, mlp, rows
from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

# What `make test` looks at; a process runs this or the rest.
DAILY = (
    "seed before the strategy",
    "seed before the strategy, one process",
    "tf.data with a seed",
    "unlike seeds",
    "masks",
    "masks, one process",
    "global",
)

_DEADLINE = 150


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


def everything(daily: bool) -> dict[str, Any]:
    """Runs on every process."""
    import tensorflow as tf

    import tfdist

    rank = tfdist.discover().rank
    one = tf.distribute.get_strategy()
    keras.utils.set_random_seed(100 + rank)
    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=40)
    found: dict[str, Any] = {}

    def note(name: str, function: Any, *arguments: Any, seed: int | None = 200 + rank, **more: Any) -> None:
        if (name in DAILY) != daily:
            return
        if seed is not None:
            keras.utils.set_random_seed(seed)
        found[name] = attempt(name, function, *arguments, **more)

    def dataset(seed: int | None = None) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(one_hot_rows()).shuffle(ROWS, seed=seed).batch(SIZE)

    note("seed before the strategy", shuffled_weights, strategy, seed=None)
    note("seed before the strategy, one process", shuffled_weights, one, seed=100)
    note("seed after the strategy", shuffled_weights, strategy)
    note("seed after the strategy, one process", shuffled_weights, one, seed=200)
    note("numpy arrays", times_seen, strategy, *one_hot_rows(), batch_size=SIZE, shuffle=True)
    note("tf.data", lambda: times_seen(strategy, dataset()), seed=9)
    note("tf.data with a seed", lambda: times_seen(strategy, dataset(seed=1)), seed=9)
    note("unlike seeds", lambda: error_of(times_seen, strategy, dataset()))
    # TensorFlow mixes the seed of a shuffle with that of the process.
    note("unlike seeds, one in the dataset", lambda: error_of(times_seen, strategy, dataset(seed=1)))
    note("masks", masks_of_rows, strategy, 8)
    note("masks, one process", masks_of_rows, one, 2)
    note("global", state_after_training, strategy)
    note("local", state_after_training, tfdist.MultiWorkerMirroredStrategy(batch_norm="local"))
    return found


@functools.cache
def results(daily: bool) -> list[dict[str, Any]]:
    return run_local(everything, args=(daily,), devices_per_worker=2, timeout=_DEADLINE)


def check(rank: int, name: str) -> Any:
    return found_on(results(name in DAILY), rank, name)


@pytest.mark.timeout(_DEADLINE + 30)
class TestRandomness:
    @pytest.mark.parametrize("when", daily(["before", "after"], "before"))
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

    @pytest.mark.parametrize("data", daily(["numpy arrays", "tf.data", "tf.data with a seed"], "tf.data with a seed"))
    def test_every_row_is_seen_once_an_epoch(self, data):
        for rank in range(2):
            assert check(rank, data) == [EPOCHS] * ROWS, f"rank {rank}"

    @pytest.mark.parametrize("name", daily(["unlike seeds", "unlike seeds, one in the dataset"], "unlike seeds"))
    def test_datasets_that_shuffle_differently_are_refused(self, name):
        """They were made before `fit`, with the seeds of their processes: rows would be seen twice, or never."""
        for rank in range(2):
            kind, message = check(rank, name)
            assert kind == "ValueError", f"rank {rank}: {message}"
            assert "The processes have different datasets. Received: seeds of its shuffling" in message
            assert "Give `keras.utils.set_random_seed` the same seed on every process" in message
            assert "Pass a seed" not in message, "a seed in the dataset alone does not help"
            assert "worker 0 (127.0.0.1:" in message and "worker 1 (127.0.0.1:" in message

    def test_dropout_masks_differ_between_replicas(self):
        masks = check(0, "masks")
        assert (masks == check(1, "masks")).all()
        assert set(np.unique(masks).tolist()) == {0.0, 2.0}
        assert len({mask.tobytes() for mask in masks}) == 8, "two rows got the same mask"

    def test_first_replica_has_the_masks_of_one_process(self):
        np.testing.assert_array_equal(check(0, "masks")[:2], check(0, "masks, one process"))

    @pytest.mark.parametrize("batch_norm", daily(["global", "local"], "global"))
    def test_all_replicas_end_with_the_same_bits(self, batch_norm):
        chief, other = (check(rank, batch_norm) for rank in range(2))
        assert len(chief) > 15
        assert any("moving_variance" in name for name in chief)
        for (name, values), others in zip(chief.items(), other.values(), strict=True):
            assert len(values) == 2, name
            assert len({*values, *others}) == 1, f"{name} differs between the replicas"
