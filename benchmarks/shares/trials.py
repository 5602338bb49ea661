"""What is measured: steps with equal workers, and with one that is half as fast, by shares."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.children import Children
from benchmarks.data_parallel.models import MODELS
from benchmarks.data_parallel.processes import say
from benchmarks.markdown import spread, table

# By their name in the table: which part of the time the second worker computes, and the shares.
CASES: dict[str, tuple[float, Any]] = {
    "both as fast": (1.0, None),
    "one half as fast, equal shares": (0.5, None),
    "one half as fast, `batch_shares=[2, 1]`": (0.5, [2, 1]),
    'one half as fast, `batch_shares="auto"`': (0.5, "auto"),
}
_ALIKE, *_UNLIKE = CASES
# Two workers of which one is half as fast do three quarters of what two equal ones do.
_IDEAL = 0.75
_BATCH = 256
# Stops a process for a part of each period, again and again, as long as the one that has started this lives.
_DUTY = """
import os, signal, sys, time
pid, speed, period = int(sys.argv[1]), float(sys.argv[2]), 0.02
try:
    while os.getppid() == pid:
        time.sleep(period * speed)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(period * (1 - speed))
        os.kill(pid, signal.SIGCONT)
finally:
    os.kill(pid, signal.SIGCONT)
"""


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each model and case, with windows of all samples, which take turns."""
    models = ["mlp"] if quick else list(MODELS)
    records = [{"model": model, "case": case, "trials": []} for model, case in itertools.product(models, CASES)]
    for sample in range(1 if quick else samples):
        for record in records:
            speed, shares = CASES[record["case"]]
            say(f"{record['model']}, {record['case']}, sample {sample + 1} ...")
            settings = {"model": record["model"], "speed": speed, "shares": shares, "batch": _BATCH}
            settings |= {"warmup": 2 if quick else 5, "windows": 2 if quick else 6, "steps": 5 if quick else 20}
            record["trials"].append(children.workers(f"{__package__}.trials", settings, {}))
    return records


def table_of(records: Sequence[Mapping]) -> str:
    """A line for each record: time of a step, and its throughput beside what two workers of these speeds could do."""
    header = ["Model", "Workers", "Step, ms", "Of the ideal", "Rows of the slow one", "Drift"]
    return table(header, _lines(records), left=2)


def _lines(records: Sequence[Mapping]) -> Iterator[list[str]]:
    alike = {
        record["model"]: [statistics.median(trial["ms"]) for trial in record["trials"]]
        for record in records
        if record["case"] == _ALIKE
    }
    for record in records:
        steps = [statistics.median(trial["ms"]) for trial in record["trials"]]
        ideal = 1.0 if record["case"] == _ALIKE else _IDEAL
        reached = [equal / (step * ideal) for equal, step in zip(alike[record["model"]], steps, strict=True)]
        half = len(record["trials"][0]["ms"]) // 2
        drift = statistics.median(
            statistics.median(trial["ms"][half:]) / statistics.median(trial["ms"][:half]) for trial in record["trials"]
        )
        rows = statistics.median(trial["rows"] for trial in record["trials"])
        title, windows = MODELS[record["model"]].title, [one for trial in record["trials"] for one in trial["ms"]]
        yield [title, record["case"], spread(windows, 0), spread(reached), f"{rows:.0%}", f"{drift:.2f}"]


def main(settings: dict) -> dict | None:
    """Trains an epoch a window, and lets the chief return how long the steps of each took."""
    import keras
    import tensorflow as tf

    import tfdist
    from benchmarks.data_parallel.keras_training import keras_layer
    from benchmarks.data_parallel.models import LEARNING_RATE, MODELS, MOMENTUM, make_batch

    shape = MODELS[settings["model"]]
    strategy = tfdist.MultiWorkerMirroredStrategy(batch_shares=settings["shares"])
    dataset = tf.data.Dataset.from_tensors(make_batch(shape, settings["batch"])).repeat()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input(shape.input_shape), *(keras_layer(keras, layer) for layer in shape.layers)]
        )
        optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    windows: list[float] = []

    class Timer(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                self.began = time.perf_counter()
            elif batch == settings["steps"]:
                windows.append(1e3 * (time.perf_counter() - self.began) / settings["steps"])

    epochs = settings["warmup"] + settings["windows"]
    is_slow = not strategy.is_chief and settings["speed"] < 1
    with stopped_in_turn(settings["speed"]) if is_slow else contextlib.nullcontext():
        model.fit(
            dataset, steps_per_epoch=1 + settings["steps"], epochs=epochs, shuffle=False, verbose=0, callbacks=[Timer()]
        )
    automatic = strategy._automatic_shares
    shares = automatic.shares if automatic else settings["shares"] or [1, 1]
    found = {"ms": windows[settings["warmup"] :], "rows": shares[1] / sum(shares)}
    return found if strategy.is_chief else None


@contextlib.contextmanager
def stopped_in_turn(speed: float) -> Iterator[None]:
    """While the block runs, this process is stopped so often that it computes for this part of the time."""
    words = [sys.executable, "-c", _DUTY, str(os.getpid()), str(speed)]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL) as duty:
        try:
            yield
        finally:
            duty.terminate()
