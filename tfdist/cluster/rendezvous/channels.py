"""Channels: how rank 0 lets the others know where it can be met, where the launcher does not tell it.

Where the program has imported mpi4py, MPI broadcasts it; otherwise rank 0 writes it into a file in the home folder,
which the hosts of a cluster usually share. Rank 0 calls `tell` once, and `close` when all have met; the others `hear`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership
from tfdist.cluster.rendezvous import endpoints

# What a channel carries, in bytes.
_ROOM = 2048
_BROADCAST_PAUSE_SECONDS = 0.01
_FILE_PAUSE_SECONDS = 0.05
# Options of the daemons that Hydra starts on each host: those of MPICH, and those of Intel MPI.
_HYDRA = ("--control-port", "--upstream-host", "--upstream-port")


def open_channel(membership: Membership, env: Mapping[str, str]) -> Broadcast | HomeFile:
    """The channel of the system that has started this process.

    Raises:
        ClusterError: If it has none.
    """
    if membership.has_channel:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            return Broadcast(mpi)
        if name := endpoints.name_of(membership, env) or _of_hydra():
            return HomeFile(name)
    by_mpirun = " (`mpirun -x TFDIST_MEETING=node-1 ...`)" if membership.has_channel else ""
    raise ClusterError(
        f"Received: {membership}, without the host of rank 0: {membership.source} has no means to tell it. Expected: "
        f"TFDIST_MEETING with that host's name or address, on all processes{by_mpirun}"
    )


class Broadcast:
    """MPI's own broadcast, where the program has imported mpi4py already.

    Args:
        mpi: The module `mpi4py.MPI`.
    """

    def __init__(self, mpi: Any):
        self._world = mpi.COMM_WORLD

    def tell(self, text: str, seconds: float) -> None:
        """Called by rank 0, once."""
        self._broadcast(text.encode().ljust(_ROOM), seconds)

    def hear(self, seconds: float) -> str:
        """What rank 0 tells; called by the others."""
        return self._broadcast(bytes(_ROOM), seconds).decode(errors="replace").rstrip()

    def close(self) -> None:
        """There is nothing to remove."""

    def _broadcast(self, text: bytes, seconds: float) -> bytes:
        buffer = bytearray(text)
        request = self._world.Ibcast(buffer, root=0)
        deadline = time.monotonic() + seconds
        while not request.Test():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"Received: no broadcast through MPI within {seconds:.3g} s. Expected: one as soon as all "
                    "processes have imported mpi4py and come to this point; see what each has printed"
                )
            time.sleep(_BROADCAST_PAUSE_SECONDS)
        return bytes(buffer)


class HomeFile:
    """A file in the home folder that only this user can read; `tell` writes it, and it is gone when all have met.

    Args:
        name: Differs from that of every other job.
        home: The home folder.

    Raises:
        ClusterError: If there is no home folder.
    """

    def __init__(self, name: str, home: Path | None = None):
        try:
            folder = (home or Path.home()) / ".config" / "tfdist" / "meetings"
        except RuntimeError as error:
            raise ClusterError(f"Received: {error} Expected: TFDIST_MEETING with the host of rank 0") from None
        self._path = folder / hashlib.sha256(name.encode()).hexdigest()[:32]

    def tell(self, text: str, seconds: float) -> None:
        """Called by rank 0, once."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = self._path.with_suffix(".part")
            part.unlink(missing_ok=True)
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
            part.replace(self._path)
        except OSError as error:
            raise ClusterError(
                f"Received: {self._path}, which cannot be written ({error.strerror}). Expected: a home folder where "
                "rank 0 can leave its address; or TFDIST_MEETING with its host, on all processes"
            ) from None

    def hear(self, seconds: float) -> str:
        """What rank 0 tells; called by the others."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                return self._path.read_text(errors="replace")[:_ROOM]
            time.sleep(_FILE_PAUSE_SECONDS)
        raise ClusterError(
            f"Received: nothing from rank 0 within {seconds:.3g} s, in {self._path}. Expected: where it can be met. "
            "See what rank 0 has printed; if the hosts do not share their home folders, set TFDIST_MEETING to the host "
            "of rank 0, or import mpi4py.MPI first"
        )

    def close(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)


def _of_hydra() -> str:
    """What tells a job of Hydra's mpiexec (MPICH, Intel MPI) from all others: where its daemons reach mpiexec."""
    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            words = parent.cmdline()
            found = [after for word, after in itertools.pairwise(words) if word in _HYDRA]
            if found:
                return " ".join(["hydra", *found])
    return ""
