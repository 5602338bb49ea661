"""Where the processes of a job meet and are reached: hosts, addresses and ports; and the secret that they share."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from tfdist.atomic_files import write_atomically
from tfdist.cluster import sockets
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership
from tfdist.cluster.ports import USUAL, default_range
from tfdist.cluster.preflight import SKIP_ADDRESS_CHECK, is_on
from tfdist.cluster.variables import MEETING, TOKEN, text

# Rank 0 takes the first of these that is free: some may be in use, also by another job of the same user.
_CANDIDATES = 8
_PORTS = "TFDIST_PORTS"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
# Of this host's addresses: one with many containers has an address for each of their networks.
_MOST = 16


def port_range(env: Mapping[str, str]) -> tuple[int, int]:
    """The lowest port that may be used, and the end of the range, which is not in it.

    Raises:
        ClusterError: if TFDIST_PORTS is no range.

    Example:
        >>> port_range({"TFDIST_PORTS": "21000-21099"})
        (21000, 21100)
    """
    given = text(env, _PORTS)
    if not given:
        return default_range()
    match = re.fullmatch(r"(\d+)-(\d+)", given)
    if match is None or not 0 < int(match[1]) <= int(match[2]) < 65536:
        raise ClusterError(f"Received: {_PORTS}={given!r}. Expected: two ports, such as 21000-21099")
    return int(match[1]), int(match[2]) + 1


def meeting_ports(membership: Membership, env: Mapping[str, str]) -> list[int]:
    """The ports at which rank 0 of a job may listen, in the order in which they are tried: the same on all hosts.

    Example:
        >>> len(meeting_ports(Membership(0, 2, "test", "slurm-17.0"), {}))
        8
        >>> meeting_ports(Membership(0, 2, "test", "slurm-17.0"), {"TFDIST_PORTS": "21000-21000"})
        [21000]
    """
    # The usual range: where the ports of outgoing connections begin may differ from host to host.
    low, high = port_range(env) if env.get(_PORTS) else USUAL
    ports: dict[int, None] = {}
    for attempt in range(16 * _CANDIDATES):
        digest = hashlib.sha256(f"{name_of(membership, env)}/{attempt}".encode()).digest()
        ports[low + int.from_bytes(digest[:8], "big") % (high - low)] = None
    return list(ports)[:_CANDIDATES]


def meeting_place(membership: Membership, env: Mapping[str, str]) -> tuple[str | None, int | None]:
    """Host and port at which rank 0 is met; `None` for what is not given, or is better learnt through the channel.

    Raises:
        ClusterError: if TFDIST_MEETING is no address.

    Example:
        >>> meeting_place(Membership(0, 2, "test", "job"), {"TFDIST_MEETING": "node-1:2222"})
        ('node-1', 2222)
        >>> meeting_place(Membership(0, 2, "test", "job", local_size=2), {})
        ('localhost', None)
    """
    given = text(env, MEETING)
    if not given and membership.has_channel:
        return None, None  # nothing from another job on the same hosts can come through it
    if not given:
        return ("localhost" if membership.on_one_host else membership.host), None
    if given.count(":") == 1 or given.startswith("["):
        try:
            return sockets.split_address(given)
        except ValueError as error:
            raise ClusterError(f"TFDIST_MEETING: {error}") from None
    return given, None


def host_name(env: Mapping[str, str]) -> str:
    """The name of this host for messages: the one that Slurm uses, if Slurm has started this process.

    Example:
        >>> host_name({"SLURMD_NODENAME": "n9"})
        'n9'
    """
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def own_host(env: Mapping[str, str], name: str | None) -> str | None:
    """The host name or address by which this process wants to be reached, if one is given.

    Args:
        env: The environment variables: TFDIST_HOST, or else TFDIST_INTERFACE, a network interface of this machine, of
            which an IPv4 address is preferred.
        name: The system's name of this host, where neither is set.

    Raises:
        ClusterError: If there is no such interface, or it has no address.

    Example:
        >>> own_host({"TFDIST_INTERFACE": "lo"}, None)
        '127.0.0.1'
    """
    if env.get("TFDIST_HOST"):
        return env["TFDIST_HOST"]
    interface = env.get("TFDIST_INTERFACE")
    if not interface:
        return name
    known = psutil.net_if_addrs()
    found = {family: entry.address for entry in reversed(known.get(interface, ())) for family in [entry.family]}
    for family in filter(found.get, _FAMILIES):
        return found[family].partition("%")[0]
    raise ClusterError(
        f"Received: the network interface {interface!r}, which has no IP address here. Expected: one that all share, "
        f"of {', '.join(sorted(known))}"
    )


def of_this_host() -> list[str]:
    """All addresses by which other hosts might reach this one, IPv4 first; loopback if there is nothing else.

    Example:
        >>> len(of_this_host()) > 0
        True
    """
    found = [entry for entries in psutil.net_if_addrs().values() for entry in entries if entry.family in _FAMILIES]
    found.sort(key=lambda entry: _FAMILIES.index(entry.family))
    # A link-local address means another host on each link.
    addresses = [ipaddress.ip_address(entry.address.partition("%")[0]) for entry in found]
    usable = [str(place) for place in addresses if not place.is_loopback and not place.is_link_local]
    return usable[:_MOST] or ["127.0.0.1"]


def check_own(host: str, env: Mapping[str, str]) -> None:
    """Makes sure that rank 0 is on the host where the others look for it.

    Not with `TFDIST_SKIP_ADDRESS_CHECK=1` or in Kubernetes, where another host may pass the connections on.

    Args:
        host: That of TFDIST_MEETING.
        env: The environment variables.

    Raises:
        ClusterError: If it is another host, or no host at all.

    Example:
        >>> check_own("localhost", {})
    """
    if is_on(env, SKIP_ADDRESS_CHECK) or "KUBERNETES_SERVICE_HOST" in env:
        return
    if not sockets.is_own(host):
        raise ClusterError(
            f"Received: TFDIST_MEETING with the host {host!r}, which is none of the addresses of {host_name(env)}, "
            f"where rank 0 is ({', '.join(of_this_host())}). Expected: the name or an address of the host of rank 0, "
            f"on all processes; if connections to it are passed on to this one, set {SKIP_ADDRESS_CHECK}=1"
        )


def secret_of(membership: Membership, env: Mapping[str, str], home: Path | None = None) -> bytes:
    """The secret of a job: made of its name and TFDIST_TOKEN, or else a key in the home folder, if that is shared.

    Without either, the name of the job is all: it keeps out a process of another job, but no attacker who can reach the
    ports.

    Args:
        membership: This process.
        env: Its environment variables.
        home: The home folder.

    Raises:
        ClusterError: If no key can be kept there.

    Example:
        >>> one, other = Membership(0, 2, "test", "job 1"), Membership(0, 2, "test", "job 2")
        >>> env = {"TFDIST_TOKEN": "secret"}
        >>> secret_of(one, env) == secret_of(one, env), secret_of(one, env) == secret_of(other, env)
        (True, False)
    """
    token = env.get(TOKEN, "").encode()
    if not token and membership.shared_home:
        try:
            token = _key_in(home or Path.home())
        except (OSError, RuntimeError) as error:
            raise ClusterError(
                f"Received: a home folder in which no key can be kept ({error}). Expected: TFDIST_TOKEN, the same "
                "secret text on all processes of the job"
            ) from None
    return hmac.digest(token, name_of(membership, env).encode(), "sha256")


def name_of(membership: Membership, env: Mapping[str, str]) -> str:
    """The name that tells the job from others.

    Example:
        >>> name_of(Membership(0, 2, "TFDIST_RANK", ""), {"TFDIST_JOB": "faces"})
        'faces'
    """
    return f"{membership.job} {env.get('TFDIST_JOB', '')}".strip()


def _key_in(home: Path) -> bytes:
    """The key that is kept in the home folder; the first process that needs it makes it."""
    path = home / ".config" / "tfdist" / "key"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = path.with_name(f"key.{secrets.token_hex(8)}")
        write_atomically(own, secrets.token_hex(32), 0o600, durable=True)
        try:
            # If several processes do this at the same time, on whatever hosts, only one of them succeeds.
            os.link(own, path)
        except FileExistsError:
            pass
        finally:
            own.unlink()
    key = path.read_bytes()
    if not re.fullmatch(rb"[0-9a-f]{64}", key):
        raise OSError(f"{path} has {len(key)} bytes, not the 64 hexadecimal digits of a key: remove it")
    return key
