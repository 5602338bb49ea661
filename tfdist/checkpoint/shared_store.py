"""The backups of a job, as all of its processes see them: one process chooses the backup, and all read the same.

`SharedStore` has them in a folder to which the chief writes, local or in a bucket. The others need not see it: whoever
finds there what the chief has found reads it, and the chief sends it to all others. `ElasticStore` has them in the
memory of every process.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdist.checkpoint.fit_identity import is_final
from tfdist.checkpoint.folder_lock import FolderInUseError, FolderLock
from tfdist.checkpoint.manifest import DamagedBackupsError, DamagedCheckpointError, UnknownFormatError, read_file
from tfdist.checkpoint.remote.lease import FolderLease, LeaseLostError
from tfdist.checkpoint.store import Checkpoint, CheckpointStore
from tfdist.runtime.elastic import Members
from tfdist.steps.collectives import broadcast_bytes
from tfdist.storage.patience import patiently
from tfdist.storage.probe import check_writable
from tfdist.storage.selection import advice_for, scheme_of, storage_of

# What keeps all processes from beginning, by its name in a message. Only a disk may be better another time.
_PROBLEMS: dict[str, type[Exception]] = {"in use": FolderInUseError, "format": UnknownFormatError, "disk": OSError}


def _name_of(problem: Exception) -> str:
    return next(name for name, kind in _PROBLEMS.items() if isinstance(problem, kind))


def _error(name: str, text: str) -> BaseException:
    error = _PROBLEMS[name](text)
    return error if name == "disk" else is_final(error)


class SharedStore:
    """A `CheckpointStore` that all processes of a job use, and no other job at the same time.

    Args:
        directory: its folder, on each process by itself; the chief's is used.
        max_to_keep: how many checkpoints stay.
        strategy: of the job.

    Attributes:
        directory: its folder.
    """

    everybody_writes = False

    def __init__(self, directory: str, max_to_keep: int, strategy: tf.distribute.Strategy):
        self._strategy = strategy
        self._peers = peers = getattr(strategy, "_peers", None)
        self._lock: FolderLock | FolderLease | None = None
        self._problem: OSError | FolderInUseError | None = None
        self._is_remote = bool(scheme_of(directory))
        is_chief = peers is None or peers.rank == 0
        self.directory = directory.rstrip("/") if self._is_remote else directory
        try:
            if is_chief:
                self._lock = _lock(self.directory)
            guard = self._lock.check if isinstance(self._lock, FolderLease) else None
            self._store = CheckpointStore(self.directory, max_to_keep, is_chief, guard=guard)
            self.directory = self._store.directory
        except FolderInUseError as error:
            self._problem = error
        except OSError as error:
            expected = advice_for(directory) if self._is_remote else "Pass another backup_dir."
            self._problem = OSError(
                f"BackupAndRestore cannot use its folder. Received: backup_dir {directory!r}: {error}. Expected: a "
                f"folder that this process can make and write to. {expected}"
            )

    def write(self, meta: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
        """See `CheckpointStore.write`; on the chief only."""
        return self._store.write(meta, tensors)

    def begin_together(self, state: Any) -> None:
        """Does nothing: the processes have begun with the same state."""

    def saved(self) -> None:
        """Does nothing: the processes stay the same."""

    def finished(self) -> None:
        """Does nothing: the folder is that of one fit."""

    def clear(self) -> None:
        """See `CheckpointStore.clear`; on the chief only. A bucket that fails at the end costs no training."""
        try:
            self._store.clear()
        except OSError as error:
            if not self._is_remote:
                raise
            # Those of another training are not to be removed.
            advice = "" if isinstance(error, LeaseLostError) else " Remove them before you train anew there."
            warnings.warn(
                f"The backups in {self.directory} cannot be removed: {error}.{advice}", RuntimeWarning, stacklevel=2
            )

    def release(self) -> None:
        """Lets other jobs have the folder."""
        if self._lock is not None:
            self._lock.release()

    def newest(self, prefer: Callable[[dict], bool]) -> Checkpoint | None:
        """The newest valid checkpoint, preferably a wanted one. All processes get the same.

        Raises:
            FolderInUseError: on all processes, if another job has the folder.
            OSError: on all processes, if the folder cannot be made, written to or read.
            UnknownFormatError: on all processes, if another version of tfdist wrote the checkpoint.
            DamagedBackupsError: on all processes, if the chief finds none but damaged ones.
            ValueError: on all processes, if the chief has none, but another process has.
        """
        if self._peers is None:
            if self._problem is not None:
                raise _error(_name_of(self._problem), str(self._problem))
            try:
                return self._store.newest(prefer)
            except UnknownFormatError as error:
                raise is_final(error) from None
        found, answer = self._look(prefer)
        answer, *others = self._peers.gather("backup", answer, "choose a backup")
        if "problem" in answer:
            self._peers.acknowledge("backup-folder", "hear that the folder cannot be used")
            raise _error(answer["problem"], answer["text"])
        if "reasons" in answer:
            self._peers.acknowledge("backup-damaged", "hear that all backups are damaged")
            raise DamagedBackupsError(self.directory, answer["reasons"])
        if answer["name"] is None:
            self._check_that_nobody_has_one(answer["directory"], others)
            return None
        return self._by_all(found, answer["name"], answer["fingerprint"])

    def _look(self, prefer: Callable[[dict], bool]) -> tuple[Checkpoint | None, dict[str, Any]]:
        """The chief's checkpoint, and what this process tells the others."""
        try:
            if self._problem is not None:
                raise self._problem
            if self._peers.rank != 0:
                # All see the same bucket.
                there = [] if self._is_remote else self._store.names()[-1:]
                return None, {"there": there, "directory": self.directory}
            found = self._store.newest(prefer)
            fingerprint = found and fingerprint_of(self._store, found.name)
            return found, {"name": found and found.name, "fingerprint": fingerprint, "directory": self.directory}
        except DamagedBackupsError as error:
            return None, {"reasons": error.reasons}
        except tuple(_PROBLEMS.values()) as error:
            return None, {"problem": _name_of(error), "text": str(error), "directory": self.directory}

    def _check_that_nobody_has_one(self, directory: str, others: list[dict]) -> None:
        names = self._peers.names
        for rank, other in enumerate(others, start=1):
            if "problem" in other:
                self._peers.acknowledge("backup-unknown", "hear that a folder cannot be read")
                raise OSError(
                    f"Received: no backup in {directory} of {names[0]}, and {other['directory']} of {names[rank]}, "
                    f"which may have one, cannot be read: {other['text']}. Start again once it can be read."
                )
            if other.get("there"):
                self._peers.acknowledge("backup-elsewhere", "hear that another process has a backup")
                chief = names[0]
                raise is_final(
                    ValueError(
                        f"Received: no backup in {directory} of {chief}, which writes them, but {other['there'][0]} "
                        f"in {other['directory']} of {names[rank]}. Expected: the chief where the backups are. Copy "
                        "the folder to the chief's disk, or use one that all processes share; to begin anew, delete it."
                    )
                )

    def _by_all(self, found: Checkpoint | None, name: str, fingerprint: str) -> Checkpoint:
        """The chief's checkpoint on every process, which reads it from its own disk, or is sent it."""
        if self._peers.rank != 0:
            with contextlib.suppress(DamagedCheckpointError, UnknownFormatError, OSError):
                if fingerprint_of(self._store, name) == fingerprint:
                    found = self._store.open(name)
        if all(self._peers.gather("backup-found", found is not None, "open the backup")):
            return found
        content = problem = None
        if self._peers.rank == 0:
            try:
                with self._store._local_copy(name) as folder:
                    content = packed(folder)
            except OSError as error:
                problem = f"The checkpoint {self.directory}/{name} cannot be read: {error}. Start again once it can."
        self._fail_together("backup-read", problem, "read the backup")
        content = broadcast_bytes(self._strategy, self._peers, content)
        if found is None:
            try:
                found = _unpacked(content, name)
            except (OSError, ValueError) as error:
                problem = f"{self._peers.names[self._peers.rank]} cannot take over the backup of the chief: {error}"
        self._fail_together("backup-taken", problem, "take over the backup")
        return found

    def _fail_together(self, topic: str, problem: str | None, purpose: str) -> None:
        """Raises `OSError` on all processes, if one of them has a problem."""
        problems = list(filter(None, self._peers.gather(topic, problem, purpose)))
        if problems:
            self._peers.acknowledge(f"{topic}-failed", "hear what has failed")
            raise OSError(problems[0])


class ElasticStore:
    """Backups of an elastic job: every process keeps its own in memory, so that they outlive all but the last process.

    Rank 0 sends its backup to the processes that have come since.

    Args:
        horovod: the module `horovod.tensorflow`, initialized.
        members: tells of processes that come.
        folder: in memory.
        disk: keeps the backups too, in case all processes are lost; `None` if nothing does.

    Attributes:
        directory: the folder on disk, or in memory.
    """

    everybody_writes = True

    def __init__(self, horovod: Any, members: Members, folder: str, disk: SharedStore | None):
        self._horovod, self._members, self._disk = horovod, members, disk
        self._own = CheckpointStore(folder, max_to_keep=1)
        self.directory = disk.directory if disk else folder

    def write(self, meta: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
        """See `CheckpointStore.write`; on every process."""
        name = self._own.write(meta, tensors)
        if self._disk is not None and self._horovod.rank() == 0:
            self._disk.write(meta, tensors)
        return name

    def newest(self, prefer: Callable[[dict], bool]) -> Checkpoint | None:
        """The backup of rank 0, on all processes; the one on disk if rank 0 has none.

        Raises:
            RuntimeError: on a process that has come while the others are in a later fit.
        """
        own = self._members.fits
        fits = self._horovod.broadcast_object(own)
        if fits != own:
            raise RuntimeError(
                f"Received: a process that begins fit {own + 1} of the program while the others of the elastic job are "
                f"in fit {fits + 1}. Expected: one fit in a program whose processes come and go."
            )
        name = self._own.names()[-1] if self._horovod.rank() == 0 and self._own.names() else None
        content = packed(self._folder(name)) if name else None
        name, content = self._horovod.broadcast_object((name, content))
        if name is None:
            return self._disk.newest(prefer) if self._disk else None
        if self._horovod.rank() != 0:
            self._own.clear()
            unpack(content, self._folder(name))
        return self._own.open(name)

    def begin_together(self, state: Any) -> None:
        """Gives all processes the state of rank 0, where nothing was saved.

        Args:
            state: the `TrainingState`.
        """
        values = {name: value.numpy() for name, value in state.snapshot(with_metrics=False).items()}
        state.load(self._horovod.broadcast_object(values))

    def saved(self) -> None:
        """Called on all processes after each backup.

        Raises:
            MembersChanged: if other processes are to take part.
        """
        self._members.check()

    def clear(self) -> None:
        """Removes the backups on disk, see `CheckpointStore.clear`."""
        if self._disk is not None:
            self._disk.clear()

    def finished(self) -> None:
        """Makes room for the next fit."""
        self._own.clear()
        self._members.fits += 1

    def release(self) -> None:
        """See `SharedStore.release`."""
        if self._disk is not None:
            self._disk.release()

    def _folder(self, name: str) -> str:
        return os.path.join(self._own.directory, name)


def _lock(directory: str) -> FolderLock | FolderLease:
    """Locks a folder, which is made if it does not exist; of a remote one it takes a lease, once it can be written."""
    if scheme_of(directory):
        storage = storage_of(directory)
        check_writable(storage, directory)
        return FolderLease(storage, directory)
    path = directory.removeprefix("file://")
    os.makedirs(path, exist_ok=True)
    return FolderLock(path)


# A checkpoint's folder as bytes, for a process that does not see the disk it lies on.


def fingerprint_of(store: CheckpointStore, name: str) -> str:
    """A digest of a checkpoint's manifest, which has the checksums of all its files.

    Raises:
        OSError: If it cannot be read.
    """
    return hashlib.sha256(store._manifest_of(name)).hexdigest()


def packed(folder: str) -> bytes:
    """The files of a checkpoint in a local folder as one piece, for `unpack`.

    Raises:
        OSError: If they cannot be read.
    """
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in patiently(lambda: os.listdir(folder)):
            data = read_file(os.path.join(folder, name))
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def unpack(content: bytes, folder: str) -> None:
    """Makes a local folder of what was `packed` elsewhere.

    Raises:
        OSError: If it cannot be written.
        ValueError: If it is no pack of plain files.
    """
    os.mkdir(folder)
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                if not member.isfile() or os.path.basename(member.name) != member.name or member.name == "..":
                    raise ValueError(f"a checkpoint that was sent holds {member.name!r}, which is not a plain file")
                with open(os.path.join(folder, member.name), "wb") as file:
                    file.write(archive.extractfile(member).read())
    except tarfile.TarError as error:
        raise ValueError(f"a checkpoint that was sent is not whole: {error}") from error


def _unpacked(content: bytes, name: str) -> Checkpoint:
    with tempfile.TemporaryDirectory(prefix="tfdist-backup-") as folder:
        unpack(content, os.path.join(folder, name))
        return CheckpointStore(folder, writer=False).open(name)
