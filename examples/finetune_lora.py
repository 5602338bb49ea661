"""Fine-tunes a language model of KerasHub with LoRA: small adapters are trained, and all other weights stay.

It needs `pip install keras-hub`. With `--preset` the model is one of https://keras.io/keras_hub/presets/, which is
downloaded from Kaggle; fetch it before several workers start. Without it, nothing is downloaded: a small GPT-2 that
reads bytes is first trained on the manual of Python (`--base-epochs`), to have something to fine-tune. The text that
it is adapted to is `--text FILE`, or Python code: that of the standard library's argparse.

Example:
    tfdist run -n 2 examples/finetune_lora.py
    python finetune_lora.py --preset gpt2_base_en --text own.txt --length 512 --batch-size 8
    srun -N2 --ntasks-per-node=8 python finetune_lora.py --preset gemma_2b_en --text own.txt --precision bfloat16
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import keras
import keras_hub
import numpy as np
import tensorflow as tf

import tfdist


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Adapt a language model to a text.")
    parser.add_argument("--preset", help="name or path of a preset of KerasHub, a CausalLM (default: a small model)")
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="UTF-8 (default: Python code)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (%(default)s)")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--base-epochs", type=int, default=2, help="of the small model, before (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="of all workers together (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--length", type=int, default=64, help="of a row of text, in tokens (%(default)s)")
    parser.add_argument("--precision", default="float32", choices=["float32", "mixed_bfloat16", "bfloat16"])
    parser.add_argument("--prompt", default="def ", help="what the model continues in the end (%(default)r)")
    parser.add_argument("--adapter-path", default="adapter.lora.h5", help="where the adapters go (%(default)s)")
    parser.add_argument("--backup-dir", default="lora.backup", help="where an interrupted training is saved")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


class Bytes:
    """The tokenizer of the small model: a token is a byte."""

    def __call__(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def detokenize(self, tokens: np.ndarray) -> str:
        return bytes(np.asarray(tokens).tolist()).decode(errors="replace")


def build(options: argparse.Namespace) -> tuple[Any, Any]:
    """Returns the model and its tokenizer."""
    if options.preset:
        model = keras_hub.models.CausalLM.from_preset(options.preset)
        tokenizer, model.preprocessor = model.preprocessor.tokenizer, None
        return model, tokenizer
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=256,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=256,
        max_sequence_length=options.length,
        dropout=0.0,
    )
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None), Bytes()


def compile_model(model: Any, learning_rate: float) -> None:
    """Compiles the model; again whenever other weights are to be trained."""
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        sampler="greedy",
    )


def batches_of(tokenizer: Any, text: str, options: argparse.Namespace, shuffled: bool = False) -> tf.data.Dataset:
    """Cuts a text into rows of tokens, each with the tokens that follow them, and these into batches."""
    length = options.length
    tokens = np.asarray(tokenizer(text)).astype("int32")
    rows = (len(tokens) - 1) // length
    if rows < 1:
        raise SystemExit(f"received a text of {len(tokens)} tokens, expected more than --length {length}")
    given, wanted = (tokens[start : start + rows * length].reshape(rows, length) for start in (0, 1))
    # Models of KerasHub take arrays by a library of its own; tf.data is what resumes exactly, on any number of workers.
    dataset = tf.data.Dataset.from_tensor_slices(
        ({"token_ids": given, "padding_mask": np.ones_like(given, dtype=bool)}, wanted)
    )
    if shuffled:
        dataset = dataset.shuffle(rows, seed=options.seed)
    return dataset.batch(options.batch_size).prefetch(tf.data.AUTOTUNE)


def continue_text(model: Any, tokenizer: Any, prompt: str, length: int) -> str:
    """Lets the model continue a text to the length."""
    tokens = np.asarray(tokenizer(prompt))[:length]
    row = np.zeros((1, length), dtype="int32")
    row[0, : len(tokens)] = tokens
    written = model.generate(
        {"token_ids": row, "padding_mask": np.arange(length) < [[len(tokens)]]}, stop_token_ids=None
    )
    return str(tokenizer.detokenize(written["token_ids"][0]))


def main() -> None:
    """Trains the adapters, saves them, and lets the model write with them."""
    options = parse_arguments()
    # First of all: the workers must find each other before TensorFlow does anything else.
    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(options.seed)
    keras.config.set_dtype_policy(options.precision)

    with strategy.scope():
        model, tokenizer = build(options)
        compile_model(model, 3e-3)
    if not options.preset and options.base_epochs:
        base = batches_of(tokenizer, "\n".join(topics[name] for name in sorted(topics)), options, shuffled=True)
        model.fit(base, epochs=options.base_epochs, shuffle=False, verbose=2)

    with strategy.scope():
        # Of the attention's queries and values. Whatever makes weights belongs into the scope.
        model.backbone.enable_lora(options.rank)
        # KerasHub lets biases of the same layers train on, which it does not save with the adapters.
        for weight in model.trainable_weights:
            weight.trainable = "lora_kernel" in weight.path
        compile_model(model, options.learning_rate)
    trained = sum(math.prod(weight.shape) for weight in model.trainable_weights)
    print(f"training {trained:,} of {model.count_params():,} weights")

    text = options.text.read_text(encoding="utf-8")
    held_out = len(text) * 9 // 10
    train = batches_of(tokenizer, text[:held_out], options, shuffled=True)
    test = batches_of(tokenizer, text[held_out:], options)
    before, _ = model.evaluate(test, verbose=0)
    # Killed and started again, it goes on where it was; once it has finished, the next start begins again.
    backup = tfdist.callbacks.BackupAndRestore(options.backup_dir)
    # The dataset shuffles itself; Keras warns unless it is told not to.
    model.fit(train, epochs=options.epochs, shuffle=False, callbacks=[backup], verbose=2)
    after, accuracy = model.evaluate(test, verbose=0)
    print(f"held-out loss: {before:.4f} before, {after:.4f} after; accuracy {accuracy:.3f}")

    # KerasHub writes this file by itself, on every worker: only one may.
    if strategy.is_chief:
        model.backbone.save_lora_weights(options.adapter_path)
    written = continue_text(model, tokenizer, options.prompt, options.length)
    print(f"a sample: {written!r}")
    print(f"the adapters are in {options.adapter_path}: load_lora_weights of the same backbone takes them")


if __name__ == "__main__":
    main()
