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

from tests import own_loops
from tests.cluster.attempt import attempt, error_of, found_on
from tests.cluster.counting import EPOCHS, ROWS, SIZE, masks_of_rows, one_hot_rows, times_seen
from tests.features.table import BATCH, mlp, rows
from tfdist.testing import run_local

_DEADLINE = 300
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(_DEADLINE + 30)]


def shuffled_weights(strategy: Any) -> list[np.ndarray]:
    """Weights before and after training on data that `fit` shuffles."""
    with strategy.scope():
        model = mlp(layers.BatchNormalization)()
    before = model.get_weights()
    model.fit(*rows(90), batch_size=BATCH, epochs=2, shuffle=True, verbose=0)
    return before + model.get_weights()


def everything() -> dict[str, Any]:
    """Runs on every process."""
    import tensorflow as tf

    import tfdist

    rank = tfdist.discover().rank
    one = tf.distribute.get_strategy()
    keras.utils.set_random_seed(100 + rank)
    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=300)
    found: dict[str, Any] = {}

    def note(name: str, function: Any, *arguments: Any, seed: int | None = 200 + rank, **more: Any) -> None:
        if seed is not None:
            keras.utils.set_random_seed(seed)
        found[name] = attempt(name, function, *arguments, **more)

    def dataset(seed: int | None = None) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(one_hot_rows()).shuffle(ROWS, seed=seed).batch(SIZE)

    note("shuffled", shuffled_weights, strategy, seed=None)
    note("shuffled, one process", shuffled_weights, one, seed=100)
    note("tf.data with a seed", lambda: times_seen(strategy, dataset(seed=1)), seed=9)
    # TensorFlow mixes the seed of a shuffle with that of the process.
    note("unlike seeds", lambda: [error_of(times_seen, strategy, data) for data in [dataset(), dataset(seed=1)]])
    for compiled in (True, False):
        # The same seeds on all processes, as tfdist sets them where a program gives none.
        note(f"noise {compiled}", own_loops.noise, strategy, compiled, seed=7)
        note(f"noise {compiled}, one process", own_loops.noise, one, compiled, seed=7)
    note("masks", masks_of_rows, strategy, 8)
    note("masks, one process", masks_of_rows, one, 2)
    return found


@functools.cache
def results() -> list[dict[str, Any]]:
    return run_local(everything, devices_per_worker=2, timeout=_DEADLINE)


def check(rank: int, name: str) -> Any:
    return found_on(results(), rank, name)


@pytest.mark.nightly
def test_ranks_with_seeds_of_their_own_equal_one_process_with_the_chiefs():
    expected = check(0, "shuffled, one process")
    for rank in range(2):
        for number, (a, b) in enumerate(zip(expected, check(rank, "shuffled"), strict=True)):
            # The first half is from before the training.
            atol = 0 if number < len(expected) // 2 else 1e-5
            np.testing.assert_allclose(b, a, rtol=0, atol=atol, err_msg=f"rank {rank}: {number}")


def test_every_row_is_seen_once_an_epoch():
    for rank in range(2):
        assert check(rank, "tf.data with a seed") == [EPOCHS] * ROWS, f"rank {rank}"


def test_datasets_that_shuffle_differently_are_refused():
    """They were made before `fit`, with the seeds of their processes: rows would be seen twice, or never."""
    for kind, message in check(0, "unlike seeds") + check(1, "unlike seeds"):
        assert kind == "ValueError", message
        assert "The processes have different datasets. Received: seeds of its shuffling" in message
        assert "Give `keras.utils.set_random_seed` the same seed on every process" in message
        assert "Pass a seed" not in message, "a seed in the dataset alone does not help"
        assert "worker 0 (127.0.0.1:" in message and "worker 1 (127.0.0.1:" in message


def test_dropout_masks_differ_between_replicas():
    masks = check(0, "masks")
    assert (masks == check(1, "masks")).all()
    assert set(np.unique(masks).tolist()) == {0.0, 2.0}
    assert len({mask.tobytes() for mask in masks}) == 8, "two rows got the same mask"


def test_first_replica_has_the_masks_of_one_process():
    np.testing.assert_array_equal(check(0, "masks")[:2], check(0, "masks, one process"))


@pytest.mark.parametrize("compiled", [True, False])
def test_loops_of_ones_own_draw_other_noise_on_each_replica(compiled):
    """As a GAN's generator is given it by `tf.random.normal`."""
    first, second = (check(rank, f"noise {compiled}") for rank in range(2))
    assert len({str(numbers) for numbers in [*first, *second]}) == 4
    assert first[:1] == check(0, f"noise {compiled}, one process")
