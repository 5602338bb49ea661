"""The data of these tests: 58 rows, each with its number in the first column, in every form that `fit` takes."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.fault_tolerance.job import ROWS

BATCH = 4
BATCHES = -(-ROWS // BATCH)


def arrays(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Rows of five columns, and labels that can be learnt in part."""
    generator = np.random.RandomState(0)
    x = np.concatenate([np.arange(rows)[:, None], generator.randn(rows, 4)], axis=1).astype("float32")
    return x, (x[:, 1:2] + 0.5 * generator.randn(rows, 1) > 0).astype("float32")


def slices() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays())


def _noisy(noise: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    return lambda x, y: (tf.concat([x[:1], x[1:] + 0.1 * noise(x)], 0), y)


def _stateless(x: tf.Tensor) -> tf.Tensor:
    return tf.random.stateless_uniform([4], [1, tf.cast(x[0], tf.int32)])


def _as_is(x: tf.Tensor, y: tf.Tensor) -> Any:
    x, y = tf.py_function(lambda a, b: (a, b), [x, y], [tf.float32, tf.float32])
    return tf.ensure_shape(x, [5]), tf.ensure_shape(y, [1])


def _augmented() -> tf.data.Dataset:
    noise = keras.layers.GaussianNoise(0.1, seed=4)
    return slices().map(_noisy(lambda x: noise(tf.zeros([4]), training=True))).batch(BATCH)


def _interleaved() -> tf.data.Dataset:
    parts = tf.data.Dataset.range(4).shuffle(4)
    return parts.interleave(lambda i: slices().shard(4, i).shuffle(9), cycle_length=2, num_parallel_calls=2)


class Pieces(keras.utils.PyDataset):
    """Batches by their number."""

    order = np.arange(ROWS)

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = arrays()
        chosen = self.order[BATCH * index : BATCH * (index + 1)]
        return x[chosen], y[chosen]


class Noisy(Pieces):
    """Draws random numbers for each batch."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().__getitem__(index)
        return x + np.float32([0, self.draw(), 0, 0, 0]), y


class Reshuffled(Pieces):
    """Draws another order after each epoch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.generator = np.random.default_rng(5)
        self.on_epoch_end()

    def on_epoch_end(self) -> None:
        self.order = self.generator.permutation(ROWS)


class Remembered(Reshuffled):
    """Can save and restore its order."""

    def get_state(self) -> dict[str, Any]:
        # Numbers of 128 bits: not every reader of JSON keeps them.
        return {"order": self.order, "generator": repr(self.generator.bit_generator.state)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.order = state["order"]
        self.generator.bit_generator.state = ast.literal_eval(state["generator"])


def of_epoch(epoch: int) -> tf.data.Dataset:
    """A `dataset_fn`."""
    return slices().shuffle(ROWS, seed=100 + epoch).batch(BATCH)


def own_rows(epoch: int = 0) -> tf.data.Dataset:
    """Every second row, others on each of two workers, which take half of each batch in a step."""
    rows = slices().shard(2, tfdist.discover().rank).repeat().shuffle(ROWS, seed=100 + epoch)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return rows.batch(BATCH).take(BATCHES).with_options(options)


def _generator() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        yield from (Pieces()[i] for i in range(BATCHES))


def _from_generator() -> tf.data.Dataset:
    x, y = arrays()
    spec = (tf.TensorSpec([5], tf.float32), tf.TensorSpec([1], tf.float32))
    return tf.data.Dataset.from_generator(lambda: zip(x, y, strict=True), output_signature=spec).batch(BATCH)


class Rows:
    """A source of Grain, without a representation of its own: each process has another one."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = arrays()
        return x[index], y[index]


def _with_noise(row: tuple, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x, y = row
    return x + np.float32([0, *0.1 * generator.standard_normal(4)]).astype("float32"), y


def _drawn(row: tuple) -> tuple[np.ndarray, np.ndarray]:
    x, y = row
    return x + np.float32([0, *0.1 * np.random.randn(4)]).astype("float32"), y


def _grain_rows() -> Any:
    import grain

    return grain.MapDataset.source(Rows()).shuffle(seed=7)


def _grain_iter(dataset: Any) -> Any:
    """Rows in windows, after the reading threads: a state that is more than a number."""
    import grain

    rows = dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=5))
    return grain.experimental.WindowShuffleIterDataset(rows, window_size=10, seed=3).filter(lambda row: row[0][0] < 50)


def _grain_loader(workers: int) -> Any:
    import grain

    return grain.DataLoader(
        data_source=Rows(),
        sampler=grain.samplers.IndexSampler(ROWS, shuffle=True, seed=5, num_epochs=1),
        operations=[grain.transforms.Batch(BATCH)],
        worker_count=workers,
    )


# Each returns the first argument of `fit`.
DATASETS: dict[str, Callable[[], Any]] = {
    "dataset in order": lambda: slices().batch(BATCH),
    "shuffle": lambda: slices().shuffle(50).batch(BATCH).prefetch(2),
    "another shuffle": lambda: slices().shuffle(50, seed=9).batch(BATCH).prefetch(2),
    "shuffle once": lambda: slices().shuffle(50, reshuffle_each_iteration=False).batch(BATCH),
    "cache": lambda: slices().cache().shuffle(50).batch(BATCH),
    "interleave": lambda: _interleaved().batch(BATCH),
    "map": lambda: slices().shuffle(50).map(_noisy(_stateless), num_parallel_calls=2).batch(BATCH),
    "random map": lambda: slices().shuffle(50).map(_noisy(lambda x: tf.random.uniform([4]))).batch(BATCH),
    "parallel random map": lambda: slices().map(_noisy(lambda x: tf.random.uniform([4])), 2).batch(BATCH),
    "augmentation layer": _augmented,
    "filter": lambda: slices().shuffle(50).filter(lambda x, y: x[0] < 50).batch(BATCH),
    "own rows": own_rows,
    "repeat": lambda: slices().shuffle(50).repeat().batch(BATCH),
    "py_function": lambda: slices().map(_as_is).batch(BATCH),
    "from_generator": _from_generator,
    "generator": _generator,
    "Grain": lambda: _grain_rows().seed(2).random_map(_with_noise).batch(BATCH),
    "Grain, another": lambda: _grain_rows().batch(BATCH + 1),
    "Grain, repeat": lambda: _grain_rows().repeat().batch(BATCH),
    "Grain, iterated": lambda: _grain_iter(_grain_rows()).batch(BATCH),
    "Grain, loader": lambda: _grain_loader(0),
    "Grain, loader with workers": lambda: _grain_loader(2),
    "Grain, np.random": lambda: _grain_rows().map(_drawn).batch(BATCH),
    "PyDataset": Pieces,
    "PyDataset, 2 workers": lambda: Pieces(workers=2),
    "PyDataset, random": lambda: Noisy(random.random),
    "PyDataset, np.random": lambda: Noisy(np.random.rand),
    "PyDataset, reshuffled": Remembered,
    "PyDataset, forgetful": Reshuffled,
}


def arguments(name: str) -> dict[str, Any]:
    """Arguments of `fit` for the data of this name."""
    if name == "arrays":
        x, y = arrays()
        return {"x": x, "y": y, "batch_size": BATCH}
    return {"x": DATASETS[name]()}


def validation(name: str) -> dict[str, Any]:
    """Arguments of `fit` for the validation data of this name."""
    x, y = arrays(30)
    if name == "":
        return {}
    if name == "shuffle":
        # Some of the rows are left out, others each time: the same rows in another order have nearly the same loss.
        return {"validation_data": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(30).take(27).batch(8)}
    return {"validation_data": (x, y), "validation_batch_size": 8}
