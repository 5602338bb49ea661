"""Backups of an elastic job: every process has its own in memory, and whoever has rank 0 gives its to the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdist.callbacks.shared_store import SharedStore
from tfdist.callbacks.store import Checkpoint, CheckpointStore
from tfdist.strategies.horovod.elastic import Members


class ElasticStore:
    """A store that outlives every process but the last one.

    Args:
        horovod: the module `horovod.tensorflow`, initialized.
        members: tells of processes that come.
        folder: in memory.
        disk: where backups are kept besides, for the loss of all processes; `None` for nowhere.

    Attributes:
        directory: the folder on disk, or in memory.
    """

    everybody_writes = True

    def __init__(self, horovod: Any, members: Members, folder: str, disk: SharedStore | None):
        self._horovod, self._members, self._disk = horovod, members, disk
        self._own = CheckpointStore(folder, keep=1)
        self.directory = disk.directory if disk else folder

    def write(self, meta: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
        """See `CheckpointStore.write`; on every process."""
        name = self._own.write(meta, tensors)
        if self._disk is not None and self._horovod.rank() == 0:
            self._disk.write(meta, tensors)
        return name

    def newest(self, prefer: Callable[[dict], bool]) -> Checkpoint | None:
        """Rank 0's, on all processes; that on disk if rank 0 has none.

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
        files = {path.name: path.read_bytes() for path in self._folder(name).iterdir()} if name else {}
        name, files = self._horovod.broadcast_object((name, files))
        if name is None:
            return self._disk.newest(prefer) if self._disk else None
        if self._horovod.rank() != 0:
            self._own.clear()
            self._folder(name).mkdir()
            for file, content in files.items():
                (self._folder(name) / file).write_bytes(content)
        return self._own.open(name)

    def begin_together(self, state: Any) -> None:
        """Gives all processes what rank 0 has, where nothing was saved.

        Args:
            state: the `TrainingState`.
        """
        values = {name: value.numpy() for name, value in state.snapshot(with_metrics=False).items()}
        state.load(self._horovod.broadcast_object(values))

    def saved(self) -> None:
        """Comes to all processes after each backup.

        Raises:
            MembersChanged: if others are to take part.
        """
        self._members.check()

    def clear(self) -> None:
        """See `CheckpointStore.clear`; of what is on disk."""
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

    def _folder(self, name: str) -> Path:
        return Path(self._own.directory, name)
