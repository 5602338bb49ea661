"""Trains a recommender whose tables of users and items are spread over parameter servers: plain Keras.

Example:
    tfdist run -n 2 --ps 2 examples/recommender.py
    python examples/recommender.py
"""

from __future__ import annotations

import argparse
import contextlib

import click_log
import keras
from keras import layers

import tfdist


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a recommender on one or several workers.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="of the click log, a tenth is held out (%(default)s)"
    )
    parser.add_argument("--users", type=int, default=5_000)
    parser.add_argument("--items", type=int, default=1_000)
    parser.add_argument("--width", type=int, default=4, help="of the vectors of users and items (%(default)s)")
    parser.add_argument("--steps-per-execution", type=int, default=8, help="that a worker is given at once")
    parser.add_argument("--mode", default="async", choices=["async", "sync"])
    parser.add_argument("--model-path", default="recommender.keras", help="where the best model goes (%(default)s)")
    parser.add_argument(
        "--backup-dir", default="recommender.backup", help="where an interrupted training is saved (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def build_model(options: argparse.Namespace) -> keras.Model:
    """Two towers, whose product says how well user and item match, and what each of them, and the hour, add."""
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in ("user", "item", "hour")}
    counts = {"user": options.users, "item": options.items, "hour": click_log.HOURS}
    # Small at first: products of two random vectors would have to be unlearned.
    tables = {
        name: tfdist.layers.ShardedEmbedding(counts[name], options.width, "random_normal", name=f"{name}_vectors")
        for name in ("user", "item")
    }
    towers = [table(inputs[name]) for name, table in tables.items()]
    offsets = [layers.Embedding(counts[name], 1, "zeros", name=f"{name}_offset")(inputs[name]) for name in inputs]
    logits = layers.Add()([layers.Dot(axes=1)(towers), *offsets])
    model = keras.Model(inputs, logits)
    model.compile(
        # Adam would change all rows of the tables in every step; this changes those that the batch has.
        optimizer=tfdist.optimizers.LazyAdam(8e-3),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
        steps_per_execution=options.steps_per_execution,
    )
    return model


def main() -> None:
    """Trains, and compares the best model with what is possible."""
    options = parse_arguments()
    # Of the processes of `tfdist run --ps`, only the first one gets beyond this line; the others serve it.
    strategy = None if tfdist.discover().is_single_process else tfdist.ParameterServerStrategy(mode=options.mode)
    keras.utils.set_random_seed(options.seed)

    log = click_log.make(options.rows, options.users, options.items, options.seed)
    held_out = len(log.clicks) // 10
    train, test = log.rows(slice(held_out, None)), log.rows(slice(held_out))

    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build_model(options)
    callbacks = [
        # Killed and started again, it goes on where it was; once it has finished, the next start trains anew.
        tfdist.callbacks.BackupAndRestore(options.backup_dir),
        keras.callbacks.ModelCheckpoint(options.model_path, monitor="val_auc", mode="max", save_best_only=True),
    ]
    model.fit(
        train.features,
        train.clicks,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=(test.features, test.clicks),
        callbacks=callbacks,
        verbose=2,
    )

    # The file has whole tables: it needs no parameter servers, and a server for predictions has none.
    best = keras.models.load_model(options.model_path)
    scores = best.predict(test.features, batch_size=8192, verbose=0)[:, 0]
    print(
        f"AUC on held-out data: {click_log.auc(test.clicks, scores):.3f} "
        f"(best possible: {test.best_auc:.3f}, by chance: 0.500); saved as {options.model_path}"
    )


if __name__ == "__main__":
    main()
