"""`tfdist.callbacks.BackupAndRestore`: a fit that was killed goes on as if it had not been."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.arguments import check_path
from tfdist.checkpoint.fit_backup import FitBackup
from tfdist.checkpoint.folder_lock import drill_folder
from tfdist.checkpoint.save_schedule import SaveSchedule
from tfdist.runtime.callback_order import Arranged
from tfdist.steps.common_hooks import install
from tfdist.storage.selection import check_remote_path, scheme_of


class BackupAndRestore(Arranged):
    """Saves the complete state of `fit`, and resumes exactly where it stopped.

    Saved are weights, seeds, optimizer, metrics, the other callbacks' state, History, the random state of Python, NumPy
    and TensorFlow, and the position in the data. A script that is killed at any moment and started again ends with the
    weights and the history of a run that was not. It works in one process and under every tfdist strategy: the chief
    writes, all restore, and another number of workers may go on.

    The position within an epoch is found again for arrays, `tf.data` pipelines whose seeds are set
    (`keras.utils.set_random_seed`), `keras.utils.PyDataset`, Grain datasets, and `dataset_fn`. With other data
    (generators, Python code in a pipeline, random numbers without seeds) it saves at the ends of epochs only, and says
    so.

    Under `tfdist drill` (TFDIST_DRILL_DIR is set) it uses a folder of the drill with the last part of `backup_dir` as
    its name, and keeps the last backup, which the drill compares; the script's own folder is left alone.

    Replaces `keras.callbacks.BackupAndRestore`, which loses most of this (keras issues 20333, 19692), and takes its
    arguments.

    Args:
        backup_dir: folder of the backups: local, in a bucket that TensorFlow reaches (`gs://`), or one that fsspec
            reaches with a package that you install (`s3://` with s3fs, ...). Only the chief needs to reach it: the
            others are sent what it reads. Every fit needs a folder of its own, except several in one script that each
            start makes in the same order.
        save_freq: `"epoch"`, a number of training steps, or a duration: `"30s"`, `"10min"`, `"2h"`.
        double_checkpoint: whether at least two backups stay, as in Keras; `max_to_keep` says how many.
        delete_checkpoint: whether the backups are deleted when the fit has finished. With `False`, a script that has
            finished returns at once with its history when it is started again.
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

    _keeps_on_disk = True

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
        self._callback_list: Any = None
        self._others: list[keras.callbacks.Callback] = []
        self._fit: FitBackup | None = None

    def _arrange(self, callback_list: Any, callbacks: list[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
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

    def _abandon(self) -> None:
        """Leaves a fit that an exception has ended. tfdist calls the fit again in this process."""
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
    """The part of `BackupAndRestore` that comes before all other callbacks."""

    # Keras may call `on_train_batch_end` in another thread, as it does where no callback has that method.
    async_safe = True

    def __init__(self, backup: BackupAndRestore):
        super().__init__()
        self._backup = backup

    def on_train_begin(self, logs: dict | None = None) -> None:
        backup = self._backup
        backup._fit = FitBackup(backup, backup._callback_list, backup._others)
        backup._fit.begin()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._backup._fit.epoch_begins(epoch)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._backup._fit.batch_ended(batch)


# Keeps the state of a fit in the memory of all processes of an elastic job, where the user keeps none on disk.

# At most so many steps are done again when a process is lost. Each time the state is kept costs about a copy of it.
_STEPS = 16


class ElasticBackup(BackupAndRestore):
    """`BackupAndRestore` without a folder on disk; added to a fit by tfdist."""

    def __init__(self) -> None:
        super().__init__("memory", save_freq=_STEPS, asynchronous=False, preemption_signal=None)

    _keeps_on_disk = False
