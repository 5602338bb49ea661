"""The data of these tests: 58 rows, each with its number in the first column, in every form that `fit` takes."""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep

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


def _augmented() -> tf.data.Dataset:
    noise = keras.layers.GaussianNoise(0.1, seed=4)
    return slices().map(_noisy(lambda x: noise(tf.zeros([4]), training=True))).batch(BATCH)


def _unordered() -> tf.data.Dataset:
    """As `tfds.load(shuffle_files=True)` reads: the file that is quickest comes first."""

    def file(number: tf.Tensor) -> tf.data.Dataset:
        return slices().shard(4, number).apply(sleep(300))

    files = tf.data.Dataset.range(4).shuffle(4)
    rows = files.interleave(file, cycle_length=4, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    return rows.apply(tf.data.experimental.assert_cardinality(ROWS))


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


def _own_rows_of_unknown_number() -> tf.data.Dataset:
    """As `own_rows`, but on the second worker there are fewer, which nobody knows before they are read."""
    rank = tfdist.discover().rank
    rows = slices().shard(2, rank).take(29 - 6 * rank).filter(lambda x, y: x[0] >= 0).shuffle(9).shuffle(9)
    return rows.batch(BATCH).with_options(own_rows().options())


def _from_function() -> Any:
    """Each worker reads every second row, and has no fewer steps than the other."""

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        rows = slices().shard(context.num_input_pipelines, context.input_pipeline_id)
        return rows.shuffle(9, seed=context.input_pipeline_id).batch(BATCH // 2, drop_remainder=True)

    return tf.distribute.get_strategy().distribute_datasets_from_function(of_worker)


def _files() -> tf.data.Dataset:
    """Four files of rows, of which TensorFlow gives each worker two."""
    folder = tempfile.mkdtemp()
    for number in range(4):
        lines = [
            ",".join(map(str, np.ravel(np.concatenate(row))))
            for row in zip(*(one[number::4][:14] for one in arrays()), strict=True)
        ]
        Path(folder, f"{number}.csv").write_text("\n".join(lines))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    names = tf.data.Dataset.from_tensor_slices([f"{folder}/{number}.csv" for number in range(4)])
    rows = names.interleave(tf.data.TextLineDataset, cycle_length=2).map(_of_line).shuffle(9, seed=1)
    return rows.batch(BATCH).with_options(options)


def _by_tensorflow_datasets(read: Callable[[Any, tf.distribute.InputContext], tf.data.Dataset]) -> Any:
    """Each worker reads a part of its own of what a builder has written into four files."""
    import tensorflow_datasets as tfds

    class Numbered(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            features = {"x": tfds.features.Tensor(shape=(5,), dtype=np.float32)}
            features["y"] = tfds.features.Tensor(shape=(1,), dtype=np.float32)
            described = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=described, supervised_keys=("x", "y"))

        def _split_generators(self, _: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Any:
            return ((i, {"x": x, "y": y}) for i, (x, y) in enumerate(zip(*arrays(), strict=True)))

    builder = Numbered(data_dir=tempfile.mkdtemp())
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=4))
    assert len(builder.info.splits["train"].filenames) == 4

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return read(builder, context).shuffle(9).batch(BATCH // 2)

    return tf.distribute.get_strategy().distribute_datasets_from_function(of_worker)


def _even_splits(builder: Any, context: tf.distribute.InputContext) -> tf.data.Dataset:
    import tensorflow_datasets as tfds

    split = tfds.even_splits("train", context.num_input_pipelines, drop_remainder=True)[context.input_pipeline_id]
    return builder.as_dataset(split=split, shuffle_files=True, as_supervised=True)


def _files_of_worker(builder: Any, context: tf.distribute.InputContext) -> tf.data.Dataset:
    import tensorflow_datasets as tfds

    config = tfds.ReadConfig(input_context=context)
    return builder.as_dataset(split="train", shuffle_files=True, as_supervised=True, read_config=config)


def _of_line(line: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    numbers = tf.stack(tf.io.decode_csv(line, [[0.0]] * 6))
    return numbers[:5], numbers[5:]


def _generator() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        yield from (Pieces()[i] for i in range(BATCHES))


def _from_generator() -> tf.data.Dataset:
    x, y = arrays()
    spec = (tf.TensorSpec([5], tf.float32), tf.TensorSpec([1], tf.float32))
    return tf.data.Dataset.from_generator(lambda: zip(x, y, strict=True), output_signature=spec).batch(BATCH)


# Each returns the first argument of `fit`.
DATASETS: dict[str, Callable[[], Any]] = {
    "dataset in order": lambda: slices().batch(BATCH),
    "shuffle": lambda: slices().shuffle(50).batch(BATCH).prefetch(2),
    "cache": lambda: slices().cache().shuffle(50).batch(BATCH),
    "unordered": lambda: _unordered().shuffle(9).batch(BATCH),
    "unordered, cache": lambda: _unordered().cache().shuffle(9).batch(BATCH),
    "shuffle twice": lambda: slices().shuffle(9).shuffle(9).batch(BATCH),
    "random map": lambda: slices().shuffle(50).map(_noisy(lambda x: tf.random.uniform([4]))).batch(BATCH),
    "augmentation layer": _augmented,
    "filter": lambda: slices().shuffle(50).filter(lambda x, y: x[0] < 50).batch(BATCH),
    "own rows": own_rows,
    "own rows, unknown number": _own_rows_of_unknown_number,
    "from a function": _from_function,
    "files": _files,
    "tfds.even_splits": lambda: _by_tensorflow_datasets(_even_splits),
    "tfds.ReadConfig": lambda: _by_tensorflow_datasets(_files_of_worker),
    "repeat": lambda: slices().shuffle(50).repeat().batch(BATCH),
    "from_generator": _from_generator,
    "generator": _generator,
    "PyDataset": Pieces,
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
    if name == "unordered":
        # The sums of the losses are rounded in another way in another order.
        return {"validation_data": _unordered().take(30).batch(8)}
    return {"validation_data": (x, y), "validation_batch_size": 8}
