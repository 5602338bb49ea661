"""Channels: by what means a launcher lets rank 0 tell the other processes where it can be met.

Horovod's store and MPI's broadcast are here; PMI and PMIx, which MPI's launchers serve, have a module of their own.
"""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership
from tfdist.cluster.rendezvous.pmi import PmiChannel, PmixChannel
from tfdist.cluster.variables import number

# Of Horovod's store.
_PATH = "/tfdist/meeting"
_REQUEST_SECONDS = 10.0
_STORE_PAUSE_SECONDS = 0.2
# What MPI's broadcast carries, and the most that is read from Horovod's store, in bytes.
_ROOM = 2048
_BROADCAST_PAUSE_SECONDS = 0.01


class Channel(Protocol):
    """Carries one text, of up to 1000 characters, from rank 0 to all others; all processes open it.

    Rank 0 then calls `tell` once, each of the others `hear`.
    """

    def tell(self, text: str, seconds: float) -> None:
        """Called by rank 0."""

    def hear(self, seconds: float) -> str:
        """Called by the others.

        Raises:
            ClusterError: If nothing comes.
        """


def open_channel(membership: Membership, env: Mapping[str, str]) -> Channel:
    """The channel of the system that has started this process.

    Raises:
        ClusterError: If it has none, or it does not work.
    """
    problem = "has no means to tell it"
    if membership.channel == "horovod_store":
        return HorovodStore(env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], number(env, "HOROVOD_GLOO_RENDEZVOUS_PORT"))
    if membership.channel is not None:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            return Broadcast(mpi)  # PMI then belongs to MPI
        try:
            return PmixChannel() if membership.channel == "pmix" else PmiChannel.from_environment(env)
        except OSError as error:
            problem = f"does not tell it here: {error}"
    by_mpirun = " (`mpirun -x TFDIST_MEETING=node-1 ...`)" if membership.channel is not None else ""
    raise ClusterError(
        f"Received: {membership}, without the host of rank 0: {membership.source} {problem}. Expected: "
        f"TFDIST_MEETING with that host's name or address, on all processes{by_mpirun}"
    )


class HorovodStore:
    """The key-value store of Horovod's launcher: `PUT` and `GET` over HTTP.

    Args:
        host: That of the launcher.
        port: That of its store.
    """

    def __init__(self, host: str, port: int):
        self._host, self._port = host, port

    def tell(self, text: str, seconds: float) -> None:
        """See `Channel`."""
        try:
            self._ask("PUT", text.encode())
        except (OSError, http.client.HTTPException) as error:
            raise ClusterError(f"horovodrun does not take what rank 0 tells, at {self._name}: {error}") from None

    def hear(self, seconds: float) -> str:
        """See `Channel`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self._ask("GET").decode(errors="replace")
            except (OSError, http.client.HTTPException) as error:  # not found, until rank 0 has told it
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"Received: nothing from rank 0 within {seconds:g} s, through horovodrun at {self._name} "
                        f"({error}). Expected: where it can be met. See what rank 0 has printed"
                    ) from None
            time.sleep(_STORE_PAUSE_SECONDS)

    @property
    def _name(self) -> str:
        return f"{self._host}:{self._port}"

    def _ask(self, method: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_REQUEST_SECONDS)
        try:
            connection.request(method, _PATH, body)
            answer = connection.getresponse()
            content = answer.read(_ROOM)
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise http.client.HTTPException(f"{answer.status} {answer.reason}")
        return content


class Broadcast:
    """MPI's own broadcast, where the program has imported mpi4py already.

    Args:
        mpi: The module `mpi4py.MPI`.
    """

    def __init__(self, mpi: Any):
        self._world = mpi.COMM_WORLD

    def tell(self, text: str, seconds: float) -> None:
        """See `Channel`."""
        self._broadcast(text.encode().ljust(_ROOM), seconds)

    def hear(self, seconds: float) -> str:
        """See `Channel`."""
        return self._broadcast(bytes(_ROOM), seconds).decode(errors="replace").rstrip()

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
