"""`tfdist.set_seed`: the same program computes the same bits again, on as many processes."""

from __future__ import annotations

import pytest

from tfdist.cluster.errors import ClusterError
from tfdist.testing import LocalRunError, run_local

pytestmark = pytest.mark.cluster
DEADLINE = 120.0


def trained(seed: int, deterministic: list[bool]) -> str:
    """Runs on every process: a digest of the weights after random augmentation, dropout and statistics."""
    import hashlib
    import random

    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    rank = tfdist.discover().rank

    tfdist.set_seed(seed, deterministic[rank])
    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=300)
    images = np.random.default_rng(0).normal(size=(48, 8, 8, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((images, np.arange(48) % 4))
    data = data.shuffle(48).map(lambda x, y: (x + tf.random.normal(x.shape), y)).batch(12)
    with strategy.scope():
        layers = [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(), keras.layers.Flatten()]
        model = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dropout(0.5), keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(random.uniform(0.001, 0.01)), loss)
    history = model.fit(data, epochs=3, verbose=0).history["loss"]
    return hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights()) + repr(history).encode()).hexdigest()


@pytest.mark.slow
@pytest.mark.nightly
def test_the_same_bits_again():
    first, second, other = (run_local(trained, 2, args=(seed, [True] * 2), timeout=DEADLINE) for seed in (1, 1, 2))
    # On both processes, too.
    assert len({*first, *second}) == 1
    assert set(other).isdisjoint(first)


def test_processes_that_differ_are_told():
    with pytest.raises(LocalRunError) as raised:
        run_local(trained, 2, args=(1, [True, False]), timeout=DEADLINE)
    assert isinstance(raised.value.__cause__, ClusterError)
    assert "use of deterministic operations is True on worker 0 but False on worker 1" in str(raised.value)


@pytest.mark.parametrize("seed", [-1, 2**32, True, 1.0, None])
def test_what_is_no_seed(seed):
    import tfdist

    with pytest.raises(ValueError, match=r"Expected: a whole number from 0 to 2\*\*32 - 1"):
        tfdist.set_seed(seed)
