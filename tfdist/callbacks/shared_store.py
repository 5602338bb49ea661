"""The store of backups as all processes of a job see it: the chief chooses and writes, everybody reads the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfdist.callbacks.damage import DamagedBackups, DamagedCheckpoint
from tfdist.callbacks.store import Checkpoint, CheckpointStore
from tfdist.strategies.peers import Peers


class SharedStore:
    """A `CheckpointStore` that all processes of a job use.

    Args:
        directory: its folder; every process must be able to read it.
        keep: how many checkpoints stay.
        peers: the processes of the job; `None` for a single one.
    """

    def __init__(self, directory: str, keep: int, peers: Peers | None):
        self._peers = peers
        self._store = CheckpointStore(directory, keep, writer=peers is None or peers.rank == 0)

    @property
    def directory(self) -> str:
        """Its folder."""
        return self._store.directory

    def write(self, meta: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
        """See `CheckpointStore.write`; on the chief only."""
        return self._store.write(meta, tensors)

    def clear(self) -> None:
        """See `CheckpointStore.clear`; on the chief only."""
        self._store.clear()

    def newest(self, prefer: Callable[[dict], bool]) -> Checkpoint | None:
        """The newest valid checkpoint, of those that are wanted if there are any; on all processes the same.

        Raises:
            DamagedBackups: on all processes, if the chief finds none but damaged ones.
            ValueError: on all processes, if one of them does not find what the chief has found.
        """
        if self._peers is None:
            return self._store.newest(prefer)
        found: Checkpoint | None = None
        answer: dict[str, Any] = {}
        if self._peers.rank == 0:
            try:
                found = self._store.newest(prefer)
                answer = {"name": found and found.name}
            except DamagedBackups as error:
                answer = {"reasons": error.reasons}
        answer = self._peers.gather("backup", answer, "choose a backup")[0]
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
