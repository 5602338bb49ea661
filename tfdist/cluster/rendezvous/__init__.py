"""The rendezvous: how processes that know only rank and size, and where rank 0 is, get the addresses of all.

TensorFlow needs every address before it starts, and most systems tell no more than that. Each process reserves a port,
connects to rank 0 and tells it; rank 0 answers with the list when all are there. Where a system does not even tell the
host of rank 0, the processes learn it through the system's own means (`tfdist.cluster.channels`).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import secrets
import time
from collections.abc import Mapping

from tfdist.cluster import channels, devices, ports
from tfdist.cluster.environments import slurm
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership
from tfdist.cluster.rendezvous import addresses, places
from tfdist.cluster.rendezvous.client import attend
from tfdist.cluster.rendezvous.entry import Entry
from tfdist.cluster.rendezvous.server import MeetingServer
from tfdist.cluster.roles import VARIABLE as SERVERS

__all__ = ["meet"]

# Held until the process ends: TensorFlow's server takes it over only when a strategy is made.
_held: list[ports.Reservation] = []
_TRIED_PORTS = 8


def meet(membership: Membership, timeout: float, env: Mapping[str, str] | None = None) -> dict[str, list[str]]:
    """Waits until all processes of a job have come, and tells where they are.

    This process' port stays reserved until it ends.

    Args:
        membership: this process.
        timeout: how long to wait, in seconds.
        env: the environment variables, with what can be set there (docs/clusters.md); those of this process by default.

    Returns:
        "addresses": `host:port` of each rank; "hosts": name and address of its host; "devices": equal for two ranks
        of a host that see the same GPUs.

    Raises:
        ClusterError: if not all come, or they do not fit together; the message names who is missing.

    Example:
        >>> meet(Membership(0, 1, "test", "job"), timeout=1.0, env={})["addresses"][0].startswith("127.0.0.1:")
        True
    """
    env = os.environ if env is None else env
    low, high = places.port_range(env)
    reservation = ports.reserve(1, low=low, high=high)
    _, meeting_port = places.meeting_place(membership, env)
    if reservation.ports[0] == meeting_port:  # it would be in the way of rank 0
        reservation = ports.reserve(1, low=low, high=high)
    try:
        entry = Entry(
            rank=membership.rank,
            size=membership.size,
            port=reservation.ports[0],
            host=addresses.own_host(env, membership.own_name),
            address="127.0.0.1",
            name=addresses.host_name(env),
            pid=os.getpid(),
            devices=devices.seen(membership.rank, env, of_slurm=membership.source.startswith(slurm.NAME)),
        )
        result = _attend(membership, entry, timeout, env)
        if "over" in result:
            # The others have kept the former address in mind.
            reservation.close()
            reservation = _same_place(result["addresses"][membership.rank])
    except BaseException:
        reservation.close()
        raise
    _held.append(reservation)
    return {name: result[name] for name in ("addresses", "hosts", "devices")}


def _attend(membership: Membership, entry: Entry, timeout: float, env: Mapping[str, str]) -> dict:
    deadline = time.monotonic() + timeout
    host, port = places.meeting_place(membership, env)
    secret = places.secret_of(membership, env)
    meeting_ports = [port] if port else places.meeting_ports(membership, env)
    channel = None
    if host is None and membership.size > 1:
        try:
            channel = channels.open_channel(membership, env)
            # What goes through the job's own channel is known to nobody else, and may be anything.
            secret = secrets.token_bytes(32)
            meeting_ports = random.SystemRandom().sample(range(*places.port_range(env)), _TRIED_PORTS)
        except ClusterError:
            if not membership.on_one_host:
                raise
            host = "localhost"
    if membership.rank == 0:
        if host is not None and env.get("TFDIST_MEETING", "").strip():
            places.check_own(slurm.address_of(host) if "SLURM_JOB_ID" in env else host, env)
        server = MeetingServer(entry, meeting_ports, secret, rejoin=bool(env.get(SERVERS)))
        if channel is not None:
            hosts = ["127.0.0.1"] if membership.on_one_host else addresses.of_this_host()
            told = {"hosts": hosts, "port": server.port, "secret": secret.hex()}
            try:
                channel.tell(json.dumps(told), deadline - time.monotonic())
            except BaseException:
                server.close()
                raise
        return server.meet(deadline - time.monotonic())
    if channel is not None:
        told = json.loads(channel.hear(deadline - time.monotonic()))
        # One of them is in a network that both hosts are in.
        hosts, meeting_ports, secret = told["hosts"], [told["port"]], bytes.fromhex(told["secret"])
    else:
        hosts = [slurm.address_of(host) if "SLURM_JOB_ID" in env else host]
    met_at = list(itertools.product(hosts, meeting_ports))
    return attend(entry, met_at, secret, deadline - time.monotonic(), places.name_of(membership, env))


def _same_place(address: str) -> ports.Reservation:
    port = int(address.rpartition(":")[2])
    try:
        return ports.reserve_again(port)
    except OSError:
        raise ClusterError(
            f"Received: the other processes have met already, with this one at {address}, which is not free here. "
            "Expected: that address, or all processes started again"
        ) from None
