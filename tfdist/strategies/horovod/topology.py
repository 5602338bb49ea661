"""Where the ranks of a Horovod job are, and which of them train together (Horovod's process sets)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tfdist.cluster.errors import ClusterError


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


def process_set_of(horovod: Any, groups: Sequence[tuple[int, ...]]) -> Any:
    """This process' process set; all processes register all groups, in the same order.

    Args:
        horovod: the module `horovod.tensorflow`, initialized.
        groups: all groups, sorted; none for one of all ranks.
    """
    sets = [
        horovod.global_process_set if len(group) == horovod.size() else horovod.add_process_set(list(group))
        for group in groups
    ]
    return next((found for found in sets if found.included()), horovod.global_process_set)


def groups_of(wanted: Sequence[tuple[int, ...] | None]) -> list[tuple[int, ...]]:
    """The groups that the ranks name, each once; checks that they fit together.

    Args:
        wanted: the group that each rank names, sorted; `None` for all ranks.

    Raises:
        ClusterError: if the ranks of a group do not all name the same one, or one of them does not exist.

    Example:
        >>> groups_of([(0, 1), (0, 1), (2,)])
        [(0, 1), (2,)]
    """
    groups = sorted({group for group in wanted if group is not None})
    for rank, group in enumerate(wanted):
        missing = [str(other) for other in group or () if other >= len(wanted)]
        if missing:
            raise ClusterError(
                f"Received: process_set={list(group)}, but there is no rank {', '.join(missing)} (of {len(wanted)}). "
                f"Expected: ranks from 0 to {len(wanted) - 1}, or more processes"
            )
        if group is not None and rank not in group:
            raise ClusterError(
                f"Received: process_set={list(group)} on rank {rank}. Expected: a process set with the rank itself"
            )
    for group in groups:
        outside = [rank for rank in group if wanted[rank] != group]
        if outside:
            raise ClusterError(
                f"Received: process_set={list(group)}, but {', '.join(_asks(wanted, rank) for rank in outside)}. "
                "Expected: the same process_set on all processes of a group"
            )
    if None in wanted and groups:
        alone = [str(rank) for rank, group in enumerate(wanted) if group is None]
        raise ClusterError(
            f"Received: no process_set on rank {', '.join(alone)}, and {list(groups[0])} on others. "
            "Expected: every process names the group that it belongs to"
        )
    return groups


def _asks(wanted: Sequence[tuple[int, ...] | None], rank: int) -> str:
    group = wanted[rank]
    return f"rank {rank} has process_set={group and list(group)}"
