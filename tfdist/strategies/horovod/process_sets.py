"""Groups of ranks that train apart from each other: Horovod's process sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.cluster.errors import ClusterError


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
    """The groups, each once.

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
