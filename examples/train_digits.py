"""Trains a small convolutional network on several workers with plain Keras: nothing here depends on the rank.

Example:
    tfdist run -n 2 examples/train_digits.py
    tfdist drill examples/train_digits.py
    python examples/train_digits.py
"""

from __future__ import annotations

import argparse

import keras
import prepared
import tensorflow as tf
from digits import Digits

import tfdist


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train an image classifier on one or several workers.")
    parser.add_argument("--dataset", default="digits", help="digits, or any prepared TensorFlow Dataset of images")
    parser.add_argument("--data-dir", help="where prepared datasets are kept (default: as TensorFlow Datasets)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=60, help="of all workers together (%(default)s)")
    parser.add_argument("--model-path", help="where the trained model goes (default: DATASET.keras)")
    parser.add_argument("--backup-dir", help="where an interrupted training is saved (default: DATASET.backup)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def load(options: argparse.Namespace) -> tuple[tf.data.Dataset, tf.data.Dataset, int]:
    """Returns training data, held-out data and the number of classes; seeds the generators of random numbers."""
    if options.dataset == "digits":
        builder = prepared.prepare(Digits, options.data_dir)
    else:
        builder = prepared.find(options.dataset, options.data_dir)
    # Not before: preparing a dataset, which is done once, draws random numbers.
    keras.utils.set_random_seed(options.seed)

    def normalise(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.cast(image, tf.float32) / 255.0, label

    train, test = (
        builder.as_dataset(split=split, as_supervised=True).map(normalise, tf.data.AUTOTUNE).cache()
        for split in ("train", "test")
    )
    size = builder.info.splits["train"].num_examples
    train = train.shuffle(min(size, 10_000), seed=options.seed).batch(options.batch_size).prefetch(tf.data.AUTOTUNE)
    test = test.batch(options.batch_size).prefetch(tf.data.AUTOTUNE)
    return train, test, builder.info.features["label"].num_classes


def build_model(image_shape: tuple[int, ...], classes: int) -> keras.Model:
    """Builds the network and compiles it."""
    model = keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(classes),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    """Trains, evaluates and saves the model."""
    options = parse_arguments()
    # First of all: the workers must find each other before TensorFlow does anything else.
    strategy = tfdist.MultiWorkerMirroredStrategy()

    try:
        train, test, classes = load(options)
    except prepared.DatasetNotPreparedError as error:
        raise SystemExit(f"train_digits: {error}") from error

    with strategy.scope():
        model = build_model(train.element_spec[0].shape[1:], classes)
    # The dataset shuffles itself; Keras warns unless it is told not to.
    # Killed and started again, it goes on where it was; once it has finished, the next start trains anew.
    backup = tfdist.callbacks.BackupAndRestore(options.backup_dir or f"{options.dataset}.backup")
    model.fit(train, validation_data=test, epochs=options.epochs, shuffle=False, callbacks=[backup])

    _, accuracy = model.evaluate(test, verbose=0)
    # Every worker calls save; the chief writes the file.
    path = options.model_path or f"{options.dataset}.keras"
    model.save(path)
    print(f"test accuracy: {accuracy:.3f}; saved as {path}")


if __name__ == "__main__":
    main()
