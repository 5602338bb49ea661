"""A store of checkpoints: a folder in which the newest complete checkpoint can be found after any kind of end."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.atomic_files import sync, write_atomically
from tfdist.checkpoint.manifest import (
    MANIFEST_NAME,
    DamagedBackupsError,
    DamagedCheckpointError,
    FileRecord,
    Manifest,
    TensorRecord,
    UnknownFormatError,
    UnreadableCheckpointError,
    checkpoint_name,
    checkpoint_names,
    checkpoint_number,
    decode_manifest,
    encode_manifest,
    entries_of,
    is_there,
    measure_file,
    open_local,
    patiently,
    read_file,
    verify_checkpoint,
)
from tfdist.checkpoint.tensor_files import fault_of_tensors, load_tensors, open_file, os_errors, save_tensors

_TENSORS_PREFIX = "state"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its name, and what was given to `CheckpointStore.write`."""

    name: str
    meta: dict[str, Any]
    tensors: Mapping[str, np.ndarray]


class CheckpointStore:
    """Writes and reads the checkpoints of one training run, the last `max_to_keep` of which stay.

    A checkpoint counts once its manifest is there, which is written last: a process that is killed while it writes
    leaves the checkpoints before it as they were. One process at a time may write; any number may read.

    Args:
        directory: A local folder, or any path that `tf.io.gfile` can write to.
        max_to_keep: How many checkpoints stay.
        writer: Whether this process writes. The writer makes the folder, and removes what killed writers have left.

    Raises:
        ValueError: If `max_to_keep` is less than 1.
        OSError: If the folder cannot be made.

    Example:
        >>> store = CheckpointStore("backup")
        >>> store.write({"epoch": 3}, {"kernel": tf.ones([2, 2])})
        'checkpoint-00000001'
        >>> store.newest().meta
        {'epoch': 3}
    """

    def __init__(self, directory: str | os.PathLike[str], max_to_keep: int = 3, writer: bool = True) -> None:
        if max_to_keep < 1:
            raise ValueError(f"Received: max_to_keep={max_to_keep}. Expected: 1 or more: the newest one stays.")
        path = os.fspath(directory).removeprefix("file://")
        self._is_local = "://" not in path
        self._open = open_local if self._is_local else open_file
        # The process may change its working directory later.
        self.directory = os.path.abspath(path) if self._is_local else path.rstrip("/")
        self.max_to_keep = max_to_keep
        self._writer = writer
        self._damaged: set[str] = set()
        self._known: set[str] = set()
        self._writing = threading.Lock()
        if writer:
            with os_errors():
                tf.io.gfile.makedirs(self.directory)
                for name in set(self._folders()) - set(self.names()):
                    self._remove(name)

    def write(self, meta: Mapping[str, Any], tensors: Mapping[str, tf.Tensor | np.ndarray]) -> str:
        """Writes a checkpoint, then removes the oldest of more than `max_to_keep`.

        Args:
            meta: What JSON can express; tuples come back as lists, and keys as strings.
            tensors: Values by their names. They are written from where they are, without a copy in Python.

        Returns:
            The checkpoint's name.

        Raises:
            OSError: If it cannot be written. Nothing of it is left, and the checkpoints before it are as they were.
            TypeError: If `meta` is not JSON.
            ValueError: If a name is empty or this store is not a writer.
        """
        if not self._writer:
            raise ValueError("This CheckpointStore is a reader: make the one that writes with writer=True")
        if "" in tensors:
            raise ValueError("A tensor's name is '', but a checkpoint needs names that are not empty: name the tensor")
        with tf.device("CPU:0"):
            values = {name: tf.convert_to_tensor(value) for name, value in tensors.items()}
        with self._writing:
            name = checkpoint_name(1 + max(map(checkpoint_number, self._folders()), default=0))
            try:
                with os_errors():
                    self._write_folder(self._path(name), dict(meta), values)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    self._remove(name)
                if isinstance(error, OSError):
                    raise OSError(
                        f"The checkpoint {self._path(name)} cannot be written: {error}. The checkpoints before it are "
                        "unharmed: make room there, or choose another folder."
                    ) from error
                raise
            self._known.add(name)
            self._prune()
        return name

    def newest(self, prefer: Callable[[dict[str, Any]], bool] = lambda meta: True) -> Checkpoint | None:
        """Returns the newest checkpoint that verifies, or None if there is no checkpoint.

        Warns about each damaged newer one, which is removed after the next `write`.

        Args:
            prefer: Tells from its meta whether a checkpoint is wanted; if none is, the newest one is returned.

        Raises:
            DamagedBackupsError: If there are checkpoints, but none of them verifies.
            UnknownFormatError: If a later version of tfdist wrote the one to be used.
            OSError: If the disk fails, again and again. A checkpoint that cannot be read is not damaged.
        """
        while names := self.names():
            reasons: dict[str, str] = {}
            second_best: Checkpoint | None = None
            for name in reversed(names):
                try:
                    checkpoint = self.open(name)
                except DamagedCheckpointError as error:
                    reasons[name] = error.reason
                    continue
                second_best = second_best or checkpoint
                if prefer(checkpoint.meta):
                    break
            else:
                checkpoint = second_best
            if checkpoint is not None:
                self._warn(reasons, checkpoint.name)
                return checkpoint
            # A checkpoint that the writer has removed in the meantime is not damaged: look again.
            if set(names) <= set(self.names()):
                raise DamagedBackupsError(self.directory, reasons)
        return None

    def names(self) -> list[str]:
        """Returns the names of the completely written checkpoints, oldest first."""
        while True:
            folders = self._folders()
            names = [name for name in folders if self._is_there(self._path(name, MANIFEST_NAME))]
            # A writer may have added one and removed another in between: that must not look like no checkpoint.
            if self._folders() == folders:
                return names

    def open(self, name: str) -> Checkpoint:
        """Reads and verifies one checkpoint.

        Raises:
            DamagedCheckpointError: If it is missing, incomplete or altered.
            UnknownFormatError: If another version of tfdist wrote it, in a format of its own.
            UnreadableCheckpointError: If the disk fails, again and again.
        """
        folder = self._path(name)

        def read() -> Checkpoint:
            manifest = verify_checkpoint(folder, self._open)
            prefix = self._path(name, _TENSORS_PREFIX)
            try:
                if fault := fault_of_tensors(prefix, manifest):
                    raise DamagedCheckpointError(folder, fault)
                dtypes = {name: record.dtype for name, record in manifest.tensors.items()}
                return Checkpoint(name, manifest.meta, load_tensors(prefix, dtypes))
            except OSError as error:
                # The files were whole a moment ago: if they are not now, the next attempt says so.
                raise OSError(f"TensorFlow cannot read its tensors: {error}") from error

        try:
            return patiently(read)
        except UnreadableCheckpointError:
            raise
        except OSError as error:
            raise UnreadableCheckpointError(folder, str(error)) from error

    def clear(self) -> None:
        """Removes all checkpoints, except those of an unknown format.

        Raises:
            OSError: If one cannot be removed.
        """
        with self._writing:
            committed = self.names()
            for name in self._folders():
                if name not in committed or self._is_ours(name):
                    self._remove(name)

    def _write_folder(self, folder: str, meta: dict[str, Any], tensors: Mapping[str, tf.Tensor]) -> None:
        tf.io.gfile.makedirs(folder)
        save_tensors(os.path.join(folder, _TENSORS_PREFIX), tensors)
        files: dict[str, FileRecord] = {}
        for name in sorted(tf.io.gfile.listdir(folder)):
            path = os.path.join(folder, name)
            files[name] = measure_file(path, open_file)
            if self._is_local:
                sync(path)
        records = {name: TensorRecord(value.dtype.name, value.shape.as_list()) for name, value in tensors.items()}
        self._commit(folder, encode_manifest(Manifest(meta, files, records)))

    def _commit(self, folder: str, manifest: bytes) -> None:
        path = os.path.join(folder, MANIFEST_NAME)
        if self._is_local:
            write_atomically(path, manifest, durable=True)
            sync(self.directory)
        else:
            # Renaming is neither atomic nor complete on every remote file system; half a manifest does not verify.
            with tf.io.gfile.GFile(path, "wb") as file:
                file.write(manifest)

    def _prune(self) -> None:
        try:
            names = [name for name in self.names() if self._is_ours(name)]
        except OSError as error:  # the new checkpoint is complete nevertheless
            warnings.warn(f"Old checkpoints in {self.directory} cannot be removed now: {error}", stacklevel=3)
            return
        kept = [name for name in names if not self._is_still_damaged(name)][-self.max_to_keep :]
        for name in set(names).difference(kept):
            try:
                self._remove(name)
            except OSError as error:
                warnings.warn(f"The old checkpoint {self._path(name)} cannot be removed: {error}", stacklevel=3)
        self._damaged.clear()

    def _is_ours(self, name: str) -> bool:
        """Whether this version of tfdist may remove a checkpoint: not one of a later version."""
        if name not in self._known:
            try:
                decode_manifest(read_file(self._path(name, MANIFEST_NAME), self._open))
            except UnknownFormatError:
                return False
            except ValueError:
                pass  # damaged
            self._known.add(name)
        return True

    def _is_still_damaged(self, name: str) -> bool:
        """Whether a checkpoint that was damaged when it was read is so now: a disk may have given wrong bytes once."""
        if name not in self._damaged:
            return False
        try:
            verify_checkpoint(self._path(name), self._open)
        except DamagedCheckpointError:
            return True
        except OSError:
            return False
        return False

    def _warn(self, reasons: Mapping[str, str], used: str) -> None:
        present = self.names()
        for name, reason in reasons.items():
            if name in present:
                self._damaged.add(name)
                warnings.warn(
                    f"The checkpoint {self._path(name)} is damaged: {reason}. {used} is used instead; the damaged one "
                    "is removed after the next backup.",
                    stacklevel=3,
                )

    def _remove(self, name: str) -> None:
        # The manifest goes first: a checkpoint that is half removed must not count.
        with os_errors():
            if self._is_there(self._path(name, MANIFEST_NAME)):
                tf.io.gfile.remove(self._path(name, MANIFEST_NAME))
            if self._is_there(self._path(name)):
                tf.io.gfile.rmtree(self._path(name))

    # TensorFlow says of a local path that it is not there whenever it cannot look.

    def _is_there(self, path: str) -> bool:
        if self._is_local:
            return is_there(path)
        with os_errors():
            return tf.io.gfile.exists(path)

    def _folders(self) -> list[str]:
        if self._is_local:
            return checkpoint_names(entries_of(self.directory))
        try:
            with os_errors():
                return checkpoint_names(tf.io.gfile.listdir(self.directory))
        except FileNotFoundError:
            return []

    def _path(self, *parts: str) -> str:
        return os.path.join(self.directory, *parts)
