"""Times, and bytes that leave the namespace, of windows of steps in the middle of a training."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.network.links import sent_bytes


class Windows:
    """Sees the end of each step.

    Args:
        settings: with "warmup", "windows" and "steps" of a window.
        is_alone: whether there is no link.
    """

    def __init__(self, settings: dict[str, Any], is_alone: bool) -> None:
        self._warmup, self._steps = settings["warmup"], settings["steps"]
        self.total = self._warmup + settings["windows"] * self._steps
        self._is_alone = is_alone
        self._marks: list[tuple[float, int]] = []

    def ended(self, done: int) -> None:
        """Called when so many steps are done."""
        if done >= self._warmup and (done - self._warmup) % self._steps == 0:
            self._marks.append((time.perf_counter(), 0 if self._is_alone else sent_bytes()))

    def of_fit(self, model: Any, dataset: Any) -> dict[str, Any]:
        """The result of a training with Keras, whose steps are those of one epoch."""
        import keras

        timer = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: self.ended(batch + 1))
        fitted = model.fit(dataset, steps_per_epoch=self.total, verbose=0, callbacks=[timer], shuffle=False)
        return self.result(float(fitted.history["loss"][0]))

    def result(self, loss: float) -> dict[str, Any]:
        """Milliseconds and bytes of a step, by window."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        return {
            "ms": [1000 * (after[0] - before[0]) / self._steps for before, after in pairs],
            "bytes": [(after[1] - before[1]) / self._steps for before, after in pairs],
            "loss": loss,
        }
