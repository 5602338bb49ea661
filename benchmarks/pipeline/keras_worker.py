"""A process with Keras: the whole model without a strategy, or a stage of PipelineStrategy. The first one measures."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.pipeline.real_compute import STAGES
from benchmarks.pipeline.shapes import SHAPES
from benchmarks.pipeline.windows import Windows, steps_of_window
from benchmarks.process_files import announce, announced


def main(text: str, path: str) -> None:
    """Measures all variants in turns and writes a record of each."""
    import tensorflow as tf

    import tfdist

    settings = json.loads(text)
    cluster = tfdist.discover()
    if cluster.num_workers > 1:
        announce(settings["folder"], cluster.rank)
    trials = []
    for variant in settings["variants"]:
        strategy = tfdist.PipelineStrategy(**variant) if variant else tf.distribute.get_strategy()
        # Servers do not come here.
        pids = announced(settings["folder"], STAGES) if variant else [os.getpid()]
        trials.append(_Trial(variant, strategy, SHAPES[settings["shape"]], pids))
    for _ in range(settings["samples"]):
        for trial in trials:
            trial.run_window()
    Path(path).write_text(json.dumps([trial.record() for trial in trials]))


class _Trial:
    """One model under one strategy, of which windows are measured."""

    def __init__(self, variant: dict, strategy: Any, shape: Any, pids: list[int]):
        from benchmarks.pipeline.keras_models import compiled, repeated_batch

        self._variant, self._windows = variant, Windows(pids)
        with strategy.scope():
            self._model = compiled(shape)
        self._data = repeated_batch(shape)
        self._fit(1)
        began = time.perf_counter()
        self._fit(2)
        self._steps = steps_of_window((time.perf_counter() - began) / 2)

    def run_window(self) -> None:
        """Measures one window, in the middle of a `fit`."""
        import keras

        def after_step(step: int, logs: Any = None) -> None:
            if step == 0:
                self._windows.begin()
            elif step == self._steps:
                self._windows.end(self._steps)

        self._fit(1 + self._steps, keras.callbacks.LambdaCallback(on_train_batch_end=after_step))

    def record(self) -> dict:
        """The samples."""
        return {"variant": self._variant, "steps": self._steps, **self._windows.record}

    def _fit(self, steps: int, *callbacks: Any) -> None:
        self._model.fit(self._data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=list(callbacks))


if __name__ == "__main__":
    main(*sys.argv[1:])
