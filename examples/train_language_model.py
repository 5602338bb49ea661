"""Trains a small Transformer, cut into stages, to continue text byte by byte: plain Keras under a PipelineStrategy.

Example:
    tfdist run --stages 2 examples/train_language_model.py --timeline timeline.png
    python examples/train_language_model.py
"""

from __future__ import annotations

import argparse
import math

import keras
import manual
import numpy as np
from keras import layers

import tfdist

VOCABULARY = 256
PROMPT = "The "


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a language model whose layers are on several devices.")
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
    parser.add_argument("--timeline", help="where a picture of one training step goes; needs matplotlib")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


@keras.saving.register_keras_serializable("examples")
class Positions(layers.Layer):
    """Adds a trained vector to each position of a sequence."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="random_normal", name="vectors")

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return inputs + self.vectors


def build_model(length: int, width: int, blocks: int) -> keras.Model:
    """Builds the network and compiles it."""
    tokens = keras.Input((length,), dtype="int32")
    x = Positions()(layers.Embedding(VOCABULARY, width)(tokens))
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(num_heads=4, key_dim=width // 4)(y, y, use_causal_mask=True)
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
    # Of the processes of `tfdist run --stages`, only the first one gets beyond this line; the others serve it.
    strategy = tfdist.PipelineStrategy(num_microbatches=options.microbatches, schedule=options.schedule)
    keras.utils.set_random_seed(options.seed)

    train, test = (manual.windows(text, options.length) for text in manual.load())
    with strategy.scope():
        model = build_model(options.length, options.width, options.blocks)
    callbacks = [tfdist.callbacks.PipelineTimeline(options.timeline)] if options.timeline else []
    model.fit(*train, batch_size=options.batch_size, epochs=options.epochs, callbacks=callbacks)

    loss = model.evaluate(*test, batch_size=options.batch_size, verbose=0)
    print(f"perplexity on {test[0].size} bytes of held-out text: {math.exp(loss):.2f} (by chance: {VOCABULARY})")
    print(f"a sample: {write(model, options.length, PROMPT, np.random.default_rng(options.seed))!r}")
    model.save(options.model_path)
    print(f"saved as {options.model_path}")


if __name__ == "__main__":
    main()
