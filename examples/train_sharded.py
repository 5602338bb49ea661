"""Trains a GPT-style model that is too large for one process: each process keeps a part of every weight.

TensorFlow gets no more memory than --limit in each process. The text is the manual of the Python language that comes
with every Python: nothing is downloaded.

Example:
    tfdist run -n 2 examples/train_sharded.py
    python examples/train_sharded.py       # runs out of memory, as one process, or two with whole weights, would:
    tfdist run -n 2 --max-restarts 0 examples/train_sharded.py --strategy MultiWorkerMirroredStrategy
"""

from __future__ import annotations

import argparse
import os
from pydoc_data.topics import topics

# TensorFlow's C++ code would list all that it has allocated when there is no more.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist

VOCABULARY = 256


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a language model that is too large for one process.")
    strategies = ["FullyShardedStrategy", "MultiWorkerMirroredStrategy"]
    parser.add_argument("--strategy", default=strategies[0], choices=strategies)
    parser.add_argument("--limit", type=int, default=170, help="what TensorFlow may use, in MB (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15, help="of an epoch (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=4, help="of attention and a small network (%(default)s)")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=32, help="of a text, in bytes (%(default)s)")
    return parser.parse_args()


def limit_memory(megabytes: int) -> str:
    """Gives no more to TensorFlow, on each GPU, or else in the main memory; returns the name of the first device.

    It has to be called before TensorFlow computes anything.
    """
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=megabytes)])
    if gpus:
        return "GPU:0"
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
    os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(megabytes)
    return "CPU:0"


def load(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of bytes, each with the bytes that follow them."""
    text = np.frombuffer("\n\n".join(topics.values()).encode(), dtype=np.uint8).astype(np.int32)
    rows = (len(text) - 1) // length
    return text[: rows * length].reshape(rows, length), text[1 : rows * length + 1].reshape(rows, length)


def build_model(length: int, width: int, blocks: int) -> keras.Model:
    """Builds the network and compiles it."""
    tokens = keras.Input((length,), dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(VOCABULARY, width)(tokens) + layers.Embedding(length, width)(positions)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(num_heads=8, key_dim=width // 8)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
    model = keras.Model(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3, global_clipnorm=1.0), loss)
    return model


def train(options: argparse.Namespace, device: str) -> None:
    """Trains and saves the model, in the memory that there is."""
    strategy = getattr(tfdist, options.strategy)()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build_model(options.length, options.width, options.blocks)
    parameters = model.count_params()
    print(f"{parameters / 1e6:.1f} million parameters; with gradients and slots {16 * parameters / 2**20:.0f} MB")
    text, following = load(options.length)
    model.fit(
        *(text, following, options.batch_size, options.epochs), steps_per_epoch=options.steps, shuffle=False, verbose=2
    )
    model.save("sharded.keras")
    peak = tf.config.experimental.get_memory_info(device)["peak"]
    print(f"saved as sharded.keras; {peak / 2**20:.0f} MB of {options.limit} were used at most")


def main() -> None:
    """Trains, or says that there is not enough memory."""
    options = parse_arguments()
    device = limit_memory(options.limit)
    try:
        train(options, device)
    except tf.errors.ResourceExhaustedError as error:
        lines = str(error).splitlines()
        raise SystemExit(f"out of memory: {next((line for line in lines if 'OOM' in line), lines[0])}") from None


if __name__ == "__main__":
    main()
