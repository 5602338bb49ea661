"""Trains a recommender whose tables of users and items are spread over parameter servers: plain Keras.

The click log is made up, so nothing is downloaded and the best possible result is known. Like a real one, it has many
ids and few that are frequent.

Example:
    tfdist run -n 2 --ps 2 examples/recommender.py
    python examples/recommender.py
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass

import keras
import numpy as np
from keras import layers
from sklearn.metrics import roc_auc_score

import tfdist

HOURS = 24


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


@dataclass(frozen=True)
class Log:
    """What was shown to whom and when, and whether it was clicked on: one row for each showing.

    Attributes:
        features: ids of "user", "item" and "hour" (int32).
        clicks: 0 or 1 (float32).
        probabilities: of a click (float32); no model may see them.
    """

    features: dict[str, np.ndarray]
    clicks: np.ndarray
    probabilities: np.ndarray

    def rows(self, part: slice) -> Log:
        """Some of the rows."""
        features = {name: values[part] for name, values in self.features.items()}
        return Log(features, self.clicks[part], self.probabilities[part])


def make_log(rows: int, users: int, items: int, seed: int, tastes: int = 4) -> Log:
    """A made-up log: users and items have tastes, some items please everybody, people click more in the evening.

    Together they give the probability of a click, with which each click is drawn at random. A model that knew the
    probabilities would still be wrong about single clicks: its AUC is the best possible.
    """
    generator = np.random.default_rng(seed)

    def draw_ids(count: int, exponent: float) -> np.ndarray:
        # Zipf's law: the k-th most frequent one is about 1 / k ** exponent times as frequent as the first one.
        weights = np.cumsum(1 / np.arange(1, count + 1) ** exponent)
        ranks = np.searchsorted(weights, generator.random(rows) * weights[-1], side="right")
        # A real id does not tell how frequent it is.
        return generator.permutation(count)[ranks]

    user_tastes, item_tastes = (generator.normal(size=(count, tastes)) for count in (users, items))
    popularity = generator.normal(0.0, 0.8, size=items)
    features = {"user": draw_ids(users, 0.9), "item": draw_ids(items, 1.0), "hour": generator.integers(0, HOURS, rows)}
    user, item, hour = features.values()
    logits = popularity[item] + 0.5 * np.sin((hour - 13) * 2 * np.pi / HOURS) - 1.5
    logits += 1.4 / np.sqrt(tastes) * np.einsum("ij,ij->i", user_tastes[user], item_tastes[item])
    probabilities = 1 / (1 + np.exp(-logits))
    clicks = generator.random(rows) < probabilities
    ids = {name: values.astype("int32") for name, values in features.items()}
    return Log(ids, clicks.astype("float32"), probabilities.astype("float32"))


def build_model(options: argparse.Namespace) -> keras.Model:
    """Two towers, whose product says how well user and item match, and what each of them, and the hour, add."""
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in ("user", "item", "hour")}
    counts = {"user": options.users, "item": options.items, "hour": HOURS}
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

    log = make_log(options.rows, options.users, options.items, options.seed)
    held_out = len(log.clicks) // 10
    train, test = log.rows(slice(held_out, None)), log.rows(slice(held_out))

    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build_model(options)
    callbacks = [
        # Killed and started again, it goes on where it was; once it has finished, the next start begins again.
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
    found, possible = (roc_auc_score(test.clicks, by) for by in (scores, test.probabilities))
    print(
        f"AUC on held-out data: {found:.3f} (best possible: {possible:.3f}, by chance: 0.500); "
        f"saved as {options.model_path}"
    )


if __name__ == "__main__":
    main()
