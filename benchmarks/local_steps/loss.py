"""How good models become that workers train by themselves for some steps, beside synchronous training."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.children import Children
from benchmarks.data_parallel.processes import ROOT, say
from benchmarks.markdown import table
from benchmarks.network.shape import Shape

TASKS = {"digits": "digits, CNN", "language": "bytes of text, Transformer"}
# After how many steps the workers exchange; 0: synchronous training.
PERIODS = (0, 20, 50, 200, 500)
_LANGUAGE = Shape(256, 64, 64, 4, 2)


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each task, number of workers and period, with a trial for each seed."""
    tasks, counts, periods = (["digits"], [2], [0, 20]) if quick else (list(TASKS), [2, 4], PERIODS)
    records = []
    for task, count, period in itertools.product(tasks, counts, periods):
        record = {"task": task, "workers": count, "period": period, "trials": []}
        for seed in range(1 if quick else samples):
            say(f"{task}, {count} workers, exchange after {period} steps, seed {seed + 1} ...")
            settings = {"task": task, "sync_every": period, "seed": seed + 1, "steps": 60 if quick else 1000}
            record["trials"].append(children.workers(f"{__package__}.loss", settings, {}, count))
        records.append(record)
    return records


def table_of(records: Sequence[Mapping]) -> str:
    """A line for each record; loss and accuracy are those of data that were held out, at the end."""
    header = ["Task", "Workers", "Exchange after", "Loss", "of the synchronous one", "Accuracy", "points more"]
    synchronous = {(one["task"], one["workers"]): _medians(one) for one in records if one["period"] == 0}
    lines = []
    for record in records:
        (loss, accuracy), (loss_of_all, accuracy_of_all) = (
            _medians(record),
            synchronous[record["task"], record["workers"]],
        )
        period = f"{record['period']} steps" if record["period"] else "each step"
        figures = [
            f"{loss:.4f}",
            f"{loss / loss_of_all:.3f}",
            f"{accuracy:.2%}",
            f"{100 * (accuracy - accuracy_of_all):+.2f}",
        ]
        lines.append([TASKS[record["task"]], str(record["workers"]), period, *figures])
    return table(header, lines, left=1)


def _medians(record: Mapping) -> tuple[float, float]:
    return tuple(statistics.median(trial[name] for trial in record["trials"]) for name in ("loss", "accuracy"))


def main(settings: dict) -> dict | None:
    """Trains, and lets the chief return loss and accuracy of what was held out."""
    import keras
    import tensorflow as tf

    import tfdist

    local = settings["sync_every"]
    strategy = tfdist.LocalStepsStrategy(local) if local else tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(settings["seed"])
    train, test, build = {"digits": _digits, "language": _language}[settings["task"]]()
    with strategy.scope():
        model = build()
        schedule = keras.optimizers.schedules.CosineDecay(1e-3, settings["steps"])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(schedule), loss, metrics=["accuracy"])
    dataset = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[0]), seed=settings["seed"]).repeat()
    model.fit(dataset.batch(64).prefetch(2), steps_per_epoch=settings["steps"], verbose=0)
    found = model.evaluate(*test, batch_size=256, verbose=0)
    return {"loss": found[0], "accuracy": found[1]} if strategy.is_chief else None


def _digits() -> tuple[Any, Any, Any]:
    import keras
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8, 1) / 16).astype("float32")
    images, others, labels, labels_of_others = train_test_split(
        images, labels, test_size=297, stratify=labels, random_state=1
    )

    def build() -> Any:
        layers = keras.layers
        convolutions = [layers.Conv2D(n, 3, padding="same", activation="relu") for n in (16, 32)]
        rest = [
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(64, "relu"),
            layers.Dense(10),
        ]
        return keras.Sequential([keras.Input((8, 8, 1)), *convolutions, *rest])

    return (images, labels), (others, labels_of_others), build


def _language() -> tuple[Any, Any, Any]:
    import runpy

    from benchmarks.network.keras_worker import build

    example = runpy.run_path(str(ROOT / "examples" / "train_language_model.py"))
    train, test = (example["windows"](part, _LANGUAGE.length) for part in example["load"]())
    return train, test, lambda: build(_LANGUAGE, "adam")
