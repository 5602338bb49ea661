"""The rendezvous: processes that know only rank, size and the host of rank 0 learn the addresses of all.

TensorFlow needs every address before it starts, and most systems do not tell them. Each process reserves a port,
connects to the server of rank 0 (server.py) and tells it; rank 0 answers with the list when all have come.

Where a system does not even tell the host of rank 0, the others learn it through a channel: if the program has imported
mpi4py, MPI broadcasts it; otherwise rank 0 writes it into a file in the home folder, which the hosts of a cluster
usually share. Rank 0 calls `tell` once, and `close` when all have met; the others `hear`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import ipaddress
import itertools
import json
import os
import random
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tfdist import json_schema
from tfdist.atomic_files import write_atomically
from tfdist.cluster import ports, server, sockets
from tfdist.cluster.environments import slurm
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import cleaned
from tfdist.cluster.membership import Membership, visible_devices
from tfdist.cluster.rendezvous import endpoints
from tfdist.cluster.server import Client, Server
from tfdist.cluster.sockets import UnreachedError
from tfdist.cluster.variables import MEETING, SERVERS, text

# Held until the process ends: TensorFlow's server takes it over only when a strategy is made.
_held: list[ports.Reservation] = []
# What rank 0 tells about each process, at most.
_MOST_BYTES = 16 * 1024
_LONGEST = 1000
_NAME = "rendezvous"


def _is_port(value: Any) -> bool:
    return type(value) is int and 0 < value < 65536


def _is_printable(value: Any) -> bool:
    return isinstance(value, str) and cleaned(value, _LONGEST) == value


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and ipaddress.ip_address(value) is not None


_REGISTRATION = {
    **{"rank": int, "size": int, "port": _is_port, "host": (json_schema.NOTHING, _is_printable), "pid": int},
    **{"address": _is_address, "reached": _is_address, "name": _is_printable, "devices": _is_printable},
}
_TOLD = {"hosts": [str], "port": _is_port, "secret": str}


@dataclasses.dataclass(frozen=True)
class Registration:
    """What one process tells about itself.

    Attributes:
        rank: Its number.
        size: How many processes it believes there are.
        port: The port that it has reserved for TensorFlow's server.
        host: The name by which it wants to be reached; `None` for the address that it is connected from.
        address: The address that it is connected from, as itself sees it.
        name: Of its host, for people.
        pid: Number of the process there.
        devices: Equal for two processes on a host if they see the same GPUs.
        reached: The address at which it has reached rank 0.
    """

    rank: int
    size: int
    port: int
    host: str | None
    address: str
    name: str
    pid: int
    devices: str = ""
    reached: str = ""

    @classmethod
    def read(cls, said: Any) -> Registration:
        """What another process tells.

        Raises:
            ValueError: If it is something else.

        Example:
            >>> one = Registration(1, 2, 2222, None, "10.0.0.2", "node-2", 77, reached="10.0.0.1")
            >>> Registration.read(dataclasses.asdict(one)) == one
            True
        """
        json_schema.check(said, _REGISTRATION)
        return cls(**said)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name}, process {self.pid})"


def meet(membership: Membership, timeout: float, env: Mapping[str, str]) -> dict:
    """Waits until all processes of a job have come, and returns where they are.

    This process' port stays reserved until it ends.

    Args:
        membership: This process.
        timeout: How long to wait, in seconds.
        env: The environment variables (docs/clusters.md lists them).

    Returns:
        "addresses": `host:port` of each rank; "hosts": name and address of its host; "devices": equal for two ranks
        of a host that see the same GPUs. "store": by what they are connected from now on.

    Raises:
        ClusterError: If not all come, or they do not fit together; the message names who is missing.
    """
    low, high = endpoints.port_range(env)
    reservation = ports.reserve(1, low=low, high=high)
    _, meeting_port = endpoints.meeting_place(membership, env)
    if reservation.ports[0] == meeting_port:  # it would be in the way of rank 0
        reservation = ports.reserve(1, low=low, high=high)
    try:
        own = Registration(
            rank=membership.rank,
            size=membership.size,
            port=reservation.ports[0],
            host=endpoints.own_host(env, membership.own_name),
            address="127.0.0.1",
            name=endpoints.host_name(env),
            pid=os.getpid(),
            devices=visible_devices(membership.rank, env, of_slurm=membership.source.startswith(slurm.NAME)),
        )
        result, store, over = _attend(membership, own, timeout, env)
        if over:
            # The others still use the address that it had.
            reservation.close()
            reservation = _same_place(result["addresses"][membership.rank])
    except BaseException:
        reservation.close()
        raise
    _held.append(reservation)
    return {**result, "store": store}


def _attend(
    membership: Membership, own: Registration, timeout: float, env: Mapping[str, str]
) -> tuple[dict, server.Store, bool]:
    """Where all are, the connection to them, and whether they had met before."""
    deadline = time.monotonic() + timeout
    host, port = endpoints.meeting_place(membership, env)
    secret = endpoints.secret_of(membership, env)
    meeting_ports = [port] if port else endpoints.meeting_ports(membership, env)
    channel = None
    if host is None:
        try:
            channel = open_channel(membership, env)
            # Only this job's processes can read its channel, so the secret and the ports may be chosen at random.
            secret = secrets.token_bytes(32)
            meeting_ports = random.SystemRandom().sample(range(*endpoints.port_range(env)), 8)
        except ClusterError:
            if not membership.on_one_host:
                raise
            host = "localhost"
    if membership.rank == 0:
        if host is not None and text(env, MEETING):
            endpoints.check_own(slurm.address_of(host) if "SLURM_JOB_ID" in env else host, env)
        started = listen(own, meeting_ports, secret, stays_open=bool(env.get(SERVERS)))
        try:
            if channel is not None:
                hosts = ["127.0.0.1"] if membership.on_one_host else endpoints.of_this_host()
                told = {"hosts": hosts, "port": started.port, "secret": secret.hex()}
                channel.tell(json.dumps(told), deadline - time.monotonic())
            return receive(own, started, deadline - time.monotonic()), started, False
        except BaseException:
            started.leave()
            raise
        finally:
            if channel is not None:
                channel.close()
    if channel is not None:
        # Both hosts are in the network of one of these addresses.
        hosts, meeting_ports, secret = _told(channel.hear(deadline - time.monotonic()))
    else:
        hosts = [slurm.address_of(host) if "SLURM_JOB_ID" in env else host]
    places = list(itertools.product(hosts, meeting_ports))
    return attend(own, places, secret, deadline - time.monotonic(), endpoints.name_of(membership, env))


def listen(own: Registration, places: Sequence[int], secret: bytes, stays_open: bool = False) -> Server:
    """The server of a job, at the first of some ports that is free.

    Raises:
        ClusterError: If none is free.
    """
    for port in places:
        # With SO_REUSEADDR it would take a port that another process has reserved. A port that a person has given is
        # taken even if connections of a process that died have not quite ended.
        with contextlib.suppress(OSError):
            bound = sockets.bind_everywhere(port, reuse=len(places) == 1)
            return Server(bound, secret, own.size, server.hello(0, str(own)), stays_open=stays_open)
    raise ClusterError(
        f"Received: no free port among {', '.join(map(str, places))}, where the other processes look for rank 0. "
        "Expected: a free one (`ss -ltn` shows who has them); or set TFDIST_PORTS to another range on all processes"
    )


def receive(own: Registration, started: Server, timeout: float) -> dict:
    """The part of rank 0: waits until all have come, and tells them where they are.

    Raises:
        ClusterError: If a rank does not come, which is named, or they do not fit together.
    """

    def check(said: Any) -> list[str]:
        who = Registration.read(said)
        if who.size == own.size:
            return []
        return [
            f"Received: {who} counts {who.size} processes, {own} counts {own.size}. Expected: the same number "
            "everywhere; correct how the processes are started"
        ]

    came = started.collect(_NAME, dataclasses.asdict(own), timeout, lambda ranks: [f"rank {r}" for r in ranks], check)
    result = _decided([own, *(Registration.read(came[rank]) for rank in range(1, own.size))])
    started.publish(_NAME, result)
    return result


def _told(text: str) -> tuple[list[str], list[int], bytes]:
    """What rank 0 has sent through a channel: its hosts, its port, and the secret."""
    try:
        told = json_schema.read_json(text, _TOLD)
        return told["hosts"], [told["port"]], bytes.fromhex(told["secret"])
    except ValueError:
        raise ClusterError(
            f"Received: {cleaned(text, 200)!r} from the launcher. Expected: where rank 0 is. See what rank 0 has "
            "printed; set TFDIST_MEETING to its host if the launcher does not pass it on"
        ) from None


def _same_place(address: str) -> ports.Reservation:
    port = int(address.rpartition(":")[2])
    try:
        return ports.reserve_again(port)
    except OSError:
        raise ClusterError(
            f"Received: the other processes have met already, with this one at {address}, which is not free here. "
            "Expected: that address, or all processes started again"
        ) from None


def attend(
    own: Registration, places: Sequence[tuple[str, int]], secret: bytes, timeout: float, job: str = ""
) -> tuple[dict, Client, bool]:
    """The part of every rank but 0: tries until it reaches rank 0, and waits until all have come.

    Args:
        own: This process; its addresses are filled in.
        places: Host and port where rank 0 may be.
        secret: The secret of the job.
        timeout: How long to try, in seconds.
        job: The name that tells the job from others, for messages.

    Returns:
        Where all are, as `meet`; the connection; and whether the others have met before, so that this process is to
        take its former place.

    Raises:
        ClusterError: If rank 0 is not found, or says that the processes do not fit together.
    """

    def told(client: Client) -> dict:
        address, reached = client.ends
        return dataclasses.asdict(dataclasses.replace(own, address=address, reached=reached))

    def read(result: str) -> dict:
        found = server.unpack(result, _MOST_BYTES * own.size)
        # Not by `json_schema`, which takes ten times as long: there may be thousands.
        for name in ("addresses", "hosts", "devices"):
            texts = found.get(name)
            if not isinstance(texts, list) or [type(text) for text in texts] != [str] * own.size:
                raise UnreachedError("it sends something else than where all processes are")
        return found

    def unreached(seen: str) -> str:
        where = f"{sockets.join_address(*places[0])}: " if len(places) == 1 else ""
        return _not_met(own, where + seen, timeout, job)

    own_hello, who = server.hello(own.rank, str(own)), f"rank {own.rank}"
    first = f"rank 0 (at {', '.join(sockets.join_address(*place) for place in places)})"
    client, over, met = server.attend(who, first, places, secret, own_hello, _NAME, told, read, timeout, unreached)
    return met, client, over


def _decided(everyone: Sequence[Registration]) -> dict:
    own, *others = everyone
    places = agreed(own.address, {one.rank: (one.address, one.reached) for one in others})
    named = [one for one in everyone if one.host is not None]
    with ThreadPoolExecutor(max_workers=16) as pool:
        for one, known in zip(named, pool.map(sockets.addresses_of, [one.host for one in named]), strict=True):
            if known:
                places[one.rank] = str(one.host)
    hosts = [places[one.rank] for one in everyone]
    return {
        "addresses": [sockets.join_address(host, one.port) for host, one in zip(hosts, everyone, strict=True)],
        "hosts": [f"{one.name} {host}" for host, one in zip(hosts, everyone, strict=True)],
        "devices": [one.devices for one in everyone],
    }


def agreed(own: str, guests: Mapping[int, tuple[str, str]]) -> dict[int, str]:
    """The address of each rank that all hosts can use.

    A process whose connection to rank 0 has the same address at both ends is on the host of rank 0. If all processes
    are there, a loopback address will do; otherwise the host of rank 0 gets the address at which most of the others
    have reached it.

    Args:
        own: A loopback address.
        guests: For each other rank, the address that it is connected from, and the one at which it has reached rank 0.

    Example:
        >>> agreed("127.0.0.1", {1: ("127.0.0.1", "127.0.0.1"), 2: ("10.0.0.2", "10.0.0.1")})
        {0: '10.0.0.1', 1: '10.0.0.1', 2: '10.0.0.2'}
    """
    here = {rank for rank, (place, reached) in guests.items() if place == reached or sockets.is_loopback(place)}
    outside = collections.Counter(reached for rank, (_, reached) in guests.items() if rank not in here)
    if outside:
        own = outside.most_common(1)[0][0]
    elif here and all(":" in guests[rank][0] for rank in here):
        own = "::1"
    return {0: own, **{rank: own if rank in here else place for rank, (place, _) in guests.items()}}


def _not_met(own: Registration, seen: str, timeout: float, job: str) -> str:
    if server.STRANGER in seen:
        known_as = f"is {job!r}" if job else "has no name"
        seen += f"; for this process the job {known_as}: TFDIST_JOB and TFDIST_TOKEN have to be the same on all"
    return (
        f"Received: no meeting of all {own.size} processes within {timeout:.3g} s, as rank {own.rank} on "
        f"{own.name} saw it: {seen}. "
        "Expected: rank 0 at one of these places. See what rank 0 has printed, and whether this host reaches its (a "
        "firewall? TFDIST_PORTS sets the ports, TFDIST_MEETING the host of rank 0, TFDIST_INTERFACE the network); set "
        "TFDIST_TOKEN to the same text on all processes if their home folders differ. If the others have met already, "
        "nobody listens there: start all processes again"
    )


# --- Channels ---------------------------------------------------------------------------------------------------------

# What a channel carries, in bytes.
_ROOM = 2048
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
            time.sleep(0.01)
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
            write_atomically(self._path, text, 0o600)
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
            time.sleep(0.05)
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
            if found := [after for word, after in itertools.pairwise(words) if word in _HYDRA]:
                return " ".join(["hydra", *found])
    return ""
