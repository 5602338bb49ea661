"""Where the ranks of a job are, as Horovod wants to know it: ranks on one host, and across hosts. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """One rank among all.

    Attributes:
        hostname: its host.
        rank: its number.
        local_rank: its number among the ranks of its host.
        cross_rank: its number among the ranks with this local rank on all hosts.
        size: how many ranks there are.
        local_size: how many on its host.
        cross_size: how many hosts have this local rank.
    """

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int


def places(hosts: Sequence[str]) -> list[Place]:
    """The place of each rank.

    Args:
        hosts: the host of each rank, in any order.

    Example:
        >>> places(["a", "b", "a"])[2]
        Place(hostname='a', rank=2, local_rank=1, cross_rank=0, size=3, local_size=2, cross_size=1)
    """
    names = list(dict.fromkeys(hosts))
    sizes = {name: hosts.count(name) for name in names}
    local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    found = []
    for rank, (host, local_rank) in enumerate(zip(hosts, local_ranks, strict=True)):
        across = [name for name in names if sizes[name] > local_rank]
        sizes_of_rank = (len(hosts), sizes[host], len(across))
        found.append(Place(host, rank, local_rank, across.index(host), *sizes_of_rank))
    return found
