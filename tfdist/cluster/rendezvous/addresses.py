"""Which address each process is reached by. Pure, but for `of_interface` and `of_this_host`."""

from __future__ import annotations

import collections
import ipaddress
import socket
from collections.abc import Mapping

import psutil

from tfdist.cluster.errors import ClusterError

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
# A host with many containers has an address for each of their networks.
_MOST = 16


def host_name(env: Mapping[str, str]) -> str:
    """The name of this host, for people; Slurm's, where that is another one.

    Example:
        >>> host_name({"SLURMD_NODENAME": "n9"})
        'n9'
    """
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def own_host(env: Mapping[str, str], name: str | None) -> str | None:
    """What this process is to be reached by, if that is given.

    Args:
        env: the environment variables: TFDIST_HOST, or else the address of the network interface TFDIST_INTERFACE.
        name: what the system calls this host, where nothing else is given.

    Raises:
        ClusterError: if there is no such interface, or it has no address.

    Example:
        >>> own_host({"TFDIST_INTERFACE": "lo"}, None)
        '127.0.0.1'
    """
    if env.get("TFDIST_HOST"):
        return env["TFDIST_HOST"]
    if env.get("TFDIST_INTERFACE"):
        return of_interface(env["TFDIST_INTERFACE"])
    return name


def of_interface(interface: str) -> str:
    """The address of a network interface of this machine, an IPv4 one if it has any.

    Raises:
        ClusterError: if there is none.

    Example:
        >>> of_interface("lo")
        '127.0.0.1'
    """
    known = psutil.net_if_addrs()
    found = {family: entry.address for entry in reversed(known.get(interface, ())) for family in [entry.family]}
    for family in _FAMILIES:
        if family in found:
            return found[family].partition("%")[0]
    names = ", ".join(sorted(known))
    problem = "has no IP address" if interface in known else f"is none of this machine's, which are {names}"
    raise ClusterError(f"Received: the network interface {interface!r}, which {problem}. Expected: one that all share")


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


def plain(place: str) -> str:
    """An address without what a socket adds to it.

    Example:
        >>> plain("::ffff:10.0.0.1"), plain("fe80::1%eth0")
        ('10.0.0.1', 'fe80::1')
    """
    host = place.partition("%")[0]
    mapped = getattr(ipaddress.ip_address(host), "ipv4_mapped", None)
    return str(mapped) if mapped else host


def is_loopback(place: str) -> bool:
    """Whether an address is only known on its own host.

    Example:
        >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1")
        (True, False)
    """
    return ipaddress.ip_address(place).is_loopback


def agreed(own: str, guests: Mapping[int, tuple[str, str]]) -> dict[int, str]:
    """The address of each rank that all hosts can use.

    What has the same address at both ends of its connection is on the host of rank 0, like rank 0 itself: a loopback
    address is good if all are there; otherwise it is the address at which most of the others have reached rank 0.

    Args:
        own: a loopback address.
        guests: for each other rank, the address that it is connected from, and the one at which it has reached rank 0.

    Example:
        >>> agreed("127.0.0.1", {1: ("127.0.0.1", "127.0.0.1"), 2: ("10.0.0.2", "10.0.0.1")})
        {0: '10.0.0.1', 1: '10.0.0.1', 2: '10.0.0.2'}
    """
    here = {rank for rank, (place, reached) in guests.items() if place == reached or is_loopback(place)}
    outside = collections.Counter(reached for rank, (_, reached) in guests.items() if rank not in here)
    if outside:
        own = outside.most_common(1)[0][0]
    elif here and all(":" in guests[rank][0] for rank in here):
        own = "::1"
    return {0: own, **{rank: own if rank in here else place for rank, (place, _) in guests.items()}}
