"""`tfdist.callbacks.TensorBoard`: one set of event files for all processes of a training."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import shutil
from numbers import Integral
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.arguments import check_path
from tfdist.callbacks import summaries
from tfdist.compat.upstream import pythonify_logs
from tfdist.inspection import epoch_iterators
from tfdist.runtime.meters.training import Lap, TrainingMeter
from tfdist.steps.collectives import ExchangeTimer
from tfdist.steps.common_hooks import install

_log = logging.getLogger("tfdist")
# Only the tensorboard package knows how to write these.
_NEEDS_PACKAGE = ("histogram_freq", "write_images", "embeddings_freq")


class _Zero:
    """A level of 0 for the profiler: TensorFlow takes an `int` among its options for a bool, which it ignores."""

    def __index__(self) -> int:
        return 0


# When TensorFlow stops to record a host, it writes to freed memory for events that began in one thread and ended in
# another (`SplitEventTracker` points into a vector that grows). On the first process there are none. Each collective of
# the others has one, `CollectiveExecutor::CompleteParams`: it ends where the first process' answer arrives.
_DEVICES_ALONE = tf.profiler.experimental.ProfilerOptions(host_tracer_level=_Zero())


class TensorBoard(keras.callbacks.TensorBoard):
    """Writes what `keras.callbacks.TensorBoard` writes, for all processes together, and how fast they train.

    Pass it on every process; only the chief writes. Metrics, also those within an epoch, are those of all replicas. At
    the end of each epoch come

    - `epoch_steps_per_second` and `epoch_examples_per_second`: training steps, and rows of the global batches;
    - `epoch_seconds`: the time that both are for: that of the training steps, without validation and without the first
      execution of the fit, which traces;
    - `epoch_data_wait`: the share of that time in which the process that waited longest waited for data;
    - `epoch_communication`: how long what the replicas exchange in a step takes by itself, measured then with all
      processes, over the time of a step. What a step hides behind its computation is in it, too.

    What cannot be measured is not written: rows and waiting without a tfdist strategy for data parallelism, with
    `run_eagerly`, or with datasets that the program distributes itself (rows of arrays are known in any case);
    communication also with sparse gradients, and in elastic jobs.

    Where `profile_batch` asks for a profile, every process profiles those steps, and TensorBoard shows them as hosts of
    one run. The chief's profile has what its host and its GPUs do, that of another process its GPUs alone: TensorFlow
    can crash when it records the host there. Processes that share no disk write to the same path on their own ones. In
    a remote folder (`gs://`) there is the chief's profile alone.

    Steps are training steps, whatever `steps_per_execution` is. With scalars alone it needs no `tensorboard` package.

    Args:
        log_dir: folder of the event files, which has the folders `train` and `validation`.
        update_freq: `"epoch"`, or after how many training steps (`"batch"`: each) metrics and speeds of the epoch so
            far are written, with the prefix `batch_`. Several processes then exchange their metrics so often.
        write_steps_per_second: whether speeds and shares are written at all.
        communication_freq: after how many epochs communication is measured, each time by some exchanges of gradients;
            0 for never.
        **options: those of `keras.callbacks.TensorBoard`.

    Raises:
        ImportError: if an option needs the `tensorboard` package, and it is not installed.
        ValueError: if `update_freq` or `communication_freq` is no such number.

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
        communication_freq: int = 1,
        **options: Any,
    ):
        check_path("log_dir", log_dir, "a folder, such as 'logs'")
        _check(update_freq, communication_freq, options)
        install()
        super().__init__(os.fspath(log_dir), update_freq=update_freq, **options)
        self._summary_module = summaries
        self.communication_freq = int(communication_freq)
        # Keras' own attribute of that name would write another number.
        self._writes_speed = bool(write_steps_per_second)
        self._is_chief = True
        self._is_everywhere = True
        self._evaluation_ends = False
        self._steps_before_epoch = self._steps_before_execution = self._steps_of_epoch = 0
        self._speed_of_epochs: TrainingMeter | None = None
        self._speed_of_updates: TrainingMeter | None = None
        self._data: Any = None
        self._timer: tuple[Any, ExchangeTimer] | None = None

    def _joined(self, everywhere: bool) -> None:
        """Called by tfdist when a fit begins on several processes.

        Args:
            everywhere: whether all of them have this callback.
        """
        self._is_everywhere = everywhere and getattr(self.model.distribute_strategy, "_members", None) is None
        if not everywhere:
            _log.warning(
                "Received: TensorBoard on some processes only. Expected: the same callbacks on all of them, of which "
                "only the chief writes. It writes no metrics within epochs, and no communication; pass it everywhere."
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

    # Profiles

    @property
    def _runs(self) -> Path:
        return Path(self._train_dir, "plugins", "profile")

    @property
    def _own_profile(self) -> Path:
        """Where a process that is not the chief profiles: TensorFlow names files by host, not by process."""
        return Path(self._train_dir, f".profile-of-worker-{self._peers.rank}")

    def _start_trace(self) -> None:
        if self._is_chief:
            self._runs_before = {path.name for path in self._runs.glob("*")}
            super()._start_trace()
        elif self._is_everywhere and "://" not in self._train_dir:
            shutil.rmtree(self._own_profile, ignore_errors=True)
            try:
                tf.profiler.experimental.start(str(self._own_profile), _DEVICES_ALONE)
            except Exception as error:  # as in Keras: not worth a training
                _log.warning("This process is not profiled: %s", error)
            else:
                self._profiler_started = self._is_tracing = True

    def _stop_trace(self, batch: int | None = None) -> None:
        if self._is_chief:
            super()._stop_trace(batch)
        else:
            self._stop_profiler()
            self._is_tracing = False

    def _bring_profiles_together(self) -> None:
        """TensorBoard shows the files of one folder as the hosts of one run."""
        found = {path.name for path in self._runs.glob("*")} - self._runs_before if self._is_chief else set()
        run = self._peers.gather("profile", max(found, default=None), "end its fit")[0]
        if self._is_chief or run is None or not self._own_profile.exists():
            return
        try:
            (self._runs / run).mkdir(parents=True, exist_ok=True)
            for path in self._own_profile.rglob("*.xplane.pb"):
                host = path.name.removesuffix(".xplane.pb")
                path.replace(self._runs / run / f"{host}-worker-{self._peers.rank}.xplane.pb")
            shutil.rmtree(self._own_profile)
        except OSError as error:
            _log.warning("The profile of this process stays in %s: %s", self._own_profile, error)

    # Steps

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._steps_before_epoch = self._steps_before_execution = 0
        self._speed_of_epochs = TrainingMeter(self.model, self.params.get("steps"))
        self._speed_of_updates = TrainingMeter(self.model, self.params.get("steps"))
        self._data = epoch_iterators.latest(self.model)
        # With several processes, `_joined` sets it.
        self._is_everywhere = self._peers is None
        # Profiles of earlier fits.
        self._runs_before = {path.name for path in self._runs.glob("*")}
        super().on_train_begin(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_end(logs)
        if self._peers is not None and self._is_everywhere:
            self._bring_profiles_together()
        self._speed_of_epochs = self._speed_of_updates = self._data = self._timer = None

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
        self._speed_of_epochs.step(batch)
        self._speed_of_updates.step(batch)
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
        if not hasattr(strategy, "_input_meter") or strategy.num_replicas_in_sync == 1:
            return logs
        return pythonify_logs(self.model._get_metrics_result_or_logs(logs)) if self._is_everywhere else None

    # Speed

    @property
    def _peers(self) -> Any:
        return getattr(self.model.distribute_strategy, "_peers", None)

    def _write(self, prefix: str, scalars: dict[str, float | None], step: int) -> None:
        with self._train_writer.as_default():
            for name, value in scalars.items():
                if value is not None:
                    summaries.scalar(f"{prefix}_{name}", value, step=step)

    def _speed_of_epoch(self, epoch: int) -> dict[str, float | None]:
        """The speeds of an epoch; a collective, if all processes have this callback."""
        lap, sums = self._speed_of_epochs.lap(), self._sums(epoch)
        laps, is_agreed = [lap], sums is not None
        if self._peers is not None and self._is_everywhere:
            own = {"lap": dataclasses.asdict(lap), "sums": repr(sums)}
            everyone = self._peers.gather("tensorboard", own, "finish the epoch")
            laps = [Lap(**one["lap"]) for one in everyone]
            is_agreed = is_agreed and all(one["sums"] == own["sums"] for one in everyone)
        exchange = self._seconds_of_exchange(sums) if is_agreed else None
        waits = [one.data_wait for one in laps if one.data_wait is not None]
        return {
            **_speeds(lap, self._rows(laps)),
            "seconds": lap.seconds if lap.steps else None,
            "data_wait": max(waits, default=None),
            "communication": exchange * lap.steps_per_second if exchange and lap.steps_per_second else None,
        }

    def _rows(self, laps: list[Lap]) -> int | None:
        """Rows of the global batches of the epoch that were measured."""
        lap = laps[0]
        if lap.rows is not None:
            is_whole = not lap.own_rows or self._peers is None or self._is_everywhere
            return (sum(one.rows or 0 for one in laps) if lap.own_rows else lap.rows) if is_whole else None
        rows, size = epoch_iterators.rows_of_arrays(self._data), epoch_iterators.batch_size(self._data)
        if rows is None or size is None or self._data.steps_per_epoch:
            return None
        # The last batch, which may be smaller, is always among the measured ones.
        return rows - (self._steps_of_epoch - lap.steps) * size

    def _sums(self, epoch: int) -> Any:
        """What the replicas exchange in a step, if it is to be measured after this epoch, and can be."""
        strategy = self.model.distribute_strategy
        if not self._is_everywhere or not self.communication_freq or (epoch + 1) % self.communication_freq:
            return None
        sums = getattr(strategy, "_sums_of_step", {}).get(self.model)
        return None if sums is None or None in sums else sums

    def _seconds_of_exchange(self, sums: Any) -> float:
        if self._timer is None or self._timer[0] != sums:
            self._timer = sums, ExchangeTimer(self.model.distribute_strategy, sums)
        return self._timer[1].seconds()


def _speeds(lap: Lap, rows: int | None) -> dict[str, float | None]:
    per_second = lap.steps_per_second
    examples = rows / lap.seconds if rows is not None and per_second is not None else None
    return {"steps_per_second": per_second, "examples_per_second": examples}


def _check(update_freq: Any, communication_freq: Any, options: dict[str, Any]) -> None:
    if update_freq not in ("epoch", "batch") and not _is_number(update_freq, 1):
        raise ValueError(
            f"Received: update_freq={update_freq!r}. Expected: 'epoch', 'batch', or a number of training steps."
        )
    if not _is_number(communication_freq, 0):
        raise ValueError(
            f"Received: communication_freq={communication_freq!r}. Expected: a number of epochs, or 0 for never."
        )
    wanted = [name for name in _NEEDS_PACKAGE if options.get(name)]
    if wanted and importlib.util.find_spec("tensorboard") is None:
        raise ImportError(
            f"Received: {', '.join(f'{name}={options[name]!r}' for name in wanted)}. Expected: the tensorboard "
            "package, without which TensorFlow writes scalars only: pip install tensorboard"
        )


def _is_number(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= least
