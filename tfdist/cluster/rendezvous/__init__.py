"""The rendezvous: processes that know only rank, size and the host of rank 0 learn the addresses of all.

TensorFlow needs every address before it starts, and most systems do not tell them. Each process reserves a port,
connects to rank 0 and registers; rank 0 answers with the list when all have come. Where a system does not even tell the
host of rank 0, the processes learn it through the system's own means (`channels`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from multiprocessing import AuthenticationError

from tfdist.cluster import connections, ports, sockets
from tfdist.cluster.connections import UnreachedError
from tfdist.cluster.connections.compressed import unpack
from tfdist.cluster.environments import slurm
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import cleaned
from tfdist.cluster.membership import Membership, visible_devices
from tfdist.cluster.rendezvous import endpoints
from tfdist.cluster.rendezvous.channels import open_channel
from tfdist.cluster.rendezvous.registration import Registration
from tfdist.cluster.rendezvous.server import MeetingServer
from tfdist.cluster.variables import MEETING, SERVERS, TOKEN, text

_log = logging.getLogger("tfdist")
# Held until the process ends: TensorFlow's server takes it over only when a strategy is made.
_held: list[ports.Reservation] = []
_TRIED_PORTS = 8
# A host that is cut off answers nothing at all: the others are tried after so long.
_CONNECT_SECONDS = 3.0
# How long after its own deadline a process waits for what rank 0 has to say at the deadline of rank 0.
_LAST_WORD_SECONDS = 5.0
_WARN_SECONDS = 5.0
# What rank 0 tells about each process, at most.
_MOST_BYTES = 16 * 1024
_STRANGER = "somebody there does not know the secret of this job"


def meet(membership: Membership, timeout: float, env: Mapping[str, str] | None = None) -> dict:
    """Waits until all processes of a job have come, and returns where they are.

    This process' port stays reserved until it ends.

    Args:
        membership: This process.
        timeout: How long to wait, in seconds.
        env: The environment variables (docs/clusters.md lists them); those of this process by default.

    Returns:
        "addresses": `host:port` of each rank; "hosts": name and address of its host; "devices": equal for two ranks
        of a host that see the same GPUs. "secret": by which they have known each other; `None` if others can know it.

    Raises:
        ClusterError: If not all come, or they do not fit together; the message names who is missing.

    Example:
        >>> meet(Membership(0, 1, "test", "job"), timeout=1.0, env={})["addresses"][0].startswith("127.0.0.1:")
        True
    """
    env = os.environ if env is None else env
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
        result = _attend(membership, own, timeout, env)
        if "over" in result:
            # The others still use the address that it had.
            reservation.close()
            reservation = _same_place(result["addresses"][membership.rank])
    except BaseException:
        reservation.close()
        raise
    _held.append(reservation)
    return {name: result[name] for name in ("addresses", "hosts", "devices", "secret")}


def _attend(membership: Membership, own: Registration, timeout: float, env: Mapping[str, str]) -> dict:
    deadline = time.monotonic() + timeout
    host, port = endpoints.meeting_place(membership, env)
    secret = endpoints.secret_of(membership, env)
    is_known = not (env.get(TOKEN) or membership.shared_home)
    meeting_ports = [port] if port else endpoints.meeting_ports(membership, env)
    channel = None
    if host is None and membership.size > 1:
        try:
            channel = open_channel(membership, env)
            # Only this job's processes can read its channel, so the secret and the ports may be chosen at random.
            secret, is_known = secrets.token_bytes(32), False
            meeting_ports = random.SystemRandom().sample(range(*endpoints.port_range(env)), _TRIED_PORTS)
        except ClusterError:
            if not membership.on_one_host:
                raise
            host = "localhost"
    if membership.rank == 0:
        if host is not None and text(env, MEETING):
            endpoints.check_own(slurm.address_of(host) if "SLURM_JOB_ID" in env else host, env)
        server = MeetingServer(own, meeting_ports, secret, rejoin=bool(env.get(SERVERS)))
        if channel is not None:
            hosts = ["127.0.0.1"] if membership.on_one_host else endpoints.of_this_host()
            told = {"hosts": hosts, "port": server.port, "secret": secret.hex()}
            try:
                channel.tell(json.dumps(told), deadline - time.monotonic())
            except BaseException:
                server.end()
                raise
        return {**server.meet(deadline - time.monotonic()), "secret": None if is_known else secret}
    if channel is not None:
        # Both hosts are in the network of one of these addresses.
        hosts, meeting_ports, secret = _told(channel.hear(deadline - time.monotonic()))
    else:
        hosts = [slurm.address_of(host) if "SLURM_JOB_ID" in env else host]
    met_at = list(itertools.product(hosts, meeting_ports))
    met = attend(own, met_at, secret, deadline - time.monotonic(), endpoints.name_of(membership, env))
    return {**met, "secret": None if is_known else secret}


def _told(text: str) -> tuple[list[str], list[int], bytes]:
    """What rank 0 has told through a channel: its hosts, its port, and the secret."""
    try:
        told = json.loads(text)
        hosts, port, secret = told["hosts"], told["port"], bytes.fromhex(told["secret"])
        if not isinstance(port, int) or not 0 < port < 65536 or not all(isinstance(host, str) for host in hosts):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ClusterError(
            f"Received: {cleaned(text, 200)!r} from the launcher. Expected: where rank 0 is. See what rank 0 has "
            "printed; set TFDIST_MEETING to its host if the launcher does not pass it on"
        ) from None
    return hosts, [port], secret


def _same_place(address: str) -> ports.Reservation:
    port = int(address.rpartition(":")[2])
    try:
        return ports.reserve_again(port)
    except OSError:
        raise ClusterError(
            f"Received: the other processes have met already, with this one at {address}, which is not free here. "
            "Expected: that address, or all processes started again"
        ) from None


def attend(own: Registration, places: Sequence[tuple[str, int]], secret: bytes, timeout: float, job: str = "") -> dict:
    """The part of every rank but 0: tries until it reaches rank 0, registers, and waits until all have come.

    Args:
        own: This process; its address is filled in.
        places: Host and port where rank 0 may be.
        secret: The secret of the job.
        timeout: How long to try, in seconds.
        job: The name that tells the job from others, for messages.

    Returns:
        As `MeetingServer.meet`; with "over" in it if the others have met before, and this process is to take its
        former place.

    Raises:
        ClusterError: If rank 0 is not found, or says that the processes do not fit together.
    """
    began, deadline = time.monotonic(), time.monotonic() + timeout
    problems: dict[str, str] = {}
    waiting: list[int] = []
    attempts = {
        f"{host}:{port}": functools.partial(_attend_at, host, port, own, secret, deadline, waiting, problems)
        for host, port in places
    }
    warned = False

    def warn() -> None:
        nonlocal warned
        if not warned and time.monotonic() > began + _WARN_SECONDS:
            warned = True
            _log.warning("rank %d has not reached rank 0 yet, and goes on trying: %s", own.rank, _by_problem(problems))

    try:
        return connections.keep_trying(attempts, deadline, problems, warn)
    except UnreachedError:
        raise ClusterError(_not_met(own, problems, waiting, timeout, job)) from None


def _attend_at(
    host: str,
    port: int,
    own: Registration,
    secret: bytes,
    deadline: float,
    waiting: list[int],
    problems: Mapping[str, str],
    left: float,
) -> dict:
    try:
        connected = sockets.connect((host, port), min(_CONNECT_SECONDS, left))
    except OSError as error:
        raise UnreachedError(sockets.reason_of(error)) from None
    own = dataclasses.replace(own, address=sockets.plain(connected.getsockname()[0]))
    connection = connections.framed(connected)
    last = deadline + _LAST_WORD_SECONDS
    try:
        try:
            # At most of the ports where rank 0 may listen is nobody, or a service that waits for us to speak.
            patience = _CONNECT_SECONDS if f"{host}:{port}" not in problems else math.inf
            until = min(deadline, time.monotonic() + patience)
            connections.authenticate(connection, secret, first=False, deadline=until)
        except connections.OtherVersionError as error:
            if problems.get(f"{host}:{port}") != str(error):
                _log.warning("rank %d cannot talk to rank 0 at %s:%d yet: %s", own.rank, host, port, error)
            raise UnreachedError(str(error)) from None
        except connections.ENDS as error:
            raise UnreachedError(f"{_STRANGER} ({error or 'hung up'})") from None
        connection.send_bytes(own.to_json(), deadline)
        while connection.poll(max(0.0, last - time.monotonic())):
            message = connections.receive(connection, _MOST_BYTES * own.size, last)
            if "error" in message:
                raise ClusterError(cleaned(message["error"]))
            if "met" in message:
                return _result(unpack(message["met"], _MOST_BYTES * own.size), own.size)
            told = message.get("waiting for")
            waiting[:] = [rank for rank in told if isinstance(rank, int)] if isinstance(told, list) else []
            _log.info("rank 0 is there; it waits for ranks %s", ", ".join(map(str, waiting)))
        raise UnreachedError("it is there, but the others have not come")
    except AuthenticationError as error:
        raise UnreachedError(f"{_STRANGER} ({error})") from None
    except (OSError, EOFError):
        raise UnreachedError("it was there, and is gone") from None
    finally:
        # Otherwise the port of rank 0 would stay taken for a minute, in the way of a restart.
        connections.leave_without_trace(connection)


def _result(found: dict, size: int) -> dict:
    for name in ("addresses", "hosts", "devices"):
        values = found.get(name)
        if not isinstance(values, list) or len(values) != size or not all(isinstance(value, str) for value in values):
            raise OSError("it sends something else than where all processes are")
    return found


def _not_met(own: Registration, problems: dict[str, str], waiting: list[int], timeout: float, job: str) -> str:
    seen = _by_problem(problems)
    if any(problem.startswith(_STRANGER) for problem in problems.values()):
        known_as = f"is {job!r}" if job else "has no name"
        seen += f"; for this process the job {known_as}: TFDIST_JOB and TFDIST_TOKEN have to be the same on all"
    missing = f"; rank 0 was waiting for ranks {', '.join(map(str, waiting[:20]))}" if waiting else ""
    return (
        f"Received: no meeting of all {own.size} processes within {timeout:.3g} s, as rank {own.rank} on "
        f"{own.name} saw it: {seen or 'nobody has told where rank 0 is'}{missing}. "
        "Expected: rank 0 at one of these places. See what rank 0 has printed, and whether this host reaches its (a "
        "firewall? TFDIST_PORTS sets the ports, TFDIST_MEETING the host of rank 0, TFDIST_INTERFACE the network); set "
        "TFDIST_TOKEN to the same text on all processes if their home folders differ. If the others have met already, "
        "nobody listens any more: start all processes again"
    )


def _by_problem(problems: dict[str, str]) -> str:
    """The problems, each with the places where it was seen."""
    places: dict[str, list[str]] = {}
    for place, problem in problems.items():
        places.setdefault(problem, []).append(place)
    return "; ".join(f"{', '.join(where)}: {problem}" for problem, where in places.items())
