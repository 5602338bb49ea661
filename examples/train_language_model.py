"""Trains a GPT-style language model to continue text byte by byte, and lets it write: plain Keras.

The model is cut into stages, one for each process of `tfdist run --stages`; with `--parallel data` every process has
the whole model and some rows of each batch. `--memory recompute` keeps little of the forward pass, for long texts and
deep models. Without `--text FILE` it trains on the manual of the Python language that comes with every Python, so
nothing is downloaded.

Example:
    tfdist run --stages 2 examples/train_language_model.py
    tfdist run -n 2 examples/train_language_model.py --parallel data --memory recompute
    python examples/train_language_model.py --text shakespeare.txt --blocks 6 --width 192 --length 256
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

import keras
import numpy as np
from keras import layers

import tfdist

VOCABULARY = 256
PROMPT = "The "


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a language model whose layers are on several devices.")
    parser.add_argument("--text", type=Path, help="what to train on, UTF-8 (default: the manual of Python)")
    parser.add_argument("--parallel", default="pipeline", choices=["pipeline", "data"], help="what processes share")
    parser.add_argument("--memory", choices=["none", "recompute"], help="a memory policy (default: the strategy's)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=4, help="into which a batch is cut (%(default)s)")
    parser.add_argument("--schedule", default="auto", choices=["auto", "1f1b", "eager-1f1b", "gpipe", "interleaved"])
    parser.add_argument("--blocks", type=int, default=4, help="of attention and a small network (%(default)s)")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument(
        "--length", type=int, default=64, help="of the text that the model sees, in bytes (%(default)s)"
    )
    parser.add_argument("--model-path", default="language_model.keras", help="where the model goes (%(default)s)")
    parser.add_argument("--backup-dir", help="where an interrupted training is saved (default: nowhere)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def load(path: Path | None = None) -> tuple[bytes, bytes]:
    """Returns the text to train on and the text that is held out: the end of the file, or every tenth topic."""
    if path is not None:
        text = path.read_bytes()
        return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    seen: set[str] = set()
    texts: list[str] = []
    for name in sorted(topics):
        # Topics quote each other: nothing that is held out may be trained on.
        paragraphs = [p for p in topics[name].strip().split("\n\n") if p.strip() not in seen]
        seen.update(p.strip() for p in paragraphs)
        texts.append("\n\n".join(paragraphs))
    held_out = texts[9::10]
    del texts[9::10]
    return "\n\n".join(texts).encode(), "\n\n".join(held_out).encode()


def windows(text: bytes, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a text into rows of bytes, each with the bytes that follow them."""
    values = np.frombuffer(text, dtype=np.uint8).astype(np.int32)
    rows = (len(values) - 1) // length
    if rows < 1:
        raise SystemExit(f"received a part of {len(text)} bytes, expected more than --length {length}: a longer text")
    return values[: rows * length].reshape(rows, length), values[1 : rows * length + 1].reshape(rows, length)


@keras.saving.register_keras_serializable("examples")
class Positions(layers.Layer):
    """Adds a trained vector to each position of a sequence."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="random_normal", name="vectors")

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return inputs + self.vectors


def build_model(length: int, width: int, blocks: int) -> keras.Model:
    """Builds the network and compiles it."""
    heads = max(4, width // 64)
    tokens = keras.Input((length,), dtype="int32")
    x = Positions()(layers.Embedding(VOCABULARY, width)(tokens))
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, key_dim=width // heads)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
    logits = layers.Dense(VOCABULARY)(layers.LayerNormalization()(x))
    model = keras.Model(tokens, logits)
    model.compile(
        optimizer=keras.optimizers.AdamW(3e-3, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def write(model: keras.Model, length: int, prompt: str, generator: np.random.Generator) -> str:
    """Lets the model continue a text to its full length."""
    row = np.zeros((1, length), dtype=np.int32)
    row[0, : len(prompt)] = list(prompt.encode())
    for position in range(len(prompt), length):
        logits = model.predict(row, verbose=0)[0, position - 1].astype(np.float64)
        weights = np.exp((logits - logits.max()) / 0.5)
        row[0, position] = generator.choice(VOCABULARY, p=weights / weights.sum())
    return bytes(row[0].tolist()).decode(errors="replace")


def main() -> None:
    """Trains, evaluates, samples and saves the model."""
    options = parse_arguments()
    if options.parallel == "data":
        strategy = tfdist.MultiWorkerMirroredStrategy(memory=options.memory)
    else:
        # Of the processes of `tfdist run --stages`, only the first one gets beyond this line; the others serve it.
        strategy = tfdist.PipelineStrategy(
            num_microbatches=options.microbatches, schedule=options.schedule, memory=options.memory
        )
    keras.utils.set_random_seed(options.seed)

    train, test = (windows(text, options.length) for text in load(options.text))
    with strategy.scope():
        model = build_model(options.length, options.width, options.blocks)
    callbacks = []
    if options.backup_dir:
        callbacks.append(tfdist.callbacks.BackupAndRestore(options.backup_dir))
    model.fit(*train, batch_size=options.batch_size, epochs=options.epochs, callbacks=callbacks)

    loss = model.evaluate(*test, batch_size=options.batch_size, verbose=0)
    print(f"perplexity on {test[0].size} bytes of held-out text: {math.exp(loss):.2f} (by chance: {VOCABULARY})")
    print(f"a sample: {write(model, options.length, PROMPT, np.random.default_rng(options.seed))!r}")
    model.save(options.model_path)
    print(f"saved as {options.model_path}")


if __name__ == "__main__":
    main()
