"""MPI itself, where the program has imported mpi4py already: PMI then belongs to it."""

from __future__ import annotations

import sys
import time
from typing import Any

from tfdist.cluster.errors import ClusterError

_ROOM = 2048
_PAUSE_SECONDS = 0.01


def initialized() -> Any:
    """The module `mpi4py.MPI`, if the program uses it; otherwise `None`."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


class Broadcast:
    """A broadcast from rank 0; each process of the job has to call `tell` or `hear` once.

    Args:
        mpi: the module `mpi4py.MPI`.
    """

    def __init__(self, mpi: Any):
        self._world = mpi.COMM_WORLD

    def tell(self, text: str, seconds: float) -> None:
        """See `Channel`."""
        self._broadcast(text.encode().ljust(_ROOM), seconds)

    def hear(self, seconds: float) -> str:
        """See `Channel`."""
        return self._broadcast(bytes(_ROOM), seconds).decode().rstrip()

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
            time.sleep(_PAUSE_SECONDS)
        return bytes(buffer)
