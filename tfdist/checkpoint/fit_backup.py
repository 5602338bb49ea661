"""The backups of one call of `fit`: when it begins, at each step, at the ends of epochs, and at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdist.checkpoint import callback_state, csv_logger, fit_identity, messages
from tfdist.checkpoint.fit_identity import folder_of_fit, is_final, note_finished, remove_if_empty
from tfdist.checkpoint.position.data import DataPosition
from tfdist.checkpoint.save_schedule import BackgroundWriter, PreemptionSignal, SaveSchedule
from tfdist.checkpoint.shared_store import ElasticStore, SharedStore
from tfdist.checkpoint.store import Checkpoint
from tfdist.checkpoint.tensor_files import take_copies
from tfdist.checkpoint.training_state import TrainingState, check_meta, fault_of_meta
from tfdist.compat.hooks import hooks_of
from tfdist.compat.upstream import get_random_seed
from tfdist.inspection import epoch_iterators, random_state
from tfdist.inspection.dataset_properties import draws_seeds
from tfdist.runtime.callback_order import is_the_chiefs
from tfdist.runtime.common_stop import CommonStop
from tfdist.runtime.control_signals import Agreement, Request
from tfdist.steps import building
from tfdist.supervision.events import EventLog
from tfdist.supervision.exit_codes import PREEMPTED, UNSAVED
from tfdist.supervision.progress import DONE, SAVED, ProgressWriter
from tfdist.supervision.time_spent import SAVING, time_spent

_log = logging.getLogger("tfdist")

_WITHOUT_STATE = (keras.callbacks.ProgbarLogger, CommonStop)


@dataclasses.dataclass
class _Place:
    """Where training is.

    Attributes:
        epoch: the current epoch, or at the end of one the next.
        steps: training steps of it that are done.
        total: training steps since the beginning of the fit, over restarts.
    """

    epoch: int = 0
    steps: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"step {self.steps} of epoch {self.epoch + 1}" if self.steps else f"epoch {self.epoch}"


class FitBackup:
    """The backups of one fit.

    Args:
        options: the callback, for its options and its model.
        callback_list: Keras' list of callbacks.
        others: the callbacks whose state belongs to the fit.
    """

    def __init__(self, options: Any, callback_list: Any, others: Sequence[keras.callbacks.Callback]) -> None:
        self._options = options
        self._model = model = options.model
        self._callback_list = callback_list
        self._everyone = others
        # The others only show something, run on the chief alone, or agree with other processes: they change no result.
        self._others = [c for c in others if not (isinstance(c, _WITHOUT_STATE) or is_the_chiefs(c))]
        strategy = model.distribute_strategy
        self._peers = getattr(strategy, "_peers", None)
        self._agreement: Agreement | None = getattr(strategy, "_agreement", None)
        self._is_chief = getattr(strategy, "is_chief", True)
        self._store = self._store_of(strategy)
        self._writes = self._is_chief or self._store.everybody_writes
        self._writer = BackgroundWriter(options.asynchronous, self._warn_not_written)
        self._schedule = SaveSchedule(options.save_freq)
        self._signal = PreemptionSignal(options.preemption_signal, model)
        self._stop_at_end = False
        self._events = EventLog.from_environment()
        self._state = TrainingState(model)
        self._place = _Place()
        self._kept: tuple[_Place, str] | None = None  # the last backup that is written
        self._failure = ""  # why a later one is not
        self._validations = 0
        self._resumed: Checkpoint | None = None
        self._was_done = False
        self._entries: list[dict] = []
        self._unsaved = messages.Unsaved()
        self._until_begun = contextlib.ExitStack()
        self._at_epoch_end = False
        self._epochs = 0
        self._batches_ended = 0  # of the current epoch

    def _store_of(self, strategy: tf.distribute.Strategy) -> SharedStore | ElasticStore:
        members = getattr(strategy, "_members", None)
        folder, keep = folder_of_fit(self._options.backup_dir), self._options.max_to_keep
        disk = SharedStore(folder, keep, strategy) if members is None or self._options._keeps_on_disk else None
        return disk if members is None else ElasticStore(strategy.horovod, members, strategy._memory_folder, disk)

    # Beginning

    def begin(self) -> None:
        """Before any other callback begins: finds the backup, and puts the model into its state."""
        iterator = epoch_iterators.latest(self._model)
        if iterator is None:
            raise RuntimeError("Received: BackupAndRestore outside of Model.fit. Expected: fit(..., callbacks=[...]).")
        self._signal.install()
        self._epochs = self._callback_list.params["epochs"]
        self._settings = callback_state.settings(self._others)
        self._identity = fit_identity.identity_of(self._model, self._store.directory)
        self._position = DataPosition(self._model, iterator, self._options.dataset_fn, self._after_step)
        if self._agreement is not None:
            self._agreement.begin(self._model)
        checkpoint = self._store.newest(self._is_wanted)
        if self._position.obstacle is not None:
            messages.of_obstacle(self._position.obstacle)
        if checkpoint is not None:
            self._resume(iterator, checkpoint)
        else:
            self._store.begin_together(self._state)
            if self._is_chief:
                csv_logger.begin_anew(self._everyone)

    def _resume(self, iterator: Any, checkpoint: Checkpoint) -> None:
        meta, model = checkpoint.meta, self._model
        began = time.monotonic()
        if not hooks_of(model._distribute_strategy).is_data_parallel:  # those are built before their first step
            building.build(model, epoch_iterators.batch_specification(iterator))
        try:
            check_meta(meta, f"{self._store.directory}/{checkpoint.name}")
            self._state.make_global_seed_generator(meta["variables"])
            lost = self._state.make_compression(meta["variables"], checkpoint.tensors)
            self._state.check(meta["variables"], checkpoint.tensors, with_metrics=meta["steps"] > 0)
            self._check_identity(meta)
            self._entries = callback_state.matching(self._others, self._settings, meta["callbacks"])
            self._position.resume(meta["epoch"], meta["position"], checkpoint.tensors)
        except ValueError as error:
            raise is_final(error) from None  # it is no better another time
        self._state.load(checkpoint.tensors)
        self._place = _Place(meta["epoch"], meta["steps"], meta["total"])
        self._kept = dataclasses.replace(self._place), checkpoint.name
        self._validations = meta["validations"]
        self._resumed = checkpoint
        if self._is_chief:
            rewind = csv_logger.leave_alone if meta["done"] else csv_logger.rewind
            rewind(self._everyone, meta["csv"], self._until_begun)
        over = self._is_over(meta)
        self._was_done = meta["done"] and over
        model._initial_epoch = max(self._epochs, 1) if over else meta["epoch"]
        if (reporter := ProgressWriter.from_environment()) is not None and not over:
            reporter.resumed(meta["total"])
        self._events.write(
            "resumed", checkpoint=checkpoint.name, epoch=meta["epoch"], step=meta["total"], seconds=_since(began)
        )
        if self._is_chief:
            messages.of_other_callbacks(self._others, self._entries, meta["callbacks"])
            messages.of_compression(lost, model.distribute_strategy)
            messages.of_resumption(meta, f"{self._store.directory}/{checkpoint.name}", over, self._epochs)

    def _check_identity(self, meta: dict) -> None:
        found = fit_identity.difference(meta["identity"], self._identity, meta["epochs"] != self._epochs)
        if found is not None:
            folder = self._store.directory
            raise ValueError(
                f"The backup is of another fit. {found} The folder is {folder}. To train this one, delete that folder "
                "or pass another backup_dir; to go on with the saved one, make the model and compile it as before."
            )
        if self._is_chief:
            messages.of_seed(meta["seed"], get_random_seed())

    def _is_wanted(self, meta: dict) -> bool:
        return fault_of_meta(meta) is not None or not meta["done"] or self._is_over(meta)

    def _is_over(self, meta: dict) -> bool:
        """Whether a backup leaves nothing to train. A finished fit that is to have more epochs goes on."""
        return meta["stopped"] or meta["epoch"] >= self._epochs

    def begun(self) -> None:
        """After all other callbacks have begun."""
        self._until_begun.close()
        self._schedule.saved(self._place.total)
        if self._resumed is not None and self._is_over(self._resumed.meta):
            self._restore_the_rest()  # no epoch begins
        if self._resumed is None and self._store.everybody_writes:
            self._save(mid_epoch=False)  # a process may be lost before the first step that is saved

    # Epochs

    def epoch_begins(self, epoch: int) -> None:
        """Before any other callback's `on_epoch_begin`: restores a backup that was made between two epochs."""
        if self._resumed is None:
            self._place = _Place(epoch, 0, self._place.total)
        self._position.epoch = epoch
        self._batches_ended = 0
        if self._resumed is not None and self._place.steps == 0:
            self._restore_the_rest()

    def epoch_begun(self) -> None:
        """After all other callbacks' `on_epoch_begin`: restores a backup that was made within an epoch."""
        if self._resumed is not None:
            self._restore_the_rest()
        self._model._initial_epoch = None  # Keras would begin the next fit there, too

    def _restore_the_rest(self) -> None:
        checkpoint, self._resumed = self._resumed, None
        self._state.load(checkpoint.tensors)
        callback_state.restore(self._others, self._settings, self._entries, checkpoint.tensors)
        self._position.leave_random_state(checkpoint.meta["random"])
        if self._place.steps:
            self._show_metrics_of_empty_epoch()

    def _show_metrics_of_empty_epoch(self) -> None:
        """Gives Keras the metrics of an epoch of which no step is left; it would take them from the logs of a step."""
        original = self._model._get_metrics_result_or_logs

        def result_or_logs(logs: Any) -> Any:
            del self._model._get_metrics_result_or_logs
            return original(logs) if logs else self._model.get_metrics_result()

        object.__setattr__(self._model, "_get_metrics_result_or_logs", result_or_logs)

    def batch_ended(self, batch: int) -> None:
        """Before any other callback's `on_train_batch_end`."""
        self._batches_ended = batch + 1

    def _after_step(self, steps: int) -> None:
        """After each execution of steps, with the number of steps of the epoch that are done."""
        self._place.total += steps - self._place.steps
        self._place.steps = steps
        stop, save = self._signal.received, self._schedule.due_by_time
        if self._agreement is not None:
            if stop:
                self._agreement.request(Request.PREEMPT)
            if save and self._is_chief:
                self._agreement.request(Request.SAVE)
            agreed = self._agreement.take(Request.PREEMPT, Request.SAVE)
            stop, save = Request.PREEMPT in agreed, Request.SAVE in agreed
        if stop:
            self._preempt()
        if not (save or self._schedule.due_after_step(self._place.total)):
            return
        size = self._position.steps_per_epoch
        if self._position.obstacle is not None or (size is not None and steps >= size):
            self._at_epoch_end = True
        elif self._agreement is None and self._writer.is_busy:
            return  # still due after the next step
        else:
            self._save(mid_epoch=True)
            self._store.saved()

    def validation_begins(self) -> None:
        """Before a validation. After a restart, makes the iterators that earlier validations have made."""
        iterator = getattr(self._model, "_eval_epoch_iterator", None)
        if iterator is None:
            return
        if iterator is not getattr(self, "_validated", None) and self._validations:
            dataset = iterator._get_iterator()
            source = getattr(dataset, "source", dataset)  # before a strategy has split it
            if isinstance(source, tf.data.Dataset) and draws_seeds(source):
                for _ in range(self._validations * (1 if iterator._num_batches is None else 2)):
                    iter(dataset)
        self._validated = iterator
        self._validations += 1

    def epoch_ended(self) -> None:
        """After all other callbacks' `on_epoch_end`."""
        # Keras asks for no further step once `stop_training` is set: `_after_step` has not seen the last one.
        unseen = max(0, self._batches_ended - self._place.steps)
        self._place = _Place(self._place.epoch + 1, 0, self._place.total + unseen)
        stop, save = self._signal.received, self._schedule.due_by_time
        if self._peers is not None:
            flags = self._peers.gather("backup-epoch-end", [stop, save], "finish the epoch")
            stop, save = any(flag for flag, _ in flags), flags[0][1]
        is_last = self._model.stop_training or self._place.epoch >= self._epochs
        self._stop_at_end = stop
        if stop and not is_last:
            self._preempt()
        # Objects that were made since then belong to the backup as well, such as a seed generator that was used late.
        self._state = TrainingState(self._model)
        due = self._at_epoch_end or self._schedule.due_after_step(self._place.total)
        if save or due or is_last or self._schedule.every_epoch:
            self._wait_for_writer()
            self._save(mid_epoch=False)
            if not is_last:
                self._store.saved()
        self._at_epoch_end = False

    # Saving

    def _wait_for_writer(self) -> None:
        with time_spent().during(SAVING):
            self._writer.wait()

    def _save(self, mid_epoch: bool, done: bool = False) -> None:
        """Takes a snapshot, a collective with several workers, and lets the chief write it."""
        with time_spent().during(SAVING):
            self._take_and_write(mid_epoch, done)

    def _take_and_write(self, mid_epoch: bool, done: bool) -> None:
        if self._callback_list._async_train:
            self._callback_list._flush_futures()
        hooks_of(self._model._distribute_strategy).settle(self._model)
        began = time.monotonic()
        place = dataclasses.replace(self._place)
        self._schedule.saved(place.total)
        tensors: dict[str, Any] = self._state.snapshot(with_metrics=mid_epoch, is_kept=self._writes)
        if not self._writes or self._writer.is_busy:
            return
        entries = callback_state.capture(self._others, self._settings, tensors, self._state.parts)
        self._unsaved.tell(entries)
        meta = {
            **dataclasses.asdict(place),
            "done": done,
            "stopped": not mid_epoch and bool(self._model.stop_training),
            "validations": self._validations,
            "variables": self._state.description,
            "identity": self._identity,
            "epochs": self._epochs,
            "seed": get_random_seed(),
            "callbacks": entries,
            "csv": csv_logger.lengths(self._everyone),
            "position": self._position.state(tensors, mid_epoch),
            "random": random_state.capture(),
        }
        taken = _since(began)

        def write() -> None:
            began = time.monotonic()
            name = self._store.write(meta, take_copies(tensors))
            self._kept = place, name
            self._events.write(
                "saved",
                checkpoint=name,
                epoch=place.epoch,
                step=place.total,
                snapshot_seconds=taken,
                seconds=_since(began),
            )

        self._writer.submit(write)

    def _preempt(self) -> NoReturn:
        """Saves, and ends the process; all workers do so after the same step."""
        place, mid_epoch = self._place, self._place.steps > 0
        lost = mid_epoch and self._position.obstacle is not None
        if (reporter := ProgressWriter.from_environment()) is not None:
            reporter.report(DONE, place.total)  # saving may take longer than any step has: not a hang
        self._wait_for_writer()
        if not lost:
            self._save(mid_epoch)
            self._wait_for_writer()
        if lost:
            self._leave(f"after {place}", "is not saved: no position within an epoch can be found again")
        self._leave(f"after {place}", "is saved", self._failure_to_save())

    def _failure_to_save(self) -> str | None:
        """Why the current place is in no backup; `None` if it is, or if others write."""
        if not self._writes or (self._kept is not None and self._kept[0] == self._place):
            return None
        return self._failure

    def _leave(self, where: str, what: str, failure: str | None = None) -> NoReturn:
        """Ends the process, once all others know that they have to end, too, and with which exit code."""
        if self._peers is not None:
            failure = self._peers.gather("preempted", failure, "save before it exits")[0]
            self._peers.acknowledge("saved", "hear whether the backup is saved")
        if failure is not None:
            what = "is not saved"
        at = {"epoch": self._place.epoch, "step": self._place.total}
        self._events.write("preempted" if failure is None else "unsaved", **at)
        if failure is None and (reporter := ProgressWriter.from_environment()) is not None:
            reporter.report(SAVED, self._place.total)
        if self._is_chief:
            kept = self._kept and f"{self._kept[1]}, of {self._kept[0]}"
            _log.warning("%s", messages.of_preemption(self._signal.name, f"{where}, which {what}", failure, kept))
        self._signal.uninstall()
        self._store.release()
        raise SystemExit(PREEMPTED if failure is None else UNSAVED)

    def ended(self) -> None:
        """After all other callbacks have ended."""
        self._model._initial_epoch = None
        self._wait_for_writer()
        # A process that is told to stop will be started again, and must then find that nothing is left to train.
        delete = self._options.delete_checkpoint and not self._stop_at_end
        if not (self._was_done or delete):
            self._save(mid_epoch=False, done=True)
        self._writer.close()
        if delete and self._is_chief:
            self._store.clear()
        self._store.finished()
        self._store.release()
        if delete and self._is_chief:
            remove_if_empty(self._options.backup_dir)
        fit_identity.forget(self._model)
        note_finished(self._options.backup_dir)
        if self._stop_at_end:
            self._leave("at the end of the fit", "is complete", self._failure_to_save())
        self._signal.uninstall()

    def abandon(self) -> None:
        """Leaves a fit that has failed and will be called again."""
        time_spent().fit_is_called_again()
        self._writer.close()
        self._store.release()
        self._signal.uninstall()

    def _warn_not_written(self, error: Exception) -> None:
        self._events.write("not saved", error=str(error))
        self._failure = str(error)
        messages.of_failed_backup(error)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 4)
