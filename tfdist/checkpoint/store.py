"""A store of checkpoints: a folder in which the newest complete checkpoint can be found after any kind of end."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

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
    measure_file,
    read_file,
    verify_checkpoint,
)
from tfdist.checkpoint.tensor_files import fault_of_tensors, load_tensors, save_tensors
from tfdist.storage.patience import entries_of, is_there, patiently
from tfdist.storage.selection import storage_of
from tfdist.storage.tensorflow_files import os_errors

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

    What is in a bucket passes through a local folder, for TensorFlow's files of tensors are renamed and read in parts.

    Args:
        directory: A local folder, or a remote one that `check_remote_path` accepts.
        max_to_keep: How many checkpoints stay.
        writer: Whether this process writes. The writer makes the folder, and removes what killed writers have left.
        guard: Called before a checkpoint is made valid and before anything is removed; raises an `OSError` if this
            process must not do that any more.

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

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_to_keep: int = 3,
        writer: bool = True,
        *,
        guard: Callable[[], None] | None = None,
    ) -> None:
        if max_to_keep < 1:
            raise ValueError(f"Received: max_to_keep={max_to_keep}. Expected: 1 or more: the newest one stays.")
        path = os.fspath(directory).removeprefix("file://")
        self._storage = storage_of(path)
        # The process may change its working directory later.
        self.directory = os.path.abspath(path) if self._storage.is_local else path.rstrip("/")
        self.max_to_keep = max_to_keep
        self._writer = writer
        self._guard = guard or (lambda: None)
        self._damaged: set[str] = set()
        self._known: set[str] = set()
        self._writing = threading.Lock()
        if writer:
            if self._storage.is_local:
                with os_errors():
                    tf.io.gfile.makedirs(self.directory)
            # One look: of two, the second one might not see what is complete.
            for name, is_complete in self._look().items():
                if not is_complete:
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
                self._write_folder(self._path(name), dict(meta), values)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    self._guard()
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
            folders = self._look()
            # A writer may have added one and removed another in between: that must not look like no checkpoint.
            if not self._storage.is_local or self._folders() == list(folders):
                return [name for name, is_complete in folders.items() if is_complete]

    def open(self, name: str) -> Checkpoint:
        """Reads and verifies one checkpoint.

        Raises:
            DamagedCheckpointError: If it is missing, incomplete or altered.
            UnknownFormatError: If another version of tfdist wrote it, in a format of its own.
            UnreadableCheckpointError: If the disk fails, again and again.
        """

        def copied() -> Checkpoint:
            with self._local_copy(name) as folder:
                manifest = verify_checkpoint(folder, self._path(name))
                prefix = os.path.join(folder, _prefix_in(manifest))
                try:
                    if fault := fault_of_tensors(prefix, manifest):
                        raise DamagedCheckpointError(self._path(name), fault)
                    dtypes = {name: record.dtype for name, record in manifest.tensors.items()}
                    return Checkpoint(name, manifest.meta, load_tensors(prefix, dtypes))
                except OSError as error:
                    # The files were whole a moment ago: if they are not now, the next attempt says so.
                    raise OSError(f"TensorFlow cannot read its tensors: {error}") from error

        def read() -> Checkpoint:
            try:
                return copied()
            except DamagedCheckpointError:
                if self._storage.is_local:
                    raise
                # A download that was cut short is no damage of the checkpoint.
                return copied()

        try:
            return patiently(read, final=(UnreadableCheckpointError,))
        except UnreadableCheckpointError:
            raise
        except OSError as error:
            raise UnreadableCheckpointError(self._path(name), str(error)) from error

    @contextlib.contextmanager
    def _local_copy(self, name: str) -> Iterator[str]:
        """A local folder with the files of a checkpoint, as far as they are there: its own, if it is local.

        Raises:
            UnreadableCheckpointError: If they cannot be copied, again and again.
        """
        if self._storage.is_local:
            yield self._path(name)
            return
        with tempfile.TemporaryDirectory(prefix="tfdist-checkpoint-") as folder:
            if self._download(name, MANIFEST_NAME, folder):
                with contextlib.suppress(ValueError):  # of another format, or damaged: who verifies it says so
                    for file in decode_manifest(read_file(os.path.join(folder, MANIFEST_NAME))).files:
                        self._download(name, file, folder)
            yield folder

    def _download(self, name: str, file: str, folder: str) -> bool:
        """Copies a file of a checkpoint; returns whether it is there."""
        try:
            patiently(lambda: self._storage.download(self._path(name, file), os.path.join(folder, file)))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UnreadableCheckpointError(self._path(name), f"{file}: {error}") from error
        return True

    def _manifest_of(self, name: str) -> bytes:
        """The manifest of a checkpoint, as it is.

        Raises:
            OSError: If it cannot be read, again and again.
        """
        path = self._path(name, MANIFEST_NAME)
        return read_file(path) if self._storage.is_local else patiently(lambda: self._storage.read(path))

    def clear(self) -> None:
        """Removes all checkpoints, except those of an unknown format.

        Raises:
            OSError: If one cannot be removed, or `guard` forbids it.
        """
        with self._writing:
            self._guard()
            committed = self.names()
            for name in self._folders():
                if name not in committed or self._is_ours(name):
                    self._remove(name)

    def _write_folder(self, folder: str, meta: dict[str, Any], tensors: Mapping[str, tf.Tensor]) -> None:
        with self._staged(folder) as stage:
            with os_errors():
                # In a bucket, a process that has lost its lease may still be writing: to files of its own.
                own = "" if self._storage.is_local else f"-{secrets.token_hex(4)}"
                save_tensors(os.path.join(stage, _TENSORS_PREFIX + own), tensors)
            files: dict[str, FileRecord] = {}
            for name in sorted(os.listdir(stage)):
                local = os.path.join(stage, name)
                files[name] = measure_file(local)
                self._put(lambda local=local, name=name: self._storage.upload(local, os.path.join(folder, name)))
            records = {name: TensorRecord(value.dtype.name, value.shape.as_list()) for name, value in tensors.items()}
            manifest = encode_manifest(Manifest(meta, files, records))
            self._guard()
            # The last file: with it, the checkpoint counts.
            self._put(lambda: self._storage.write(os.path.join(folder, MANIFEST_NAME), manifest))

    @contextlib.contextmanager
    def _staged(self, folder: str) -> Iterator[str]:
        """Where the files of a checkpoint are made: in its folder, or for a remote one in a temporary one."""
        if self._storage.is_local:
            with os_errors():
                tf.io.gfile.makedirs(folder)
            yield folder
        else:
            with tempfile.TemporaryDirectory(prefix="tfdist-backup-") as stage:
                yield stage

    def _put(self, write: Callable[[], None]) -> None:
        """Writes or removes; again after a pause where a network may fail for a moment. A full disk stays full."""
        write() if self._storage.is_local else patiently(write, final=(PermissionError,))

    def _prune(self) -> None:
        try:
            self._guard()
            folders = self._look()
            names = [name for name, is_complete in folders.items() if is_complete and self._is_ours(name)]
        except OSError as error:  # the new checkpoint is complete nevertheless
            warnings.warn(f"Old checkpoints in {self.directory} cannot be removed now: {error}", stacklevel=3)
            return
        kept = [name for name in names if not self._is_still_damaged(name)][-self.max_to_keep :]
        # What an earlier `write` could not finish goes, too: it may be as large as a checkpoint.
        last = max(map(checkpoint_number, names), default=0)
        unfinished = [name for name in folders if not folders[name] and checkpoint_number(name) < last]
        for name in (*unfinished, *(name for name in names if name not in kept)):
            try:
                self._remove(name)
            except OSError as error:
                warnings.warn(f"The old checkpoint {self._path(name)} cannot be removed: {error}", stacklevel=3)
        self._damaged.clear()

    def _is_ours(self, name: str) -> bool:
        """Whether this version of tfdist may remove a checkpoint: not one of a later version."""
        if name not in self._known:
            try:
                decode_manifest(self._manifest_of(name))
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
            with self._local_copy(name) as folder:
                verify_checkpoint(folder, self._path(name))
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
        self._put(lambda: self._storage.remove(self._path(name, MANIFEST_NAME)))
        self._put(lambda: self._storage.remove_all(self._path(name)))

    def _look(self) -> dict[str, bool]:
        """The checkpoints' folders, oldest first, and whether each is complete."""
        if self._storage.is_local:
            # What else is there may be none of this process' business, such as lost+found.
            names = checkpoint_names(entries_of(self.directory))
            return {name: is_there(self._path(name, MANIFEST_NAME)) for name in names}
        found = patiently(lambda: self._storage.folders_with(self.directory, MANIFEST_NAME))
        return {name: found[name] for name in checkpoint_names(found)}

    def _folders(self) -> list[str]:
        return checkpoint_names(entries_of(self.directory)) if self._storage.is_local else list(self._look())

    def _path(self, *parts: str) -> str:
        return os.path.join(self.directory, *parts)


def _prefix_in(manifest: Manifest) -> str:
    """The name that the files of tensors begin with."""
    return next((name.removesuffix(".index") for name in manifest.files if name.endswith(".index")), _TENSORS_PREFIX)
