"""`tfdist.callbacks.BackupAndRestore`: a fit that was killed goes on as if it had not been."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.callbacks.drill_folder import drill_folder
from tfdist.callbacks.fit_backup import FitBackup
from tfdist.callbacks.save_schedule import SaveSchedule

_ON_FINISH = ("keep", "delete")


class BackupAndRestore(keras.callbacks.Callback):
    """Saves the complete state of `fit`, and resumes exactly where it stopped.

    Saved are weights, seeds, optimizer, metrics, the other callbacks' state, History, the random state of Python, NumPy
    and TensorFlow, and the position in the data. A script that is killed at any moment and started again ends with the
    weights and the history of a run that was not. It works in one process and under every tfdist strategy: the chief
    writes, all restore, and another number of workers may go on.

    The position within an epoch is found again for arrays, `tf.data` pipelines whose seeds are set
    (`keras.utils.set_random_seed`), `keras.utils.PyDataset`, and `dataset_fn`. With other data (generators, Python code
    in a pipeline, random numbers without seeds) it saves at the ends of epochs only, and says so.

    Under `tfdist drill` (TFDIST_DRILL_DIR is set) it uses a folder of the drill with the last part of `backup_dir` as
    its name, and keeps the last backup, which the drill compares; the script's own folder is left alone.

    Replaces `keras.callbacks.BackupAndRestore`, which loses most of this (keras issues 20333, 19692).

    Args:
        backup_dir: folder of the backups, local or anything that `tf.io.gfile` writes to. All workers need to reach it.
            Every fit needs a folder of its own, except several in one script that each start makes in the same order.
        save_freq: `"epoch"`, a number of training steps, or a duration: `"30s"`, `"10min"`, `"2h"`.
        keep: how many backups stay; the newest one that is not damaged is used.
        asynchronous: whether backups are written while training goes on. Training waits only if the last one is not yet
            written at the end of an epoch; within an epoch, a backup is left out then.
        on_finish: `"keep"`, so that a script that has finished returns at once with its history when it is started
            again, or `"delete"`, so that it trains anew.
        dataset_fn: a function from the number of an epoch to its `tf.data.Dataset`, used instead of the data that `fit`
            was given. It is for pipelines that can jump to an epoch faster than by reading everything before it.
        preemption_signal: on this signal, to any of the workers, all stop after the same step, save, and exit with code
            77. `None` leaves signals alone.

    Raises:
        ValueError: for an empty `backup_dir`, an unknown `save_freq` or `on_finish`; in `fit`, if the backup is of
            another model, optimizer, loss, metrics, other callbacks or data. The text names the first difference.
        OSError: in `fit`, if the folder cannot be made or written to.
        tfdist.callbacks.DamagedBackups: in `fit`, if there are backups but all of them are damaged.
        tfdist.callbacks.FolderInUse: in `fit`, if another training writes to the folder; uncaught, it ends the program
            with exit code 78, and neither `tfdist run` nor `tfdist submit` starts it again.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> backup = tfdist.callbacks.BackupAndRestore("backup", save_freq=100)
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=[backup], verbose=0)
    """

    keeps_on_disk = True

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        keep: int = 3,
        asynchronous: bool = True,
        on_finish: str = "keep",
        *,
        dataset_fn: Callable[[int], tf.data.Dataset] | None = None,
        preemption_signal: signal.Signals | int | None = signal.SIGTERM,
    ):
        from tfdist.compat import install  # it needs this module

        super().__init__()
        folder = str(backup_dir) if "://" in str(backup_dir) else os.path.expanduser(backup_dir)
        if not folder:
            raise ValueError("Received: backup_dir=''. Expected: the path of a folder, such as 'backup'.")
        if on_finish not in _ON_FINISH:
            raise ValueError(f"Received: on_finish={on_finish!r}. Expected 'keep' or 'delete'.")
        SaveSchedule(save_freq)
        if keep < 1:
            raise ValueError(f"Received: keep={keep}. Expected at least 1: the newest backup has to stay.")
        install()
        folder_in_drill = drill_folder(folder, os.environ)
        self.backup_dir = folder_in_drill or folder
        self.save_freq = save_freq
        self.keep = keep
        self.asynchronous = asynchronous
        self.on_finish = "keep" if folder_in_drill else on_finish
        self.dataset_fn = dataset_fn
        self.preemption_signal = None if preemption_signal is None else signal.Signals(preemption_signal)
        self._callback_list: Any = None
        self._others: list[keras.callbacks.Callback] = []
        self._fit: FitBackup | None = None

    def get_state(self) -> dict:
        """Nothing: for another backup in the same fit."""
        return {}

    def set_state(self, state: dict) -> None:
        """Does nothing."""

    def arrange(self, callback_list: Any, callbacks: list[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
        """The callbacks of a fit in the order in which this one sees what the others do.

        Called by tfdist when Keras makes its list of callbacks.
        """
        if any(isinstance(callback, BackupAndRestore) and callback is not self for callback in callbacks):
            raise ValueError(
                "Received: two BackupAndRestore callbacks in one fit. Expected: one; a resumed fit can only follow one."
            )
        self._callback_list = callback_list
        last = [callback for callback in callbacks if getattr(callback, "comes_last", False)]
        self._others = [callback for callback in callbacks if callback is not self and callback not in last]
        return [_First(self), *self._others, self, *last]

    def abandon(self) -> None:
        """Leaves a fit that an exception has ended, and that is called again in this process."""
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.abandon()

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
    """Comes before all other callbacks."""

    def __init__(self, backup: BackupAndRestore):
        super().__init__()
        self._backup = backup

    def on_train_begin(self, logs: dict | None = None) -> None:
        backup = self._backup
        backup._fit = FitBackup(backup, backup._callback_list, backup._others)
        backup._fit.begin()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._backup._fit.epoch_begins(epoch)
