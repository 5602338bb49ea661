"""Trains on a dataset of TensorFlow Datasets, prepared by a builder of this file, on several workers: plain Keras.

The images are Fashion-MNIST (Xiao et al., 2017), from Debian's package `dataset-fashion-mnist` (`apt install`), or from
a folder with the same files (`--images`); `--made-up` takes none, and draws a few patterns instead. The first start
prepares them into `--data-dir`: one process of each host, while the others wait.

Example:
    tfdist run -n 2 examples/train_fashion_mnist.py
    tfdist run -n 2 examples/train_fashion_mnist.py --made-up --epochs 2
    python examples/train_fashion_mnist.py
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

import tfdist

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
FILES = {"train": "train", "test": "t10k"}


class FashionImages(tfds.core.GeneratorBasedBuilder):
    """Images of 28x28 pixels, and which of ten pieces of clothing each one shows."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="real"), tfds.core.BuilderConfig(name="made_up")]  # noqa: RUF012
    images = DEBIAN

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"image": tfds.features.Image(shape=(28, 28, 1)), "label": tfds.features.ClassLabel(num_classes=10)}
        # Not `dataset_info_from_configs`, which looks for files beside a package.
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=("image", "label")
        )

    def _split_generators(self, download_manager: tfds.download.DownloadManager) -> dict:
        return {split: self._generate_examples(split) for split in FILES}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict]]:
        read = made_up if self.builder_config.name == "made_up" else self._read
        for number, (image, label) in enumerate(zip(*read(split), strict=True)):
            yield number, {"image": image, "label": int(label)}

    def _read(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """The images and labels of the files, after headers of 16 and 8 bytes."""
        found = []
        for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
            path = self.images / f"{FILES[split]}-{kind}-ubyte.gz"
            if not path.exists():
                raise FileNotFoundError(
                    f"{path} is not there: apt install dataset-fashion-mnist; or --images FOLDER, or --made-up"
                )
            found.append(np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header))
        pixels, labels = found
        return pixels.reshape(-1, 28, 28, 1), labels


def made_up(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Noisy stripes: the more, the higher the class."""
    generator = np.random.default_rng(split == "train")
    labels = np.arange({"train": 640, "test": 160}[split]) % 10
    stripes = 100 * (1 + np.sin(np.arange(28) * (labels[:, None] + 1) / 4))
    noise = generator.normal(0, 20, (len(labels), 28, 28))
    return np.clip(stripes[:, None, :] + noise, 0, 255).astype("uint8")[..., None], labels


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train an image classifier on one or several workers.")
    parser.add_argument("--images", type=Path, default=DEBIAN, help="folder of the four .gz files (%(default)s)")
    parser.add_argument("--made-up", action="store_true", help="train on a few patterns instead")
    parser.add_argument("--data-dir", default="fashion-data", help="where prepared data go (%(default)s)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128, help="of all workers together (%(default)s)")
    parser.add_argument("--save-freq", type=int, help="steps from one backup to the next (default: an epoch)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def load(options: argparse.Namespace, split: str) -> tf.data.Dataset:
    """The batches of a split. Files are shuffled, and read in parallel: tfdist gives them one order on all workers."""
    images = tfds.load(
        f"{FashionImages.name}/{'made_up' if options.made_up else 'real'}",
        split=split,
        data_dir=options.data_dir,
        shuffle_files=split == "train",
        as_supervised=True,
        # Several files: they are read in parallel.
        download_and_prepare_kwargs={"download_config": tfds.download.DownloadConfig(num_shards=4)},
    )
    if split == "train":
        images = images.shuffle(10_000)
    images = images.map(lambda image, label: (tf.cast(image, tf.float32) / 255, label), tf.data.AUTOTUNE)
    return images.batch(options.batch_size).prefetch(tf.data.AUTOTUNE)


def build_model() -> keras.Model:
    """Builds the network and compiles it."""
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    return model


def main() -> None:
    """Prepares the data, trains and evaluates."""
    options = parse_arguments()
    FashionImages.images = options.images
    # First of all: the workers must find each other before TensorFlow does anything else.
    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(options.seed)
    train, test = load(options, "train"), load(options, "test")

    with strategy.scope():
        model = build_model()
    callbacks = [
        # Killed and started again, it goes on where it was, in the middle of an epoch, too.
        tfdist.callbacks.BackupAndRestore("fashion.backup", save_freq=options.save_freq or "epoch"),
        keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint("fashion.keras", monitor="val_accuracy", save_best_only=True),
    ]
    # The dataset shuffles itself; Keras warns unless it is told not to.
    model.fit(train, validation_data=test, epochs=options.epochs, shuffle=False, callbacks=callbacks, verbose=2)

    _, accuracy = model.evaluate(test, verbose=0)
    print(f"test accuracy: {accuracy:.3f}; the best model is in fashion.keras")


if __name__ == "__main__":
    main()
