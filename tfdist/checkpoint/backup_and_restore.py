"""`tfdist.callbacks.BackupAndRestore`: a fit that was killed goes on as if it had not been.

The life of the backups of a fit, from top to bottom:

    on_train_begin     begin ---- the newest backup? ---> _resume: model, place, position in the data
                         |                                   |
    on_epoch_begin     epoch_begins / epoch_begun ---- _restore_the_rest: callbacks, random state
                         |
    after each step    _after_step ---- is one due? ----> _save: snapshot, then written beside the training
                         |       `----- a signal? ------> _preempt: _save, all exit with code 77
    on_epoch_end       epoch_ended ---- is one due? ----> _save
                         |
    on_train_end       ended ---- the last backup, or none is left

Behind it: `schedule` (when), `training_state`, `callback_state` and `position` (what), `store`, `manifest` and `lock`
(where).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import logging
import os
import re
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdist.arguments import check_path, is_new
from tfdist.checkpoint import callback_state, training_state
from tfdist.checkpoint.lock import FolderInUseError
from tfdist.checkpoint.manifest import MANIFEST_NAME, drill_folder
from tfdist.checkpoint.position import DataPosition, ReadData, give_back, made_by_validation, state_of
from tfdist.checkpoint.schedule import BackgroundWriter, PreemptionSignal, SaveSchedule, frame_of_fit
from tfdist.checkpoint.store import Checkpoint, SharedStore, is_final
from tfdist.checkpoint.training_state import TrainingState, check_meta, fault_of_meta
from tfdist.compat.keras import has_hooks, hooks_of
from tfdist.compat.upstream import TFEpochIterator, get_random_seed
from tfdist.inspection.datasets import batch_specification, draws_seeds, latest_iterator, replay
from tfdist.inspection.model_state import own_methods, random_state, restore_random_state
from tfdist.runtime.agreement import CommonStop, Request
from tfdist.runtime.chief import Arranged, is_the_chiefs
from tfdist.steps.keras_step import shadowed
from tfdist.storage.selection import absolute, check_remote_path, scheme_of, storage_of
from tfdist.strategies.data_parallel.shares import ShareBySpeed
from tfdist.strategies.hooks import build_for_steps, install, trace_step
from tfdist.supervision.events import EventLog
from tfdist.supervision.exit_codes import PREEMPTED, UNSAVED
from tfdist.supervision.progress import DONE, SAVED, ProgressWriter
from tfdist.supervision.time_spent import SAVING, time_spent

_log = logging.getLogger("tfdist")

# The variables of Keras' `fit` that say what it validates with.
_OF_VALIDATION = {"val_x", "val_y", "val_sample_weight", "batch_size", "validation_batch_size", "validation_steps"}
_VALIDATION_DATA = "validation data"
_WITHOUT_STATE = (keras.callbacks.ProgbarLogger, CommonStop, ShareBySpeed)


class BackupAndRestore(Arranged):
    """Saves the complete state of `fit`, and resumes exactly where it stopped.

    Saved are weights, seeds, optimizer, metrics, the other callbacks' state, History, the random state of Python, NumPy
    and TensorFlow, and the position in the data. A script that is killed at any moment and started again ends with the
    weights and the history of a run that was not. It works in one process and under every tfdist strategy: the chief
    writes, all restore, and another number of workers may go on.

    The position within an epoch is found again for arrays, `tf.data` pipelines whose seeds are set
    (`keras.utils.set_random_seed`), `keras.utils.PyDataset`, and `dataset_fn`. With other data (generators, Grain,
    Python code in a pipeline, random numbers without seeds) it saves at the ends of epochs only, and says so.

    Under `tfdist drill` (TFDIST_DRILL_DIR is set) it uses a folder of the drill with the last part of `backup_dir` as
    its name, and keeps the last backup, which the drill compares; the script's own folder is left alone.

    Replaces `keras.callbacks.BackupAndRestore`, which loses most of this (keras issues 20333, 19692), and takes its
    arguments.

    Args:
        backup_dir: folder of the backups: local, in a bucket that TensorFlow reaches (`gs://`), or one that fsspec
            reaches with a package that you install (`s3://` with s3fs, ...). Only the chief needs to reach it: the
            others are sent what it reads. Where processes keep parts of weights (`FullyShardedStrategy`, or a
            `ShardedEmbedding` without parameter servers), all write to it. Every fit needs a folder of its own, except
            several in one script that each start makes in the same order.
        save_freq: `"epoch"`, a number of training steps, or a duration: `"30s"`, `"10min"`, `"2h"`.
        double_checkpoint: whether at least two backups stay, as in Keras; `max_to_keep` says how many.
        delete_checkpoint: whether the backups are deleted when the fit has finished. With `False`, a script that has
            finished returns at once with its history when it is started again: `fit` calls `on_train_end` once more,
            with the logs of the last epoch, and puts the model, the callbacks and the random states back.
        max_to_keep: how many backups stay; the newest one that is not damaged is used.
        asynchronous: whether backups are written while training goes on. Training waits only if the last one is not yet
            written at the end of an epoch; within an epoch, a backup is left out then.
        dataset_fn: a function from the number of an epoch to its `tf.data.Dataset`, used instead of the data that `fit`
            was given. It is for pipelines that can jump to an epoch faster than by reading everything before it.
        preemption_signal: on this signal, to any of the workers, all stop after the same step, save, and exit with code
            77, or with 74 if that could not be saved. `None` leaves signals alone.

    Raises:
        ValueError: for a `backup_dir` that is empty or of an unknown scheme, an unknown `save_freq`, or no backup to
            keep; in `fit`, if the backup is of another model, optimizer, loss, metrics or data, with the first
            difference, or of another version of tfdist, in a format that this one does not know.
        ImportError: if the package for a remote `backup_dir` is not installed.
        OSError: in `fit`, if the folder cannot be made or written to, or if a backup cannot be read, again and again.
        tfdist.callbacks.DamagedBackupsError: in `fit`, if there are backups but all of them are damaged.
        tfdist.callbacks.FolderInUseError: in `fit`, if another training writes to the folder; uncaught, it ends the
            program with exit code 78, and neither `tfdist run` nor `tfdist submit` starts it again.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> backup = tfdist.callbacks.BackupAndRestore("backup", save_freq=100)
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=[backup], verbose=0)
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        *,
        max_to_keep: int = 3,
        asynchronous: bool = True,
        dataset_fn: Callable[[int], tf.data.Dataset] | None = None,
        preemption_signal: signal.Signals | int | None = signal.SIGTERM,
    ):
        super().__init__()
        check_path("backup_dir", backup_dir, "a folder, such as 'backup'")
        folder = str(backup_dir) if scheme_of(str(backup_dir)) else os.path.expanduser(backup_dir)
        if not folder:
            raise ValueError("Received: backup_dir=''. Expected: the path of a folder, such as 'backup'.")
        for name, value in (("double_checkpoint", double_checkpoint), ("delete_checkpoint", delete_checkpoint)):
            if not isinstance(value, bool):
                raise ValueError(f"Received: {name}={value!r}. Expected: True or False.")
        SaveSchedule(save_freq)
        if isinstance(max_to_keep, bool) or not isinstance(max_to_keep, int) or max_to_keep < 1:
            raise ValueError(
                f"Received: max_to_keep={max_to_keep!r}. Expected: an integer of at least 1, since the newest backup "
                "has to stay."
            )
        folder_in_drill = drill_folder(folder, os.environ)
        check_remote_path("backup_dir", folder_in_drill or folder)
        install()
        self.backup_dir = folder_in_drill or folder
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint and not folder_in_drill
        self.max_to_keep = max(max_to_keep, 2) if double_checkpoint else max_to_keep
        self.asynchronous = asynchronous
        self.dataset_fn = dataset_fn
        self.preemption_signal = None if preemption_signal is None else signal.Signals(preemption_signal)
        self._fit: FitBackup | None = None

    def _arrange(self, callback_list: Any, callbacks: list[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
        """The callbacks of a fit in the order in which this one sees what the others do.

        Called by tfdist when Keras makes its list of callbacks.
        """
        if any(isinstance(callback, BackupAndRestore) and callback is not self for callback in callbacks):
            raise ValueError(
                "Received: two BackupAndRestore callbacks in one fit. Expected: one; a resumed fit can only follow one."
            )
        if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks):
            raise ValueError(
                "Received: keras.callbacks.BackupAndRestore beside that of tfdist. Expected: tfdist's alone; the other "
                "one lets the fit begin at an epoch of its own."
            )
        last = [callback for callback in callbacks if getattr(callback, "comes_last", False)]
        others = [callback for callback in callbacks if callback is not self and callback not in last]
        return [_First(self, functools.partial(FitBackup, self, callback_list, others)), *others, self, *last]

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._fit.begun()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._fit.epoch_begun()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._fit.epoch_ended()

    def on_test_begin(self, logs: dict | None = None) -> None:
        if self._fit is not None:
            self._fit.validation_begins()

    def on_train_end(self, logs: dict | None = None) -> None:
        fit, self._fit = self._fit, None
        fit.ended()


class _First(keras.callbacks.Callback):
    """The part of `BackupAndRestore` that comes before all other callbacks."""

    # Keras may call `on_train_batch_end` in another thread, as it does where no callback has that method.
    async_safe = True

    def __init__(self, backup: BackupAndRestore, make: Callable[[], FitBackup]):
        super().__init__()
        self._backup, self._make = backup, make

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._backup._fit = self._make()
        self._backup._fit.begin()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._backup._fit.epoch_begins(epoch)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._backup._fit.batch_ended(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._backup._fit.logged(logs)


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
        # The others only show something, or agree with other processes: they change no result.
        self._others = [c for c in callback_state.with_held(others) if not isinstance(c, _WITHOUT_STATE)]
        strategy = model.distribute_strategy
        hooks = hooks_of(strategy)
        self._peers, self._agreement = hooks.peers, hooks.agreement
        self._is_chief = getattr(strategy, "is_chief", True)
        self._folder = _folder_of_fit(options.backup_dir)
        self._writer = BackgroundWriter(options.asynchronous, self._warn_not_written)
        _take(self._folder, self)
        self._store = SharedStore(self._folder, options.max_to_keep, strategy)
        self._schedule = SaveSchedule(options.save_freq)
        self._signal = PreemptionSignal(options.preemption_signal, model)
        self._stop_at_end = False
        self._events = EventLog.from_environment()
        self._state = TrainingState(model)
        self._traced: Any = None  # Keras' function of a training step, and which layers it trains
        self._trains: list[bool] = []
        self._plain: dict[tuple[int, str], str] | None = None  # after the first step of this process
        self._place = _Place()
        self._kept: str | None = None  # the last backup that is written, in words
        self._failure: str | None = None  # why a later one is not
        self._validations = 0
        self._validation_order: dict = {}
        self._resumed: Checkpoint | None = None
        self._done: Checkpoint | None = None  # that of a fit which had ended
        self._entries: list[dict] = []
        self._named_as_unsaved: set[tuple[int, str]] = set()
        self._until_begun = contextlib.ExitStack()
        self._at_epoch_end = False
        self._batches_ended = 0  # of the current epoch
        self._logs: dict = {}  # of the last step or epoch
        self._validated: Any = None

    # Beginning

    def begin(self) -> None:
        """Before any other callback begins: finds the backup, and puts the model into its state."""
        iterator = latest_iterator(self._model)
        if iterator is None:
            raise RuntimeError("Received: BackupAndRestore outside of Model.fit. Expected: fit(..., callbacks=[...]).")
        self._signal.install()
        self._epochs = self._callback_list.params["epochs"]
        self._began = callback_state.begin(self._others, self._store.directory)
        self._settings = [one.settings for one in self._began]
        self._identity = training_state.identity_of(self._model, self._store.directory)
        self._position = DataPosition(self._model, iterator, self._options.dataset_fn, self._after_step)
        self._position.follow()
        if self._agreement is not None:
            self._agreement.begin(self._model)
        checkpoint = self._store.newest(self._is_wanted)
        if hooks_of(self._model.distribute_strategy).keeps_parts:
            self._store.check_that_all_see()
        if self._position.obstacle is not None:
            _warn(
                f"BackupAndRestore saves at the ends of epochs only: {self._position.obstacle}. After a kill, the "
                "epoch that it interrupted is trained again from its beginning, on the data that the new process gives."
            )
        if self._is_chief and (reason := self._position.not_repeatable) is not None:
            self._events.write("not repeatable", reason=reason)
        if checkpoint is not None:
            self._resume(iterator, checkpoint)
        elif self._is_chief and self._folder == self._options.backup_dir and (later := _later_fits(self._folder)):
            _warn(
                f"Received: no backup of this fit, the first one in {self._store.directory}, but of later ones there: "
                f"{', '.join(later)}. It begins anew; the second fit in this folder goes on from fit-2, and so on. "
                "Expected: the same fits in each start of a program. Give each one that may be left out a backup_dir "
                "of its own; delete_checkpoint=False keeps those that are finished."
            )

    def _resume(self, iterator: Any, checkpoint: Checkpoint) -> None:
        meta, model = checkpoint.meta, self._model
        began = time.monotonic()
        if not hooks_of(model._distribute_strategy).is_data_parallel:  # those are built before their first step
            self._build(batch_specification(iterator))
        try:
            check_meta(meta, f"{self._store.directory}/{checkpoint.name}")
            training_state.let_train(model, meta.get("trains", []))
            self._state.make_global_seed_generator(meta["variables"])
            if self._state.lacks(meta["variables"]) and own_methods(model, "train_step"):
                with model.distribute_strategy.scope():
                    trace_step(model, model.train_step, batch_specification(iterator))
                self._state = TrainingState(model)
            lost = self._state.make_compression(meta["variables"], checkpoint.tensors)
            left = self._state.leave_unlisted(meta["variables"])
            self._state.check(meta["variables"], checkpoint.tensors, with_metrics=meta["steps"] > 0)
            self._check_identity(meta)
            self._entries = callback_state.matching(self._others, self._settings, meta["callbacks"])
            self._position.resume(meta, checkpoint.tensors)
            logs = meta.get("logs", {}).items()
            self._logs = {name: callback_state.decode(value, checkpoint.tensors) for name, value in logs}
        except ValueError as error:
            raise is_final(error) from None  # it is no better another time
        self._state.load(checkpoint.tensors)
        self._place = _Place(meta["epoch"], meta["steps"], meta["total"])
        self._kept = f"{checkpoint.name}, of {self._place}"
        self._validations = meta["validations"]
        self._validation_order = meta.get("validation order", {})
        self._resumed = checkpoint
        if self._is_chief:
            callback_state.resume_csv(self._everyone, meta["csv"], self._until_begun, meta["done"])
        over = self._is_over(meta)
        self._done = checkpoint if meta["done"] and over else None
        model._initial_epoch = max(self._epochs, 1) if over else meta["epoch"]
        if (reporter := ProgressWriter.from_environment()) is not None and not over:
            reporter.resumed(meta["total"])
        self._events.write(
            "resumed", checkpoint=checkpoint.name, epoch=meta["epoch"], step=meta["total"], seconds=_since(began)
        )
        if self._is_chief:
            pairs = zip(self._others, self._entries, strict=True)
            new = [type(c).__name__ for c, entry in pairs if entry is None and not is_the_chiefs(c)]
            gone = [saved["class"] for saved in meta["callbacks"] if not any(saved is used for used in self._entries)]
            if new or gone:
                _warn(
                    "The backup is of a fit with other callbacks. Not in the backup, and begin as new: "
                    f"{', '.join(new) or 'none'}. In the backup only, and left out: {', '.join(gone) or 'none'}."
                )
            if lost:
                _warn(
                    f"The backup has rests of compressed gradients ({len(lost)} arrays) that the compression of this "
                    "fit cannot take over. They are left out; all else goes on as it was saved."
                )
            if left:
                _warn(
                    f"Received: a backup without {', '.join(left[:5])}{', ...' if left[5:] else ''}, which Keras does "
                    "not list among the variables of a model, or with others. They stay as the program has made them. "
                    "Expected: the same ones, made before the first step; those of earlier versions of tfdist lack "
                    "them."
                )
            self._say_where_it_goes_on(meta, checkpoint.name, over)

    def _build(self, specification: Any) -> None:
        """Builds the model as its first step has; a step of its own may apply an optimizer to some weights only."""
        model, optimizer = self._model, self._model.optimizer
        if has_hooks(model.distribute_strategy) or optimizer is None or not own_methods(model, "train_step"):
            build_for_steps(model, specification)
            return
        with shadowed(optimizer, build=lambda variables: None):
            build_for_steps(model, specification)
        trace_step(model, model.train_step, specification)

    def _say_where_it_goes_on(self, meta: dict, name: str, over: bool) -> None:
        folder = self._store.directory
        start_over = f"delete the folder {folder} or pass another backup_dir."
        if over:
            _log.warning("The fit is finished: %s/%s. To start over, %s", folder, name, start_over)
        else:
            where = f"step {meta['steps']} of epoch {meta['epoch'] + 1}, after {meta['total']} steps in all"
            _log.warning("The fit goes on at %s: %s/%s", where, folder, name)
        if meta["epoch"] > self._epochs:
            _warn(
                f"Received: epochs={self._epochs}. The finished fit has {meta['epoch']} epochs. To train for fewer, "
                f"{start_over}"
            )

    def _check_identity(self, meta: dict) -> None:
        found = training_state.difference(meta["identity"], self._identity, meta["epochs"] != self._epochs)
        if found is not None:
            folder = self._store.directory
            raise ValueError(
                f"The backup is of another fit. {found} The folder is {folder}. To train this one, delete that folder "
                "or pass another backup_dir; to go on with the saved one, make the model and compile it as before."
            )
        if self._is_chief and None not in (meta["seed"], now := get_random_seed()) and meta["seed"] != now:
            _warn(
                f"Received: keras.utils.set_random_seed({now}). The backup is of a fit with the seed {meta['seed']}, "
                "and goes on with that one."
            )

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
            self._position.pass_over()
            self._restore_the_rest()  # no epoch begins
            self._end_with_logs()

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
        training_state.let_train(self._model, checkpoint.meta.get("trains", []))
        if self._validations and (iterator := self._validation_iterator()) is not None:
            # Before the next iterator over the training data, which may draw from the same seeds.
            self._prepare_validation(iterator)
        if (state := checkpoint.meta.get(_VALIDATION_DATA)) and (validates := self._validation_dataset) is not None:
            give_back(validates, state, checkpoint.tensors)  # Keras has looked at some items by now
        self._put_back(checkpoint)
        if shares := checkpoint.meta.get("shares"):
            hooks_of(self._model.distribute_strategy).take_shares(shares)
        if self._place.steps:
            self._show_metrics_of_empty_epoch()

    def _put_back(self, checkpoint: Checkpoint) -> None:
        self._state.load(checkpoint.tensors)
        callback_state.restore(self._others, self._settings, self._entries, checkpoint.tensors)
        restore_random_state(checkpoint.meta["random"])

    def _show_metrics_of_empty_epoch(self) -> None:
        """Gives Keras the metrics of an epoch of which no step is left; it would take them from the logs of a step."""
        name = "_get_metrics_result_or_logs"
        vars(self._model).pop(name, None)  # that of a fit that has failed in this epoch
        original, saved = getattr(self._model, name), self._logs

        def result_or_logs(logs: Any) -> Any:
            delattr(self._model, name)
            found = original(logs)  # where workers that train by themselves exchange
            if logs:
                return found
            metrics = self._model.get_metrics_result()
            # A step of the user's may log something else.
            return metrics if not saved or saved.keys() == metrics.keys() else saved

        object.__setattr__(self._model, name, result_or_logs)

    def _end_with_logs(self) -> None:
        """Gives the callbacks the logs of the last epoch, as Keras does at the end of a fit that was not restarted."""
        callback_list, saved = self._callback_list, self._logs

        def on_train_end(logs: Any = None) -> None:
            del callback_list.on_train_end
            callback_list.on_train_end(logs or saved)

        callback_list.on_train_end = on_train_end

    def batch_ended(self, batch: int, logs: dict | None) -> None:
        """Before any other callback's `on_train_batch_end`."""
        if batch >= self._batches_ended:  # Keras may call it in several threads
            self._batches_ended = batch + 1
            self.logged(logs)

    def logged(self, logs: dict | None) -> None:
        """Before any other callback, which may add something to the logs."""
        self._logs = dict(logs or {})

    def _after_step(self, steps: int) -> None:
        """After each execution of steps, with the number of steps of the epoch that are done."""
        self._note_what_is_trained()
        if self._plain is None:
            self._plain = training_state.plain_attributes(self._model)
            self._name_what_is_elsewhere()
        steps = self._within_epoch(steps)
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
            self._save(mid_epoch=True, renews=False)

    def _note_what_is_trained(self) -> None:
        """Notes which layers are trained: callbacks may freeze some, which acts once Keras makes another function."""
        if self._model.train_function is not self._traced or self._model.run_eagerly:
            self._traced, self._trains = self._model.train_function, training_state.trains(self._model)

    def _within_epoch(self, steps: int) -> int:
        # Keras counts the last execution of an epoch as if it was a whole one.
        return min(steps, self._position.steps_per_epoch or steps)

    def validation_begins(self) -> None:
        """Before a validation."""
        if (iterator := getattr(self._model, "_eval_epoch_iterator", None)) is not None:
            self._prepare_validation(iterator)
            self._validations += 1

    def _prepare_validation(self, iterator: Any) -> None:
        """Puts the data of a validation in order; after a restart, makes the iterators that earlier ones have made."""
        if iterator is self._validated:
            return
        self._validated = iterator
        if type(iterator.data_adapter).__name__ == "GeneratorDataAdapter":
            _warn(
                "Received: validation data from a generator. After a kill it begins again, and validations see other "
                "rows than without. Expected: arrays, a tf.data.Dataset or a keras.utils.PyDataset."
            )
        data = ReadData(self._model, iterator)
        data.put_in_order()
        data.give(self._validation_order)
        self._validation_order = data.order
        source = data.source
        if self._validations and isinstance(source, tf.data.Dataset) and draws_seeds(source):
            each, taken = made_by_validation(iterator)
            number = self._validations
            replay(source, lambda: iter(iterator._get_iterator()), each * number, number, taken)

    @property
    def _validation_dataset(self) -> keras.utils.PyDataset | None:
        """The PyDataset that a fit validates with, which may have a state of its own."""
        frame = frame_of_fit(self._model, sys._getframe())
        dataset = frame and frame.f_locals.get("val_x")
        return dataset if isinstance(dataset, keras.utils.PyDataset) else None

    def _validation_iterator(self) -> Any:
        """Keras' iterator over the validation data of a fit that goes on, unless these are arrays or a generator.

        Keras makes it when the first validation begins, and not at all in a fit that is finished.
        """
        frame = frame_of_fit(self._model, sys._getframe())
        asked = {} if frame is None else frame.f_locals
        kinds = (tf.data.Dataset, keras.utils.PyDataset)
        if not _OF_VALIDATION.issubset(asked) or not isinstance(asked["val_x"], kinds):
            return None
        self._model._eval_epoch_iterator = TFEpochIterator(
            x=asked["val_x"],
            y=asked["val_y"],
            sample_weight=asked["val_sample_weight"],
            batch_size=asked["validation_batch_size"] or asked["batch_size"],
            distribute_strategy=self._model.distribute_strategy,
            steps_per_execution=self._model.steps_per_execution,
            steps_per_epoch=asked["validation_steps"],
            shuffle=False,
        )
        return self._model._eval_epoch_iterator

    def epoch_ended(self) -> None:
        """After all other callbacks' `on_epoch_end`."""
        # Keras asks for no further step once `stop_training` is set: `_after_step` has not seen the last one.
        unseen = max(0, self._within_epoch(self._batches_ended) - self._place.steps)
        self._place = _Place(self._place.epoch + 1, 0, self._place.total + unseen)
        stop, save = self._signal.received, self._schedule.due_by_time
        if self._peers is not None:
            flags = self._peers.gather("backup-epoch-end", [stop, save], "finish the epoch")
            stop, save = any(flag for flag, _ in flags), flags[0][1]
        is_last = self._model.stop_training or self._place.epoch >= self._epochs
        self._stop_at_end = stop
        if stop and not is_last:
            self._preempt()
        due = self._at_epoch_end or self._schedule.due_after_step(self._place.total)
        if save or due or is_last or self._schedule.every_epoch:
            self._wait_for_writer()
            self._save(mid_epoch=False)
        self._at_epoch_end = False

    # Saving

    def _wait_for_writer(self) -> None:
        with time_spent().during(SAVING):
            self._writer.wait()

    def _save(self, mid_epoch: bool, done: bool = False, renews: bool = True) -> None:
        """Takes a snapshot, a collective with several workers; the chief writes it, and each process its own parts."""
        with time_spent().during(SAVING):
            if self._callback_list._async_train:
                self._callback_list._flush_futures()
            hooks_of(self._model._distribute_strategy).settle(self._model)
            self._note_what_is_trained()
            began = time.monotonic()
            self._schedule.saved(self._place.total)
            if renews:
                # Objects that were made since then belong to the backup as well, such as a seed generator that was used
                # late. Finding them takes 10 ms for a small model: a backup after each step does without.
                self._state = TrainingState(self._model)
            tensors: dict[str, Any] = self._state.snapshot(with_metrics=mid_epoch, is_kept=self._is_chief)
            number = self._peers.count("backup part") if self._peers is not None and self._state.is_in_parts else None
            if not self._is_chief:
                if number is not None:
                    self._writer.submit(lambda: self._store.write_part(number, lambda: _take_copies(tensors)))
                return
            with contextlib.ExitStack() as unless_written:
                if number is not None:
                    unless_written.callback(self._store.skip, number)
                if self._writer.is_busy:
                    return
                meta = self._meta(tensors, mid_epoch, done)
                unless_written.pop_all()
            self._writer.submit(functools.partial(self._write, meta, tensors, number, _since(began)))

    def _meta(self, tensors: dict[str, Any], mid_epoch: bool, done: bool) -> dict:
        """What a backup says beside its tensors, among which is what this refers to. Warns of what it has not."""
        parts, validates = self._state.parts, self._validation_dataset
        entries = callback_state.capture(self._others, self._settings, tensors, parts, self._began)
        self._name_what_is_not_saved(entries)
        self._name_what_changes()
        return {
            **dataclasses.asdict(self._place),
            "done": done,
            "stopped": not mid_epoch and bool(self._model.stop_training),
            "validations": self._validations,
            "validation order": self._validation_order,
            _VALIDATION_DATA: None if validates is None else state_of(validates, tensors, _VALIDATION_DATA),
            "variables": self._state.description,
            "identity": self._identity,
            "epochs": self._epochs,
            "seed": get_random_seed(),
            "callbacks": entries,
            "csv": callback_state.csv_lengths(self._everyone),
            "logs": callback_state.encode_logs(self._logs, tensors),
            "position": self._position.state(tensors, mid_epoch),
            "random": random_state(),
            "shares": hooks_of(self._model.distribute_strategy).shares,
            "trains": self._trains,
        }

    def _write(self, meta: dict, tensors: dict[str, Any], number: int | None, taken: float) -> None:
        """Writes a snapshot, which took so long, beside the training."""
        began, place = time.monotonic(), _Place(meta["epoch"], meta["steps"], meta["total"])
        name = self._store.write(meta, lambda: _take_copies(tensors), number)
        self._kept, self._failure = f"{name}, of {place}", None
        self._events.write(
            "saved",
            checkpoint=name,
            epoch=place.epoch,
            step=place.total,
            snapshot_seconds=taken,
            seconds=_since(began),
        )

    def _name_what_is_not_saved(self, entries: list[dict]) -> None:
        """Warns of callbacks' attributes that are in no backup, once."""
        for number, entry in enumerate(entries):
            names = [name for name in entry["unsaved"] if (number, name) not in self._named_as_unsaved]
            self._named_as_unsaved.update((number, name) for name in names)
            if names:
                _warn(
                    f"{entry['class']}: not saved: {', '.join(names)}. After a kill the callback goes on without; if "
                    "that matters, give it get_state(), which returns plain data, and set_state(state)."
                )

    def _name_what_changes(self) -> None:
        """Warns, once, of numbers and text that the model keeps, and that have changed since the first step."""
        then, now = self._plain or {}, training_state.plain_attributes(self._model)
        names = sorted({key[1] for key, value in now.items() if then.get(key, value) != value})
        if names and is_new(self._model, "plain attributes"):
            _warn(
                f"Received: {', '.join(names)}, which a step or a callback changes. A backup has no numbers and no "
                "text of models and their objects: after a kill they are what the program makes them. Expected: "
                "keras.Variable(..., trainable=False), or attributes of a callback."
            )

    def _name_what_is_elsewhere(self) -> None:
        """Warns, once, of variables that a step changes, and that no attribute leads to."""
        # Steps of tfdist's strategies change variables of these.
        names = [] if has_hooks(self._model.distribute_strategy) else training_state.changed_elsewhere(self._model)
        if names and is_new(self._model, "variables elsewhere"):
            _warn(
                f"Received: a step that changes {', '.join(names[:5])}{', ...' if names[5:] else ''}, which neither "
                "the model refers to, nor its layers, losses and metrics. No backup has them. Expected: attributes "
                "of the model, as by `self.name = variable`, or of an object that is one."
            )

    def _preempt(self) -> NoReturn:
        """Saves, and ends the process; all workers do so after the same step."""
        place, mid_epoch = self._place, self._place.steps > 0
        lost = mid_epoch and self._position.obstacle is not None
        if (reporter := ProgressWriter.from_environment()) is not None:
            reporter.report(DONE, place.total)  # saving may take longer than any step has: not a hang
        self._wait_for_writer()
        if lost:
            self._leave(f"after {place}", "", f"The data have no position within an epoch: {self._position.obstacle}.")
        self._save(mid_epoch)
        self._wait_for_writer()
        self._leave(f"after {place}", "is saved", self._failure)

    def _leave(self, where: str, what: str, failure: str | None) -> NoReturn:
        """Ends the process, once all others know that they have to end, too, and with which exit code."""
        reporter = ProgressWriter.from_environment()
        if reporter is not None and self._is_chief and failure is None:
            # Before the others are waited for: on a busy machine, the launcher may kill this process meanwhile.
            reporter.report(SAVED, self._place.total)
        if self._peers is not None:
            failure = self._peers.gather("preempted", failure, "save before it exits")[0]
            self._peers.acknowledge("saved", "hear whether the backup is saved")
        if failure is not None:
            what = "is not saved"
        at = {"epoch": self._place.epoch, "step": self._place.total}
        self._events.write("preempted" if failure is None else "unsaved", **at)
        if failure is None and reporter is not None:
            reporter.report(SAVED, self._place.total)
        if self._is_chief:
            begin = f"goes on from the last backup, {self._kept}" if self._kept else "trains from the beginning"
            rest = "" if failure is None else f". {failure} A new start {begin}"
            name, code = self._options.preemption_signal.name, PREEMPTED if failure is None else UNSAVED
            _log.warning("%s: stopped %s, which %s%s; exit code %d", name, where, what, rest, code)
        self._signal.uninstall()
        self._store.release()
        raise SystemExit(PREEMPTED if failure is None else UNSAVED)

    def ended(self) -> None:
        """After all other callbacks have ended."""
        self._model._initial_epoch = None
        self._position.ended()
        if self._done is not None:
            self._put_back(self._done)  # their `on_train_end` was called before it was saved
        self._wait_for_writer()
        stop = self._stop_at_end or self._signal.received
        if self._peers is not None:
            stop = any(self._peers.gather("backup-end", stop, "finish the fit"))
        # A process that gets the signal will be started again, and must then find that nothing is left to train.
        delete = self._options.delete_checkpoint and not stop
        if not (self._done is not None or delete):
            self._save(mid_epoch=False, done=True)
        self._writer.close()
        if delete and self._is_chief:
            self._store.clear()
        self._store.release()
        if delete and self._is_chief:
            _remove_if_empty(self._options.backup_dir)
        _taken.pop(absolute(self._folder), None)
        training_state.forget(self._model)
        callback_state.forget(self._others)
        key = absolute(self._options.backup_dir)
        _finished[key] = _finished.get(key, 0) + 1
        if stop:
            self._leave("at the end of the fit", "is complete", self._failure)
        self._signal.give_back()

    def _warn_not_written(self, error: Exception) -> None:
        self._events.write("not saved", error=str(error))
        self._failure = str(error)
        _warn(
            f"A backup could not be written; training goes on, and the last good one is kept. {error}", RuntimeWarning
        )


def _warn(text: str, category: type[Warning] = UserWarning) -> None:
    warnings.warn(text, category, stacklevel=3)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 4)


def _take_copies(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copies the tensors, and empties the dictionary that had them.

    While a snapshot shares a variable's buffer, the next step has to copy it before it writes, in the threads of the
    training. Once this copy is made, steps write in place again.
    """
    copies = {}
    while tensors:
        name, value = tensors.popitem()
        if isinstance(value, tf.Tensor) and value.dtype != tf.variant:
            with tf.device("CPU:0"):
                value = tf.raw_ops.DeepCopy(x=value) if "CPU" in value.device else tf.identity(value)
        copies[name] = value
    return copies


# How many fits with a backup folder have come to their end in this process: a script may call `fit` several times.
_finished: dict[str, int] = {}


# Which fit each folder has backups of, and in which thread that is called.
_taken: dict[str, tuple[weakref.ref[FitBackup], int]] = {}


def _take(folder: str, fit: FitBackup) -> None:
    """Refuses a folder of a fit that goes on in this process, around this one or in another thread."""
    reference, thread = _taken.get(absolute(folder), (lambda: None, 0))
    other, here = reference(), threading.get_ident()
    is_another = other is not None and (other._model is not fit._model or thread != here)
    if is_another and frame_of_fit(other._model, sys._current_frames().get(thread)) is not None:
        raise is_final(
            FolderInUseError(
                f"Received: backup_dir {folder!r}, to which another fit of this process, which goes on, writes its "
                "backups. Expected: one training at a time in a folder. Pass another backup_dir."
            )
        )
    if other is not None:
        other._writer.wait()  # it has failed: what it is still writing is not to be taken for a rest of it
    _taken[absolute(folder)] = weakref.ref(fit), here


def _folder_of_fit(backup_dir: str) -> str:
    """The folder of the next (or interrupted) fit: `backup_dir` for the first one, then `backup_dir/fit-2`, ...

    A script that is started again makes the same fits in the same order, and finds the finished ones finished.
    """
    number = _finished.get(absolute(backup_dir), 0) + 1
    return backup_dir if number == 1 else f"{backup_dir.rstrip('/')}/fit-{number}"


def _later_fits(backup_dir: str) -> list[str]:
    """Which of the folders of later fits have backups."""
    folder, found = absolute(backup_dir), []
    with contextlib.suppress(OSError):
        if scheme_of(folder):
            found = storage_of(folder).names(folder, levels=3)
        else:
            found = glob.glob(f"fit-*/*/{MANIFEST_NAME}", root_dir=folder)
    return sorted({path.partition("/")[0] for path in found if re.fullmatch(rf"fit-\d+/.*/{MANIFEST_NAME}", path)})


def _remove_if_empty(backup_dir: str) -> None:
    """Removes the folder of the fit that ends, if nothing is left in it. Call it before this one is counted."""
    for folder in dict.fromkeys([_folder_of_fit(backup_dir), backup_dir]):
        with contextlib.suppress(OSError):  # another job may write to it by now; remote stores have no folders
            os.rmdir(absolute(folder))
