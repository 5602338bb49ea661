"""What a launcher offers its processes to tell each other something: here, where rank 0 can be met.

A channel is opened by all processes of a job; rank 0 then calls `tell(text, seconds)`, the others `hear(seconds)`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol

from tfdist.cluster.channels import mpi4py_broadcast
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership


class Channel(Protocol):
    """Carries one text, of up to 1000 characters, from rank 0 to all others."""

    def tell(self, text: str, seconds: float) -> None:
        """Called by rank 0."""

    def hear(self, seconds: float) -> str:
        """Called by the others.

        Raises:
            ClusterError: if nothing comes.
        """


def open_channel(membership: Membership, env: Mapping[str, str]) -> Channel:
    """The channel of the system that has started this process.

    Raises:
        ClusterError: if it has none, or it does not work.
    """
    problem = "has no means to tell it"
    mpi = mpi4py_broadcast.initialized()
    if mpi is not None and membership.channel in ("pmi", "pmix"):
        return mpi4py_broadcast.Broadcast(mpi)
    if membership.channel is not None:
        module = importlib.import_module(f"{__name__}.{membership.channel}")
        try:
            return module.open_channel(membership, env)
        except OSError as error:
            problem = f"does not tell it here: {error}"
    by_mpirun = " (`mpirun -x TFDIST_MEETING=node-1 ...`)" if membership.channel is not None else ""
    raise ClusterError(
        f"Received: {membership}, without the host of rank 0: {membership.source} {problem}. Expected: "
        f"TFDIST_MEETING with that host's name or address, on all processes{by_mpirun}"
    )
