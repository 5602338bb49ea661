"""`tfdist.callbacks.TensorBoard`: one set of event files for all processes of a training."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import types
from numbers import Integral
from typing import Any

import keras
import tensorflow as tf

from tfdist.arguments import check_path
from tfdist.compat.keras import hooks_of
from tfdist.compat.upstream import pythonify_logs
from tfdist.inspection.datasets import batch_size, latest_iterator, rows_of_arrays
from tfdist.runtime.progress import Lap, TrainingMeter
from tfdist.strategies.hooks import install

_log = logging.getLogger("tfdist")
# Only the tensorboard package knows how to write these.
_NEEDS_PACKAGE = ("histogram_freq", "write_images", "embeddings_freq")


# What TensorBoard's plugin of that name looks for.
_METADATA = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"}, data_class="DATA_CLASS_SCALAR")


def _scalar(name: str, data: Any, step: Any = None, description: str | None = None) -> Any:
    """As `tf.summary.scalar`, byte for byte, without the tensorboard package that it asks how a scalar looks."""
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.CopyFrom(_METADATA)
    metadata.summary_description = description or ""
    with tf.summary.experimental.summary_scope(name, "scalar_summary", values=[data, step]) as (tag, _):
        return tf.summary.write(tag, lambda: tf.cast(data, tf.float32), step, metadata)


# `tf.summary` with another `scalar`.
_SUMMARIES = types.SimpleNamespace(
    **{**{name: getattr(tf.summary, name) for name in dir(tf.summary)}, "scalar": _scalar}
)


class TensorBoard(keras.callbacks.TensorBoard):
    """Writes what `keras.callbacks.TensorBoard` writes, for all processes together, and how fast they train.

    Pass it on every process; only the chief writes. Metrics, also those within an epoch, are those of all replicas. At
    the end of each epoch come

    - `epoch_steps_per_second` and `epoch_examples_per_second`: training steps, and rows of the global batches;
    - `epoch_seconds`: the time that both are for: that of the training steps, without validation and without the first
      execution of the fit, which traces;
    - `epoch_data_wait`: the share of that time in which the process that waited longest waited for data.

    What cannot be measured is not written: rows and waiting without a tfdist strategy for data parallelism, with
    `run_eagerly`, or with datasets that the program distributes itself (rows of arrays are known in any case).

    The chief alone profiles the steps that `profile_batch` names.

    Steps are training steps, whatever `steps_per_execution` is. With scalars alone it needs no `tensorboard` package.

    Args:
        log_dir: folder of the event files, which has the folders `train` and `validation`.
        update_freq: `"epoch"`, or after how many training steps (`"batch"`: each) metrics and speeds of the epoch so
            far are written, with the prefix `batch_`. Several processes then exchange their metrics so often.
        write_steps_per_second: whether speeds and shares are written at all.
        **options: those of `keras.callbacks.TensorBoard`.

    Raises:
        ImportError: if an option needs the `tensorboard` package, and it is not installed.
        ValueError: if `update_freq` is no such number.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> strategy = tfdist.MultiWorkerMirroredStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> board = tfdist.callbacks.TensorBoard("logs", update_freq=100)
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=[board], verbose=0)
    """

    _on_every_process = True

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        *,
        update_freq: str | int = "epoch",
        write_steps_per_second: bool = True,
        **options: Any,
    ):
        check_path("log_dir", log_dir, "a folder, such as 'logs'")
        _check(update_freq, options)
        install()
        super().__init__(os.fspath(log_dir), update_freq=update_freq, **options)
        self._summary_module = _SUMMARIES
        # Keras' own attribute of that name would write another number.
        self._writes_speed = bool(write_steps_per_second)
        self._is_chief = True
        self._is_everywhere = True
        self._evaluation_ends = False
        self._steps_before_epoch = self._steps_before_execution = self._steps_of_epoch = 0
        self._speed_of_epochs: TrainingMeter | None = None
        self._speed_of_updates: TrainingMeter | None = None
        self._data: Any = None

    def _joined(self, everywhere: bool) -> None:
        """Called by tfdist when a fit begins on several processes.

        Args:
            everywhere: whether all of them have this callback.
        """
        self._is_everywhere = everywhere
        if not everywhere:
            _log.warning(
                "Received: TensorBoard on some processes only. Expected: the same callbacks on all of them, of which "
                "only the chief writes. It writes no metrics within epochs; pass it everywhere."
            )

    def get_state(self) -> dict[str, Any]:
        """The number of steps before this epoch, from which a resumed fit goes on counting."""
        return {"steps": self._steps_before_epoch}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on counting from there."""
        self._steps_before_epoch = state["steps"]

    # Files

    def set_model(self, model: keras.Model) -> None:
        self._is_chief = getattr(model.distribute_strategy, "is_chief", True)
        self._should_trace = self._should_trace and self._is_chief
        super().set_model(model)

    @property
    def _train_writer(self) -> Any:
        return super()._train_writer if self._is_chief else tf.summary.create_noop_writer()

    @property
    def _val_writer(self) -> Any:
        return super()._val_writer if self._is_chief else tf.summary.create_noop_writer()

    def _configure_embeddings(self) -> None:
        if self._is_chief:
            super()._configure_embeddings()

    # Steps

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._steps_before_epoch = self._steps_before_execution = 0
        self._speed_of_epochs = TrainingMeter(self.model)
        self._speed_of_updates = TrainingMeter(self.model)
        self._data = latest_iterator(self.model)
        # With several processes, `_joined` sets it.
        self._is_everywhere = self._peers is None
        super().on_train_begin(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_end(logs)
        self._speed_of_epochs = self._speed_of_updates = self._data = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps_of_epoch = 0
        self._speed_of_epochs.epoch_begins()
        self._speed_of_updates.epoch_begins()
        super().on_epoch_begin(epoch, logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._pause()
        super().on_test_begin(logs)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        # The metrics of an evaluation are always written, even if those of the last training step were not due. Keras
        # leaves the contexts of the evaluation within this call, so no other context may be entered around it.
        self._evaluation_ends = True
        super().on_test_end(logs)
        self._evaluation_ends = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._pause()
        self._steps_before_epoch += self._steps_of_epoch
        with tf.summary.record_if(True):
            super().on_epoch_end(epoch, logs)
            if self._writes_speed:
                self._write("epoch", self._speed_of_epoch(epoch), epoch)

    def _pause(self) -> None:
        if self._speed_of_epochs is not None:
            self._speed_of_epochs.pause()
            self._speed_of_updates.pause()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps_before_execution = before = self._steps_before_epoch + batch
        self._steps_of_epoch = self._in_epoch(batch + self.model.steps_per_execution)
        last = self._steps_before_epoch + self._steps_of_epoch
        if before < self._start_batch <= last:
            self._start_batch = last  # one of several steps of an execution cannot be profiled alone
        self._global_train_batch = last - 1  # Keras adds 1
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._speed_of_epochs.step(self._steps_of_epoch - 1)
        self._speed_of_updates.step(self._steps_of_epoch - 1)
        is_due = self._is_due()
        super().on_train_batch_end(batch, self._of_all_replicas(logs) if is_due else None)
        if is_due and self._writes_speed:
            lap = self._speed_of_updates.lap()
            rows = None if lap.own_rows else lap.rows
            self._write("batch", _speeds(lap, rows), self._global_train_batch)

    def _in_epoch(self, steps: int) -> int:
        """Limits a number of steps to those of the epoch: Keras counts the last execution as if it was a whole one."""
        return min(steps, self.params.get("steps") or steps)

    def _is_due(self) -> bool:
        """Whether a step after which metrics are written is among those of this execution."""
        if self.update_freq == "epoch":
            return False
        return self._global_train_batch // self.update_freq > self._steps_before_execution // self.update_freq

    def _push_writer(self, writer: Any, step: int) -> None:
        if self.update_freq == "epoch":
            return
        is_due = self._is_due() if writer is self._writers.get("train") and step else step % self.update_freq == 0
        contexts = (writer.as_default(step), tf.summary.record_if(lambda: is_due or self._evaluation_ends))
        self._prev_summary_state.append(contexts)
        for context in contexts:
            context.__enter__()

    def _of_all_replicas(self, logs: dict[str, Any] | None) -> dict[str, Any] | None:
        """The metrics of the epoch so far, as Keras computes them at its end; with several processes a collective."""
        strategy = self.model.distribute_strategy
        if not hooks_of(strategy).is_data_parallel or strategy.num_replicas_in_sync == 1:
            return logs
        return pythonify_logs(self.model._get_metrics_result_or_logs(logs)) if self._is_everywhere else None

    # Speed

    @property
    def _peers(self) -> Any:
        return hooks_of(self.model.distribute_strategy).peers

    def _write(self, prefix: str, scalars: dict[str, float | None], step: int) -> None:
        with self._train_writer.as_default():
            for name, value in scalars.items():
                if value is not None:
                    _scalar(f"{prefix}_{name}", value, step=step)

    def _speed_of_epoch(self, epoch: int) -> dict[str, float | None]:
        """The speeds of an epoch; a collective, if all processes have this callback."""
        lap = self._speed_of_epochs.lap()
        laps = [lap]
        if self._peers is not None and self._is_everywhere:
            everyone = self._peers.gather("tensorboard", dataclasses.asdict(lap), "finish the epoch")
            laps = [Lap(**one) for one in everyone]
        waits = [one.data_wait for one in laps if one.data_wait is not None]
        return {
            **_speeds(lap, self._rows(laps)),
            "seconds": lap.seconds if lap.steps else None,
            "data_wait": max(waits, default=None),
        }

    def _rows(self, laps: list[Lap]) -> int | None:
        """Rows of the global batches of the epoch that were measured."""
        lap = laps[0]
        if lap.rows is not None:
            is_whole = not lap.own_rows or self._peers is None or self._is_everywhere
            return (sum(one.rows or 0 for one in laps) if lap.own_rows else lap.rows) if is_whole else None
        rows, size = rows_of_arrays(self._data), batch_size(self._data)
        if rows is None or size is None or self._data.steps_per_epoch:
            return None
        # The last batch, which may be smaller, is always among the measured ones.
        return rows - (self._steps_of_epoch - lap.steps) * size


def _speeds(lap: Lap, rows: int | None) -> dict[str, float | None]:
    per_second = lap.steps_per_second
    examples = rows / lap.seconds if rows is not None and per_second is not None else None
    return {"steps_per_second": per_second, "examples_per_second": examples}


def _check(update_freq: Any, options: dict[str, Any]) -> None:
    is_number = isinstance(update_freq, Integral) and not isinstance(update_freq, bool) and update_freq >= 1
    if update_freq not in ("epoch", "batch") and not is_number:
        raise ValueError(
            f"Received: update_freq={update_freq!r}. Expected: 'epoch', 'batch', or a number of training steps."
        )
    wanted = [name for name in _NEEDS_PACKAGE if options.get(name)]
    if wanted and importlib.util.find_spec("tensorboard") is None:
        raise ImportError(
            f"Received: {', '.join(f'{name}={options[name]!r}' for name in wanted)}. Expected: the tensorboard "
            "package, without which TensorFlow writes scalars only: pip install tensorboard"
        )
