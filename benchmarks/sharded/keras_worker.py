"""A process of Keras: alone, or one of those of tfdist. It trains all variants, in turns."""

from __future__ import annotations

import functools
import os
from typing import Any
from unittest import mock

from benchmarks.memory.sharding import bytes_of_variables
from benchmarks.network.keras_worker import build, repeated_batch
from benchmarks.sharded import process
from benchmarks.sharded.variants import KEPT, PLAIN, SHAPES, SHARDED
from benchmarks.windows import FitWindows, take_turns


def main(settings: dict) -> list[dict] | None:
    """Measures all variants; the chief returns a record of each."""
    import tfdist

    if settings["measure"] == "sent":
        # As on hosts of their own: what processes of one host exchange in shared memory, nobody counts.
        mock.patch("tfdist.runtime.exchange._machine", lambda: str(os.getpid())).start()
    make = {
        PLAIN: tfdist.MultiWorkerMirroredStrategy,
        SHARDED: tfdist.FullyShardedStrategy,
        KEPT: functools.partial(tfdist.FullyShardedStrategy, reshard_after_forward=False),
    }
    strategies = [make[variant]() for variant in settings["variants"]]
    records = _measure(settings, strategies)
    return records if strategies[0].is_chief else None


def _measure(settings: dict, strategies: list) -> list[dict]:
    import keras

    shape = SHAPES[settings["shape"]]
    data = repeated_batch(shape, settings["rows"] * strategies[0].num_replicas_in_sync)
    models, windows = [], []
    for strategy in strategies:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            models.append(build(shape, keras.optimizers.Adam()))
        windows.append(FitWindows(models[-1], data, [os.getpid()], steps=settings["steps"]))

    def train(model: Any, steps: int = process.STEPS) -> None:
        model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0)

    if settings["measure"] == "sent":
        return [{"sent": process.sent(functools.partial(train, model))} for model in models]
    if settings["measure"] == "memory":
        return [
            process.memory(functools.partial(train, model), lambda: sum(bytes_of_variables().values()))
            for model in models
        ]
    take_turns(windows, settings["windows"])
    return [window.record for window in windows]
