"""Every process reads the data by itself: what differs is noticed, and what nobody has seeded is the same."""

from __future__ import annotations

import functools
import random
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.cluster.attempt import attempt, found_on
from tfdist.runtime.agreement import RowsSeen
from tfdist.testing import run_local

_DEADLINE = 300
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(_DEADLINE + 30)]

X = np.arange(96, dtype="float32").reshape(48, 2)
Y = X.sum(1, keepdims=True)


def batches(order: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(X[order[i : i + 8]], Y[order[i : i + 8]]) for i in range(0, 48, 8)]


def generator(rng: np.random.Generator) -> Any:
    yield from batches(rng.permutation(48))


def from_generator(rng: np.random.Generator) -> tf.data.Dataset:
    spec = (tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1]))
    return tf.data.Dataset.from_generator(lambda: generator(rng), output_signature=spec)


class Sequence(keras.utils.PyDataset):
    """The batches in an order of its own."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self.batches = batches(rng.permutation(48))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.batches[index]


def split(rng: np.random.Generator) -> tf.data.Dataset:
    """Rows to train on, as `train_test_split` chooses them, in a dataset."""
    chosen = rng.permutation(48)[:32]
    return tf.data.Dataset.from_tensor_slices((X[chosen], Y[chosen])).batch(8)


def late(rng: np.random.Generator) -> Any:
    """Only the fourth batch differs."""
    given = batches(np.arange(48))
    given[3] = batches(rng.permutation(48))[3]
    yield from given


OTHER_ROWS: dict[str, Callable[[np.random.Generator], Any]] = {
    "a generator": generator,
    "from_generator": from_generator,
    "PyDataset": Sequence,
    "train_test_split": split,
    "one batch of a generator": late,
}


def model_of(strategy: Any) -> keras.Model:
    keras.utils.clear_session()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-6), "mse")
    return model


def other_rows(strategy: Any, folder: Path) -> None:
    for number, (name, make) in enumerate(OTHER_ROWS.items()):
        # As without a seed, but never by chance the same first and last row.
        apart = functools.partial(np.random.default_rng, [strategy.is_chief, number])
        batch = 4 if name == "one batch of a generator" else 1
        expected = rf"other rows on worker 1 .* than on worker 0 .*, from batch {batch} of epoch 1 on\. .*Policy.OFF"
        # Rows of arrays are the same or not; what Python makes may be augmented.
        if name == "train_test_split":
            with pytest.raises(RuntimeError, match=expected):
                said_of(strategy, make(apart()))
        else:
            said = said_of(strategy, make(apart()))
            assert len(said) == strategy.is_chief and all(re.search(expected, one) for one in said), (name, said)
        # With a seed, nothing differs.
        assert said_of(strategy, make(np.random.default_rng(3))) == []
    held_out = split(apart())
    with pytest.raises(RuntimeError, match=r"from batch 1 of the validation data of epoch 1 on"):
        model_of(strategy).fit(X, Y, batch_size=8, validation_data=held_out, verbose=0)
    # The negative control.
    with mock.patch.object(RowsSeen, "check", lambda *_: None):
        assert said_of(strategy, split(apart())) == []


def said_of(strategy: Any, data: Any) -> list[str]:
    """What is warned of other rows in a fit of one epoch; every fit is the first one of its strategy."""
    rows_seen = strategy._keras_hooks.rows_seen
    vars(rows_seen).pop("_tfdist_said", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model_of(strategy).fit(data, verbose=0)
    return [str(one.message) for one in caught if "other rows" in str(one.message)]


def augmented(strategy: Any, folder: Path) -> None:
    """What functions of a pipeline draw differs, in parallel, and rows are the same; validation runs several times."""
    noise = keras.layers.GaussianNoise(0.5)
    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    in_parallel = {"num_parallel_calls": 2}
    for data in (
        rows.map(lambda x, y: (x + tf.random.normal([2]), y), **in_parallel).batch(8),
        rows.batch(8).map(lambda x, y: (noise(x, training=True), y), **in_parallel),
    ):
        assert said_of(strategy, data) == []

    class Evaluates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch % 3 == 1:
                self.model.evaluate(rows.batch(8).filter(lambda x, y: True), verbose=0)

    model_of(strategy).fit(X, Y, batch_size=8, validation_data=rows.batch(8), callbacks=[Evaluates()], verbose=0)


def last_bits(strategy: Any, folder: Path) -> None:
    """What hosts compute with other last bits is no other data."""
    x = X * (1 + 2e-7 * strategy._peers.rank)
    model_of(strategy).fit(tf.data.Dataset.from_tensor_slices((x, Y)).batch(8), epochs=2, verbose=0)


def own_rows(strategy: Any, folder: Path) -> None:
    """Rows that the user has sharded may differ."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = split(np.random.default_rng(strategy._peers.rank)).with_options(options)
    model_of(strategy).fit(dataset, epochs=2, verbose=0)


def what_nobody_has_seeded(strategy: Any, folder: Path) -> None:
    """Python's, NumPy's and Keras' generators, after the strategy was made."""
    drawn = [random.random(), float(np.random.random()), int(keras.random.SeedGenerator().state.numpy()[0])]
    first, second = strategy._peers.gather("drawn", drawn, "tell what it has drawn")
    assert first == second
    model_of(strategy).fit(generator(np.random), epochs=1, verbose=0)
    images = folder / "images"
    if strategy.is_chief:
        for name in ("a", "b"):
            (images / name).mkdir(parents=True)
            for i in range(8):
                keras.utils.save_img(images / name / f"{i}.png", np.full((4, 4, 3), 10 * i + (name == "b")))
    strategy._peers.gather("images", None, "write images")
    dataset = keras.utils.image_dataset_from_directory(images, image_size=(4, 4), batch_size=4, verbose=False)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4, 4, 3)), keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-6), "mse")
    model.fit(dataset, epochs=2, verbose=0)


SECTIONS = {one.__name__: one for one in (what_nobody_has_seeded, other_rows, augmented, last_bits, own_rows)}


def run(folder: str) -> dict[str, Any]:
    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=300)
    return {name: attempt(name, section, strategy, Path(folder)) for name, section in SECTIONS.items()}


@functools.cache
def results() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="tfdist-same-data-") as folder:
        return run_local(run, 2, timeout=_DEADLINE, args=(folder,))


@pytest.mark.parametrize("name", SECTIONS)
def test_section(name):
    for rank in (0, 1):
        found_on(results(), rank, name)
