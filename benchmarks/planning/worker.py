"""A process that plans a model, or trains it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from typing import Any

_WARM_UP, _WINDOWS = 12, 5
_WINDOW_SECONDS = 0.8


def _plan(settings: dict[str, Any]) -> list[dict[str, Any]]:
    import tfdist
    from benchmarks.planning.models import MODELS
    from tfdist.planning.hardware import Hardware

    build, rows = MODELS[settings["model"]]
    found = tfdist.plan(build(), rows, devices=2, hardware=Hardware.from_json(settings["hardware"]))
    best = found.best
    return [{**dataclasses.asdict(row), "best": row is best} for row in found.rows]


def _train(settings: dict[str, Any]) -> list[float] | None:
    """Milliseconds of a step, in each of some windows; `None` in all processes but the first one."""
    import keras
    import tensorflow as tf

    import tfdist
    from benchmarks.planning.models import MODELS
    from tfdist.memory.estimate import batch_of

    build, rows = MODELS[settings["model"]]
    strategy = getattr(tfdist, settings["strategy"])(**settings["options"]) if settings["strategy"] else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build()
    # Random numbers, and classes 0 and 1; zeros would make some arithmetic cheaper.
    batch = tf.nest.map_structure(
        lambda spec: (
            tf.random.stateless_uniform(spec.shape, [0, 0], 0, 2, spec.dtype)
            if spec.dtype.is_integer
            else tf.random.stateless_normal(spec.shape, [0, 0])
        ),
        batch_of(model, rows),
    )
    times: list[float] = []
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: times.append(time.perf_counter()))
    data = tf.data.Dataset.from_tensors(batch).repeat()
    model.fit(data, steps_per_epoch=_WARM_UP, verbose=0, shuffle=False, callbacks=[clock])
    step = statistics.median(b - a for a, b in itertools.pairwise(times[2:]))
    window = max(round(_WINDOW_SECONDS / step), 3)
    # All processes must take the same number.
    window = _agreed(strategy, window)
    times.clear()
    model.fit(data, steps_per_epoch=window * _WINDOWS + 1, verbose=0, shuffle=False, callbacks=[clock])
    bounds = times[::window]
    samples = [1e3 * (b - a) / window for a, b in itertools.pairwise(bounds)]
    return samples if getattr(strategy, "is_chief", True) else None


def _agreed(strategy: Any, window: int) -> int:
    peers = getattr(strategy, "_peers", None)
    return max(peers.gather("window", window, "choose the length of a window")) if peers is not None else window


def main(settings: dict[str, Any]) -> list | None:
    """Does what the settings say."""
    return _plan(settings) if settings["task"] == "plan" else _train(settings)
