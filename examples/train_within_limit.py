"""Trains with batches for which plain Keras needs more memory than there is: TensorFlow gets no more than a limit.

The images are the handwritten digits that come with scikit-learn (`pip install scikit-learn`): nothing is downloaded.

Example:
    python examples/train_within_limit.py                        # both of the following, one after the other
    python examples/train_within_limit.py --memory none          # plain Keras runs out of memory
    python examples/train_within_limit.py --memory recompute     # the same model, and one line more
    python examples/train_within_limit.py --memory recompute --report     # prints what a step would hold
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

# TensorFlow's C++ code would list all that it has allocated when there is no more.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train with large batches in little memory.")
    parser.add_argument("--memory", choices=["none", "recompute"], help="a memory policy (default: try both)")
    parser.add_argument("--limit", type=int, default=128, help="what TensorFlow may use, in MB (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=750)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", action="store_true", help="train nothing, but print what a step would hold")
    return parser.parse_args()


def limit_memory(megabytes: int) -> str:
    """Gives no more to TensorFlow, on its first GPU, or else in the main memory; returns the name of the device.

    It has to be called before TensorFlow computes anything.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=megabytes)
        tf.config.set_logical_device_configuration(gpus[0], [limit])
        return "GPU:0"
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
    os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(megabytes)
    return "CPU:0"


def build_model(blocks: int = 12, filters: int = 16) -> keras.Model:
    """Builds a residual network and compiles it."""
    images = keras.Input((8, 8, 1))
    x = layers.Conv2D(filters, 3, padding="same")(images)
    for _ in range(blocks):
        # There are only few steps, with large batches: averages of the statistics must be quick.
        y = layers.Activation("relu")(layers.BatchNormalization(momentum=0.8)(x))
        y = layers.Conv2D(filters, 3, padding="same")(y)
        y = layers.Activation("relu")(layers.BatchNormalization(momentum=0.8)(y))
        x = layers.Add()([x, layers.Conv2D(filters, 3, padding="same")(layers.Dropout(0.1)(y))])
    outputs = layers.Dense(10)(layers.Flatten()(layers.MaxPooling2D()(x)))
    model = keras.Model(images, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(options: argparse.Namespace) -> None:
    """Trains and evaluates the model, in the memory that there is."""
    device = limit_memory(options.limit)
    keras.utils.set_random_seed(options.seed)
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8, 1) / 16).astype("float32")
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=297, stratify=labels, random_state=1
    )
    model = build_model()
    if options.memory == "recompute":
        tfdist.memory.apply(model, "recompute")
    if options.report:
        print(tfdist.memory.report(model, options.batch_size))
        return
    try:
        model.fit(images, labels, batch_size=options.batch_size, epochs=options.epochs, verbose=2)
    except tf.errors.ResourceExhaustedError as error:
        raise SystemExit(f"out of memory: {message_of(error)}") from None
    _, accuracy = model.evaluate(test_images, test_labels, batch_size=len(test_images), verbose=0)
    peak = tf.config.experimental.get_memory_info(device)["peak"]
    print(f"test accuracy: {accuracy:.3f}; {peak / 2**20:.0f} MB of {options.limit} were used at most")


def message_of(error: tf.errors.ResourceExhaustedError) -> str:
    """The line that says what there was no memory for."""
    lines = str(error).splitlines()
    return next((line for line in lines if "OOM" in line or "ut of memory" in line), lines[0])


def try_both() -> None:
    """Trains with and without a memory policy, each in a process of its own."""
    for memory in ("none", "recompute"):
        print(f"--- --memory {memory}", flush=True)
        code = subprocess.run([sys.executable, *sys.argv, "--memory", memory], check=False).returncode
        print(f"--- ended with exit code {code}", flush=True)


def main() -> None:
    """Trains in one way or in both."""
    options = parse_arguments()
    if options.report and options.memory is None:
        raise SystemExit("received --report without --memory, expected both: which step is meant?")
    if options.memory is None:
        try_both()
    else:
        train(options)


if __name__ == "__main__":
    main()
