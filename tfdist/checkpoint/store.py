"""Where backups lie: a folder in which the newest complete one is found after any kind of end, and how a job shares it.

Only the chief needs to see the folder, which is local or in a bucket: it sends the backup to those who do not. Of
sharded variables each process writes its parts into the chief's folder, which all have to see then:

chief       makes the folder, tells the others, writes its tensors; waits for the others, and writes the manifest
the others  write their rows into files of their own, and tell the chief what is in them, or what has gone wrong
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.checkpoint.lock import FolderInUseError, FolderLease, FolderLock, FolderLostError
from tfdist.checkpoint.manifest import (
    MANIFEST_NAME,
    DamagedBackupsError,
    DamagedCheckpointError,
    Manifest,
    UnknownFormatError,
    UnreadableCheckpointError,
    checkpoint_name,
    checkpoint_names,
    checkpoint_number,
    committed_checkpoints,
    decode_manifest,
    encode_manifest,
    measure_file,
    read_file,
    verify_checkpoint,
)
from tfdist.compat.keras import hooks_of
from tfdist.runtime.servers import end
from tfdist.steps.reduce import broadcast_bytes
from tfdist.storage.base import check_writable, entries_of, is_there, patiently
from tfdist.storage.selection import absolute, advice_for, scheme_of, storage_of
from tfdist.storage.tensorflow_files import os_errors
from tfdist.supervision.events import EventLog
from tfdist.supervision.exit_codes import REFUSED
from tfdist.supervision.process_folders import process_folder

_TENSORS_PREFIX = "state"
ROWS = "tfdist.rows/"  # of tensors: each has some rows of a variable that the processes have in parts
_PARTS = "backup-parts"  # of messages

# What keeps all processes from beginning, by its name in a message. Only a disk may be better another time.
_PROBLEMS: dict[str, type[Exception]] = {
    **{"in use": FolderInUseError, "format": UnknownFormatError, "damaged": DamagedBackupsError, "disk": OSError},
    "elsewhere": ValueError,
}
_FINAL = ("in use", "format", "elsewhere")
# Bytes that are sent at a time, so that no process needs room for a whole backup beside its tensors.
_PIECE = 64 << 20


# What stands in a manifest of files, and of the tensors in them.
_Written = tuple[dict[str, dict[str, int]], dict[str, dict[str, Any]]]


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
        guard: Called before a checkpoint is written, before it is made valid and before anything is removed; raises an
            `OSError` if this process must not do that any more.

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
        self.directory = absolute(directory)
        self._storage = storage_of(self.directory)
        self.max_to_keep = max_to_keep
        self._guard = guard or (lambda: None)
        self._damaged: set[str] = set()
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
        """
        return self._write(meta, tensors, lambda folder: None, list)

    def _write(
        self,
        meta: Mapping[str, Any],
        tensors: Mapping[str, Any],
        tell: Callable[[str], None],
        hear: Callable[[], list[_Written]],
    ) -> str:
        """As `write`; `tell` lets others write into the folder, too, and `hear` waits for what they wrote."""
        with tf.device("CPU:0"):
            values = {name: tf.convert_to_tensor(value) for name, value in tensors.items()}
        with self._writing:
            name = checkpoint_name(1 + max(map(checkpoint_number, self._look()), default=0))
            self._damaged.discard(name)  # a user may have moved away the one of this name
            try:
                self._write_folder(self._path(name), dict(meta), values, tell, hear)
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
            found: Checkpoint | None = None
            for name in reversed(names):
                try:
                    checkpoint = self.open(name)
                except DamagedCheckpointError as error:
                    reasons[name] = error.reason
                    continue
                if prefer(checkpoint.meta):
                    found = checkpoint
                    break
                found = found or checkpoint
            if found is not None:
                self._warn(reasons, found.name)
                return found
            # A checkpoint that the writer has removed in the meantime is not damaged: look again.
            if set(names) <= set(self.names()):
                lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
                raise DamagedBackupsError(
                    f"{self.directory} holds no checkpoint that is complete and unaltered:{lines}\nTo start over, "
                    "move the folder away, or use another one."
                )
        return None

    def names(self) -> list[str]:
        """Returns the names of the completely written checkpoints, oldest first."""
        while True:
            folders = self._look()
            # A writer may have added one and removed another in between: that must not look like no checkpoint.
            if not self._storage.is_local or list(self._look()) == list(folders):
                return [name for name, is_complete in folders.items() if is_complete]

    def open(self, name: str) -> Checkpoint:
        """Reads and verifies one checkpoint.

        Raises:
            DamagedCheckpointError: If it is missing, incomplete or altered.
            UnknownFormatError: If another version of tfdist wrote it, in a format of its own.
            UnreadableCheckpointError: If the disk fails, again and again.
        """

        try:
            return self._open(name)
        except DamagedCheckpointError:
            if self._storage.is_local:
                raise
            return self._open(name)  # a download that was cut short is no damage of the checkpoint

    def _open(self, name: str) -> Checkpoint:
        with self._local_copy(name) as folder:
            manifest = verify_checkpoint(folder, self._path(name))
            try:
                tensors = _load_tensors(folder, manifest)
                # A copy is gone after this.
                return Checkpoint(name, manifest.meta, tensors if self._storage.is_local else dict(tensors))
            except ValueError as error:
                raise DamagedCheckpointError(self._path(name), str(error)) from None
            except OSError as error:
                verify_checkpoint(folder, self._path(name))  # its writer may have removed it meanwhile
                raise UnreadableCheckpointError(
                    self._path(name), f"TensorFlow cannot read its tensors: {error}"
                ) from error

    @contextlib.contextmanager
    def _local_copy(self, name: str) -> Iterator[str]:
        """A local folder with the files of a checkpoint, as far as they are there: its own, if it is local.

        Raises:
            UnreadableCheckpointError: If they cannot be copied, again and again.
        """
        if self._storage.is_local:
            yield self._path(name)
            return
        with process_folder("checkpoint") as path:
            folder = os.fspath(path)

            def download(file: str) -> str:
                local = os.path.join(folder, file)
                patiently(lambda: self._storage.download(self._path(name, file), local))
                return local

            try:
                # What is missing, damaged or of another format, says who verifies it.
                with contextlib.suppress(FileNotFoundError, ValueError):
                    for file in decode_manifest(read_file(download(MANIFEST_NAME))).files:
                        download(file)
            except OSError as error:
                raise UnreadableCheckpointError(self._path(name), f"it cannot be downloaded: {error}") from error
            yield folder

    def _digest_of(self, name: str) -> str:
        """A digest of a checkpoint's manifest, which has the checksums of all its files.

        Raises:
            OSError: If it cannot be read, again and again.
        """
        content = patiently(lambda: self._storage.read(self._path(name, MANIFEST_NAME)))
        return hashlib.sha256(content).hexdigest()

    def clear(self) -> None:
        """Removes all checkpoints.

        Raises:
            OSError: If one cannot be removed, or `guard` forbids it.
        """
        with self._writing:
            self._guard()
            for name in self._look():
                self._remove(name)

    def _write_folder(
        self,
        folder: str,
        meta: dict[str, Any],
        tensors: Mapping[str, tf.Tensor],
        tell: Callable[[str], None],
        hear: Callable[[], list[_Written]],
    ) -> None:
        self._guard()
        if self._storage.is_local:
            with os_errors():
                tf.io.gfile.makedirs(self.directory)  # it may have been removed
                # Another training, which has taken over the folder meanwhile, may be writing to one of this name.
                tf.io.gfile.mkdir(folder)
        with self._staged(folder) as stage:
            tell(folder)
            written = [self._put_tensors(stage, folder, _TENSORS_PREFIX, tensors), *hear()]
            files, records = ({k: v for one in written for k, v in one[i].items()} for i in range(2))
            manifest = encode_manifest(Manifest(meta, files, records))
            self._guard()
            # The last file: with it, the checkpoint counts.
            self._put(lambda: self._storage.write(os.path.join(folder, MANIFEST_NAME), manifest))

    def _put_tensors(self, stage: str | Path, folder: str, name: str, tensors: Mapping[str, tf.Tensor]) -> _Written:
        """Writes tensors into files that begin with a name, and tells which files and which tensors."""
        # In a bucket, a process that has lost its lease may still be writing: to files of its own.
        prefix = name if self._storage.is_local else f"{name}-{secrets.token_hex(4)}"
        with os_errors():
            save_tensors(os.path.join(stage, prefix), tensors)
        files: dict[str, dict[str, int]] = {}
        for file in sorted(os.listdir(stage)):
            if file.startswith(f"{prefix}."):
                local = os.path.join(stage, file)
                files[file] = measure_file(local)
                self._put(lambda local=local, file=file: self._storage.upload(local, os.path.join(folder, file)))
        return files, {n: {"dtype": value.dtype.name, "shape": value.shape.as_list()} for n, value in tensors.items()}

    def _staged(self, folder: str) -> contextlib.AbstractContextManager[str | Path]:
        """Where the files of a checkpoint are made: in its folder, or for a remote one in a temporary one."""
        return contextlib.nullcontext(folder) if self._storage.is_local else process_folder("backup")

    def _put(self, write: Callable[[], None]) -> None:
        """Writes or removes; again after a pause where a network may fail for a moment. A full disk stays full."""
        write() if self._storage.is_local else patiently(write, final=(PermissionError,))

    def _prune(self) -> None:
        try:
            self._guard()
            folders = self._look()
            names = [name for name, is_complete in folders.items() if is_complete]
            kept = [name for name in names if name not in self._damaged][-self.max_to_keep :]
            # What an earlier `write` could not finish goes, too: it may be as large as a checkpoint.
            for name in folders:
                if kept and name not in kept and checkpoint_number(name) < checkpoint_number(kept[-1]):
                    self._remove(name)
        except OSError as error:  # the new checkpoint is complete nevertheless
            warnings.warn(f"Old checkpoints in {self.directory} cannot be removed now: {error}", stacklevel=3)

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

    def _path(self, *parts: str) -> str:
        return os.path.join(self.directory, *parts)


def save_tensors(prefix: str, tensors: Mapping[str, tf.Tensor]) -> None:
    """Writes tensors to `<prefix>.index` and `<prefix>.data-00000-of-00001`, without holding Python's lock."""
    if not tensors:
        return
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=list(tensors),
            shape_and_slices=[""] * len(tensors),
            tensors=list(tensors.values()),
        )


class _Tensors(Mapping[str, Any]):
    """Tensors of a checkpoint, and what reads those that are not here: all parts together are large."""

    def __init__(self, here: Mapping[str, Any], readers: Mapping[str, Any]) -> None:
        self._here, self._readers = here, readers

    def __getitem__(self, name: str) -> Any:
        if name in self._here:
            return self._here[name]
        with os_errors():
            return self._readers[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._here, *self._readers])

    def __len__(self) -> int:
        return len(self._here) + len(self._readers)


def _load_tensors(folder: str, manifest: Manifest) -> Mapping[str, np.ndarray | tf.Tensor]:
    """Reads what `save_tensors` wrote; strings come as arrays of `bytes` objects, variants as tensors.

    Rows of sharded variables are read when they are asked for.

    Raises:
        OSError: If they cannot be read.
        ValueError: If the verified files do not hold the tensors of their manifest.
    """
    if not manifest.tensors:
        return {}
    # In a bucket, each writer has a name of its own; several processes may have written.
    names = [file.removesuffix(".index") for file in manifest.files if file.endswith(".index")] or [_TENSORS_PREFIX]
    for file in (f"{name}{suffix}" for name in names for suffix in (".index", ".data-00000-of-00001")):
        if file not in manifest.files:
            raise ValueError(f"{MANIFEST_NAME} does not list {file}")
    values: dict[str, np.ndarray | tf.Tensor] = {}
    later: dict[str, Any] = {}
    with os_errors():
        readers = {name: tf.compat.v1.train.NewCheckpointReader(os.path.join(folder, name)) for name in names}
        known = {name: (r.get_variable_to_dtype_map(), r.get_variable_to_shape_map()) for name, r in readers.items()}
        for tensor, record in manifest.tensors.items():
            name = next((one for one, (dtypes, _) in known.items() if tensor in dtypes), names[0])
            reader, prefix, (dtypes, shapes) = readers[name], os.path.join(folder, name), known[name]
            found = {"dtype": dtypes[tensor].name, "shape": list(shapes[tensor])} if tensor in dtypes else None
            if found != record:
                raise ValueError(f"{MANIFEST_NAME} lists a tensor {ascii(tensor)[:60]}, which {name}.index has not")
            if tensor.startswith(ROWS):
                later[tensor] = reader
            elif dtypes[tensor] == tf.variant:
                with tf.device("CPU:0"):
                    (values[tensor],) = tf.raw_ops.RestoreV2(
                        prefix=prefix, tensor_names=[tensor], shape_and_slices=[""], dtypes=[tf.variant]
                    )
            else:
                value = reader.get_tensor(tensor)
                # NumPy's own type for bytes would drop zeros at their end.
                values[tensor] = np.array(value, dtype=object) if isinstance(value, bytes) else np.asarray(value)
    return _Tensors(values, later) if later else values


class SharedStore:
    """A `CheckpointStore` that all processes of a job use, and no other job at the same time.

    Args:
        directory: its folder; the chief's is used.
        max_to_keep: how many checkpoints stay.
        strategy: of the job.

    Attributes:
        directory: its folder.
    """

    def __init__(self, directory: str, max_to_keep: int, strategy: tf.distribute.Strategy):
        self._strategy = strategy
        self._peers = peers = hooks_of(strategy).peers
        self._lock: FolderLock | FolderLease | None = None
        self._problem: OSError | FolderInUseError | None = None
        self.directory = absolute(directory)
        self._is_chief = peers is None or peers.rank == 0
        if not self._is_chief:
            return
        try:
            self._lock = _hold(self.directory)
            self._store = CheckpointStore(self.directory, max_to_keep, guard=self._lock.check)
        except FolderInUseError as error:
            self._problem = error
        except OSError as error:
            expected = advice_for(directory) if scheme_of(directory) else "Pass another backup_dir."
            self._problem = OSError(
                f"BackupAndRestore cannot use its folder. Received: backup_dir {directory!r}: {error}. Expected: a "
                f"folder that this process can make and write to. {expected}"
            )

    def write(self, meta: Mapping[str, Any], take: Callable[[], Mapping[str, Any]], number: int | None = None) -> str:
        """See `CheckpointStore.write`, of the tensors that `take` returns; on the chief only.

        With a number, the others call `write_part` with the same one.
        """
        if number is None:
            return self._store.write(meta, take())
        told: list[str] = []

        def tell(folder: str) -> None:
            told.append(folder)
            self._peers.tell(f"{_PARTS}/{number}", folder)

        def hear() -> list[_Written]:
            return [self._part_of(rank, number) for rank in range(1, len(self._peers.names))]

        try:
            return self._store._write(meta, take(), tell, hear)
        finally:
            if not told:
                self.skip(number)

    def check_that_all_see(self) -> None:
        """Makes sure that each process can write its parts where the chief writes.

        Raises:
            OSError: on all processes, if one of them has another folder there, or may not write to it.
        """
        if self._peers is None or scheme_of(self.directory):
            return
        marker, purpose = os.path.join(self.directory, f".seen-{secrets.token_hex(4)}"), "look where backups lie"
        problems: list[OSError] = []
        if self._is_chief:
            with _noted(problems):
                Path(marker).touch()
        marker = self._peers.gather("backup-marker", marker, purpose)[0]
        own = Path(f"{marker}-{self._peers.rank}")
        with _noted(problems):
            os.stat(marker)
            own.touch()
            own.unlink()
        texts = self._peers.gather("backup-seen", str(problems[0]) if problems else "", purpose)
        if self._is_chief:
            Path(marker).unlink(missing_ok=True)
        for name, text in zip(self._peers.names, texts, strict=True):
            if text:
                raise OSError(
                    f"Received: backup_dir {os.path.dirname(marker)}, where {name} cannot write beside the chief: "
                    f"{text}. Expected: a folder that all processes share, as each writes its parts of the weights."
                )

    def skip(self, number: int) -> None:
        """Lets nobody write parts of this number; on the chief only."""
        self._peers.tell(f"{_PARTS}/{number}", None)

    def write_part(self, number: int, take: Callable[[], Mapping[str, tf.Tensor]]) -> None:
        """Writes what this process has of a checkpoint; not on the chief, whom it tells of an error."""
        waits_for = "begin to write a backup"
        folder = self._peers.hear(f"{_PARTS}/{number}", 0, waits_for, within=self._peers.timeout)
        if folder is None:
            return
        answer: Any = None
        try:
            store = CheckpointStore(os.path.dirname(folder), writer=False)
            if store._storage.is_local and not os.path.isdir(folder):
                raise OSError(f"{folder} is not there. Expected: a folder that all processes share.")
            with store._staged(folder) as stage:
                answer = store._put_tensors(stage, folder, f"rank-{self._peers.rank}", take())
        except Exception as error:
            answer = str(error)
        self._peers.tell(f"{_PARTS}/{number}/{self._peers.rank}", answer)

    def _part_of(self, rank: int, number: int) -> _Written:
        key, waits_for = f"{_PARTS}/{number}/{rank}", "write its part of a backup"
        answer = self._peers.hear(key, rank, waits_for, within=self._peers.timeout)
        self._peers.forget(key)
        if isinstance(answer, str):
            raise OSError(f"{self._peers.names[rank]}: {answer}")
        return answer

    def clear(self) -> None:
        """See `CheckpointStore.clear`; on the chief only. A disk that fails at the end costs no training."""
        try:
            self._store.clear()
        except OSError as error:
            # Those of another training are not to be removed.
            advice = "" if isinstance(error, FolderLostError) else " Remove them before you train there again."
            warnings.warn(
                f"The backups in {self.directory} cannot be removed: {error}.{advice}", RuntimeWarning, stacklevel=2
            )

    def release(self) -> None:
        """Lets other jobs have the folder."""
        for key in [key for key, lock in _held.items() if lock is self._lock]:
            _held.pop(key).release()

    def newest(self, prefer: Callable[[dict], bool]) -> Checkpoint | None:
        """The newest valid checkpoint, preferably a wanted one. All processes get the same.

        Raises:
            FolderInUseError: on all processes, if another job has the folder.
            OSError: on all processes, if the folder cannot be made, written to or read.
            UnknownFormatError: on all processes, if another version of tfdist wrote the checkpoint.
            DamagedBackupsError: on all processes, if there are none but damaged ones.
            ValueError: on all processes, if the chief has none, but another process has.
        """
        found, answer = None, {}
        try:
            if self._problem is not None:
                raise self._problem
            if self._is_chief:
                found = self._store.newest(prefer)
                answer = {"name": found and found.name}
                if found is not None and self._peers is not None:
                    answer["digest"] = self._store._digest_of(found.name)
            elif not scheme_of(self.directory):
                answer = {"there": committed_checkpoints(self.directory)[-1:], "folder": self.directory}
        except tuple(_PROBLEMS.values()) as error:
            answer = {"problem": next(name for name, kind in _PROBLEMS.items() if isinstance(error, kind))}
            answer["text"] = str(error)
        answer, *others = [answer] if self._peers is None else self._peers.gather("backup", answer, "choose a backup")
        if others and "problem" not in answer and answer["name"] is None:
            chief, *names = self._peers.names
            for name, other in zip(names, others, strict=True):
                if "problem" in other:
                    answer = {
                        "problem": "disk",
                        "text": f"Received: no backup of {chief}, and {name}, which may have one, cannot read its "
                        f"folder: {other['text']}. Expected: a folder that it can read; start again then.",
                    }
                elif other.get("there"):
                    answer = {
                        "problem": "elsewhere",
                        "text": f"Received: no backup in {self.directory} of {chief}, which writes them, but one of "
                        f"{name} in {other['folder']}. Expected: the chief where the backups are. Copy the folder to "
                        "the chief's disk, or use one that all processes share; to start over, delete it.",
                    }
        if "problem" in answer:
            if self._peers is not None:
                self._peers.acknowledge("backup-problem", "hear why there is no backup")
            error = _PROBLEMS[answer["problem"]](answer["text"])
            raise is_final(error) if answer["problem"] in _FINAL else error
        return found if self._peers is None or answer["name"] is None else self._by_all(found, answer)

    def _by_all(self, found: Checkpoint | None, answer: dict[str, Any]) -> Checkpoint:
        """The chief's checkpoint on every process, which reads it if it sees the same one, or else is sent it."""
        name, is_chief = answer["name"], self._is_chief
        if found is None:
            with contextlib.suppress(ValueError, OSError):  # it is damaged or cannot be read here
                store = CheckpointStore(self.directory, writer=False)
                if store._digest_of(name) == answer["digest"]:
                    found = store.open(name)
        if all(self._peers.gather("backup-found", found is not None, "open the backup")):
            return found
        problems: list[OSError] = []
        with contextlib.ExitStack() as stack:
            sizes, place = {}, Path()
            with _noted(problems):
                folder = stack.enter_context(self._store._local_copy(name) if is_chief else process_folder("backup"))
                place = Path(folder) if is_chief else Path(folder, name)
                place.mkdir(exist_ok=True)
                sizes = {path.name: path.stat().st_size for path in place.iterdir()}
            self._fail_together(problems)
            sizes = self._peers.gather("backup-files", sizes, "send the backup")[0]
            for file, size in sizes.items():
                for at in range(0, max(size, 1), _PIECE):
                    own = b"" if is_chief else None
                    with _noted(problems):
                        own = _piece(place / file, at) if is_chief else None
                    piece = broadcast_bytes(self._strategy, self._peers, own)
                    with _noted(problems):
                        if not is_chief:
                            _append(place / file, piece)
            self._fail_together(problems)
            copy = found or CheckpointStore(folder, writer=False).open(name)
            return Checkpoint(name, copy.meta, dict(copy.tensors))

    def _fail_together(self, problems: list[OSError]) -> None:
        """Raises what is wrong on one process on all of them."""
        texts = self._peers.gather("backup-sent", str(problems[0]) if problems else "", "send the backup")
        for name, text in zip(self._peers.names, texts, strict=True):
            if text:
                raise OSError(f"The backup could not be sent to all processes. Received: {name}: {text}")


@contextlib.contextmanager
def _noted(problems: list[OSError]) -> Iterator[None]:
    """Goes on after an error of the disk, as the other processes do, which do not know of it yet."""
    try:
        yield
    except OSError as error:
        problems.append(error)


def _piece(path: Path, at: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(at)
        return file.read(_PIECE)


def _append(path: Path, piece: bytes) -> None:
    with open(path, "ab") as file:
        file.write(piece)


# A fit that failed has released nothing; the next one in the same process may go on with its folder.
_held: dict[tuple[int, str], FolderLock | FolderLease] = {}


def _hold(directory: str) -> FolderLock | FolderLease:
    """Locks a folder, which is made if it does not exist; of a remote one it takes a lease, once it can be written."""
    key = os.getpid(), directory if scheme_of(directory) else os.path.realpath(directory)
    if key in _held:
        _held[key].check()
    elif scheme_of(directory):
        storage = storage_of(directory)
        check_writable(storage, directory)
        _held[key] = FolderLease(storage, directory)
    else:
        os.makedirs(directory, exist_ok=True)
        _held[key] = FolderLock(directory)
    return _held[key]


_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


def is_final(error: BaseException) -> BaseException:
    """Makes the program end with exit code 78 if it does not catch an exception.

    `tfdist run` and `tfdist submit` do not start it again then.

    Args:
        error: the exception, which is about to be raised.

    Example:
        >>> raise is_final(RuntimeError("another training writes there"))  # doctest: +SKIP
    """
    sys.excepthook = functools.partial(_show, error, sys.excepthook)
    error._tfdist_exit_code = REFUSED  # for who catches it in place of Python: `tfdist.launch`
    return error


def _show(
    final: BaseException, before: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """In place of `sys.excepthook`."""
    before(kind, error, trace)
    if error is final:
        EventLog.from_environment().write("refused", reason=str(error), exit_code=REFUSED)
        end(REFUSED)
