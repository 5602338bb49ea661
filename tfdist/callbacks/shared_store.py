"""The store of backups as all processes of a job see it: the chief chooses and writes, everybody reads the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.callbacks.damage import DamagedBackups, DamagedCheckpoint
from tfdist.callbacks.folder_lock import FolderInUse, FolderLock
from tfdist.callbacks.refusal import is_final
from tfdist.callbacks.store import Checkpoint, CheckpointStore
from tfdist.strategies.peers import Peers


class SharedStore:
    """A `CheckpointStore` that all processes of a job use, and no other job at the same time.

    Args:
        directory: its folder; every process must be able to read it.
        keep: how many checkpoints stay.
        peers: the processes of the job; `None` for a single one.

    Attributes:
        directory: its folder.
    """

    everybody_writes = False

    def __init__(self, directory: str, keep: int, peers: Peers | None):
        self._peers = peers
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
            ValueError: on all processes, if one of them does not find what the chief has found.
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
                answer = {"name": found and found.name}
            except DamagedBackups as error:
                answer = {"reasons": error.reasons}
        answer = self._peers.gather("backup", answer, "choose a backup")[0]
        if "problem" in answer:
            self._peers.acknowledge("backup-folder", "hear that the folder cannot be used")
            raise is_final(FolderInUse(answer["problem"])) if answer["in use"] else OSError(answer["problem"])
        if "reasons" in answer:
            self._peers.acknowledge("backup-damaged", "hear that all backups are damaged")
            raise DamagedBackups(self.directory, answer["reasons"])
        name, problem = answer["name"], None
        if name is not None and self._peers.rank != 0:
            try:
                found = self._store.open(name)
            except DamagedCheckpoint as error:
                problem = f"in {error.folder}, {error.reason}"
        problems = self._peers.gather("backup-found", problem, "open the backup")
        for rank, problem in enumerate(problems):
            if problem is not None:
                self._peers.acknowledge("backup-missing", "hear that a backup is missing")
                raise ValueError(
                    f"{self._peers.names[0]} resumes from {name}, but {self._peers.names[rank]} cannot: {problem}. "
                    "Expected: a backup folder on a file system that all workers share."
                )
        return found


def _lock(directory: str) -> FolderLock | None:
    """Locks a folder, which is made if it does not exist; `None` for one that is not local."""
    path = directory.removeprefix("file://")
    if "://" in path:
        return None
    os.makedirs(path, exist_ok=True)
    return FolderLock(path)
