"""The store of backups as all processes of a job see it: the chief chooses and writes, everybody reads the same.

The others need not see the chief's disk. Whoever finds there what the chief has found reads it, all others are sent it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdist.callbacks import transfer
from tfdist.callbacks.damage import DamagedBackups, DamagedCheckpoint
from tfdist.callbacks.folder_lock import FolderInUse, FolderLock
from tfdist.callbacks.refusal import is_final
from tfdist.callbacks.store import Checkpoint, CheckpointStore
from tfdist.strategies.broadcast import broadcast_bytes


class SharedStore:
    """A `CheckpointStore` that all processes of a job use, and no other job at the same time.

    Args:
        directory: its folder, on each process by itself; the chief's is used.
        keep: how many checkpoints stay.
        strategy: of the job.

    Attributes:
        directory: its folder.
    """

    everybody_writes = False

    def __init__(self, directory: str, keep: int, strategy: tf.distribute.Strategy):
        self._strategy = strategy
        self._peers = peers = getattr(strategy, "peers", None)
        self._lock: FolderLock | None = None
        self._problem: OSError | FolderInUse | None = None
        is_chief = peers is None or peers.rank == 0
        try:
            if is_chief:
                self._lock = _lock(directory)
            self._store = CheckpointStore(directory, keep, writer=is_chief)
        except FolderInUse as error:
            self._problem = error
        except OSError as error:
            self._problem = OSError(
                f"BackupAndRestore cannot use its folder. Received: backup_dir {directory!r}: {error}. Expected: a "
                "folder that this process can make and write to. Pass another backup_dir."
            )
        self.directory = directory if self._problem else self._store.directory

    def write(self, meta: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
        """See `CheckpointStore.write`; on the chief only."""
        return self._store.write(meta, tensors)

    def begin_together(self, state: Any) -> None:
        """Does nothing: the processes have begun with the same."""

    def saved(self) -> None:
        """Does nothing: the processes stay the same."""

    def finished(self) -> None:
        """Does nothing: the folder is that of one fit."""

    def clear(self) -> None:
        """See `CheckpointStore.clear`; on the chief only."""
        self._store.clear()

    def release(self) -> None:
        """Lets other jobs have the folder."""
        if self._lock is not None:
            self._lock.release()

    def newest(self, prefer: Callable[[dict], bool]) -> Checkpoint | None:
        """The newest valid checkpoint, of those that are wanted if there are any; on all processes the same.

        Raises:
            FolderInUse: on all processes, if another job has the folder.
            OSError: on all processes, if the folder cannot be made or written to.
            DamagedBackups: on all processes, if the chief finds none but damaged ones.
            ValueError: on all processes, if the chief has none, but another process has.
        """
        if self._peers is None:
            if isinstance(self._problem, FolderInUse):
                raise is_final(self._problem)
            if self._problem is not None:
                raise self._problem
            return self._store.newest(prefer)
        found: Checkpoint | None = None
        answer: dict[str, Any] = {}
        if self._problem is not None:
            answer = {"in use": isinstance(self._problem, FolderInUse), "problem": str(self._problem)}
        elif self._peers.rank == 0:
            try:
                found = self._store.newest(prefer)
                fingerprint = found and transfer.fingerprint(self._path(found.name))
                answer = {"name": found and found.name, "fingerprint": fingerprint, "directory": self.directory}
            except DamagedBackups as error:
                answer = {"reasons": error.reasons}
        else:
            answer = {"there": self._store.names()[-1:], "directory": self.directory}
        answer, *others = self._peers.gather("backup", answer, "choose a backup")
        if "problem" in answer:
            self._peers.acknowledge("backup-folder", "hear that the folder cannot be used")
            raise is_final(FolderInUse(answer["problem"])) if answer["in use"] else OSError(answer["problem"])
        if "reasons" in answer:
            self._peers.acknowledge("backup-damaged", "hear that all backups are damaged")
            raise DamagedBackups(self.directory, answer["reasons"])
        if answer["name"] is None:
            self._check_that_nobody_has_one(answer["directory"], others)
            return None
        return self._by_all(found, answer["name"], answer["fingerprint"])

    def _check_that_nobody_has_one(self, directory: str, others: list[dict]) -> None:
        for rank, other in enumerate(others, start=1):
            if other.get("there"):
                self._peers.acknowledge("backup-elsewhere", "hear that another process has a backup")
                chief, names = self._peers.names[0], self._peers.names
                raise is_final(
                    ValueError(
                        f"Received: no backup in {directory} of {chief}, which writes them, but {other['there'][0]} "
                        f"in {other['directory']} of {names[rank]}. Expected: the chief where the backups are. Copy "
                        "the folder to the chief's disk, or use one that all processes share; to begin anew, delete it."
                    )
                )

    def _by_all(self, found: Checkpoint | None, name: str, fingerprint: str) -> Checkpoint:
        """What the chief has found, on every process: read there if it is on its disk as well, or sent to it."""
        if self._peers.rank != 0:
            with contextlib.suppress(DamagedCheckpoint, OSError):
                if transfer.fingerprint(self._path(name)) == fingerprint:
                    found = self._store.open(name)
        if all(self._peers.gather("backup-found", found is not None, "open the backup")):
            return found
        content = transfer.packed(self._path(name)) if self._peers.rank == 0 else None
        content = broadcast_bytes(self._strategy, self._peers, content)
        if found is not None:
            return found
        with tempfile.TemporaryDirectory(prefix="tfdist-backup-") as folder:
            transfer.unpack(content, os.path.join(folder, name))
            return CheckpointStore(folder, writer=False).open(name)

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)


def _lock(directory: str) -> FolderLock | None:
    """Locks a folder, which is made if it does not exist; `None` for one that is not local."""
    path = directory.removeprefix("file://")
    if "://" in path:
        return None
    os.makedirs(path, exist_ok=True)
    return FolderLock(path)
