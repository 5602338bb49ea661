"""One of the workers; the second one may be stopped for a part of each 20 ms."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def main(text: str, path: str) -> None:
    """Trains an epoch a window, and lets the chief write how long the steps of each took."""
    import keras
    import tensorflow as tf

    import tfdist
    from benchmarks.data_parallel.data import make_batch
    from benchmarks.data_parallel.keras_training import keras_layer
    from benchmarks.data_parallel.models import LEARNING_RATE, MODELS, MOMENTUM

    settings = json.loads(text)
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
    if strategy.is_chief:
        automatic = strategy._automatic_shares
        shares = automatic.shares if automatic else settings["shares"] or [1, 1]
        found = {"ms": windows[settings["warmup"] :], "rows": shares[1] / sum(shares)}
        Path(path).write_text(json.dumps(found))


@contextlib.contextmanager
def stopped_in_turn(speed: float) -> Iterator[None]:
    """While the block runs, this process is stopped so often that it computes for this part of the time."""
    words = [sys.executable, "-c", _DUTY, str(os.getpid()), str(speed)]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL) as duty:
        try:
            yield
        finally:
            duty.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
