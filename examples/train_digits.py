"""Trains a small convolutional network on several workers with plain Keras: nothing here depends on the rank.

The images are the handwritten digits that come with scikit-learn (`pip install scikit-learn`): nothing is downloaded.

Example:
    tfdist run -n 2 examples/train_digits.py
    tfdist drill examples/train_digits.py
    python examples/train_digits.py
"""

from __future__ import annotations

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train an image classifier on one or several workers.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=60, help="of all workers together (%(default)s)")
    parser.add_argument("--model-path", default="digits.keras", help="where the model goes (%(default)s)")
    parser.add_argument(
        "--backup-dir", default="digits.backup", help="where an interrupted training is saved (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def load(batch_size: int, seed: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns training data, 1500 images of 8x8 pixels, and held-out data, 297 images."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8, 1) / 16).astype("float32")
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=297, stratify=labels, random_state=1
    )
    train = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images), seed=seed)
    test = tf.data.Dataset.from_tensor_slices((test_images, test_labels))
    return train.batch(batch_size).prefetch(tf.data.AUTOTUNE), test.batch(batch_size)


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
    keras.utils.set_random_seed(options.seed)
    train, test = load(options.batch_size, options.seed)

    with strategy.scope():
        model = build_model((8, 8, 1), classes=10)
    # Killed and started again, it goes on where it was; once it has finished, the next start begins again.
    backup = tfdist.callbacks.BackupAndRestore(options.backup_dir)
    # The dataset shuffles itself; Keras warns unless it is told not to.
    model.fit(train, validation_data=test, epochs=options.epochs, shuffle=False, callbacks=[backup])

    _, accuracy = model.evaluate(test, verbose=0)
    # Every worker calls save; the chief writes the file.
    model.save(options.model_path)
    print(f"test accuracy: {accuracy:.3f}; saved as {options.model_path}")


if __name__ == "__main__":
    main()
