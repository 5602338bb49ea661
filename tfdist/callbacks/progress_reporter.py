"""Tells the launcher how far a fit is: Keras' view of `tfdist.supervision.progress`."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.supervision.progress import DONE, SAVING, TRAINING, VALIDATING, ProgressWriter


class ProgressReporter(keras.callbacks.Callback):
    """Reports each step and each change between training, validating and saving.

    It belongs before the other callbacks: what they do at the end of an epoch then counts as saving, which may take
    its time, and a step is counted even if a callback fails at it.

    Args:
        writer: where to report; shared by all callbacks of the process.

    Example:
        >>> callbacks = []
        >>> add_reporter(callbacks)  # does nothing unless `tfdist run` watches this process
        >>> callbacks
        []
    """

    def __init__(self, writer: ProgressWriter) -> None:
        super().__init__()
        self._writer = writer
        self._steps_before_epoch = 0
        self._step = 0
        self._interrupted = ""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._steps_before_epoch = self._step = 0
        self._writer.begin()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        resumed = self._writer.claim_resumption()
        if resumed is not None:
            # In the middle of an epoch the first batch is not number 0.
            self._steps_before_epoch, self._step = resumed - batch, resumed

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step = self._steps_before_epoch + batch + 1
        self._writer.report(TRAINING, self._step)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps_before_epoch = self._step
        self._writer.report(SAVING, self._step)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._writer.report(DONE, self._step)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._interrupted = self._writer.phase or DONE
        self._writer.report(VALIDATING, self._writer.step)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._writer.report(VALIDATING, self._writer.step)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._writer.report(self._interrupted, self._writer.step)

    on_predict_begin = on_test_begin
    on_predict_batch_end = on_test_batch_end
    on_predict_end = on_test_end


def add_reporter(callbacks: list[keras.callbacks.Callback]) -> None:
    """Puts a reporter before the callbacks if a launcher watches this process and there is none yet."""
    writer = ProgressWriter.from_environment()
    if writer is not None and not any(isinstance(callback, ProgressReporter) for callback in callbacks):
        callbacks.insert(0, ProgressReporter(writer))
