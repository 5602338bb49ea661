"""Which task of the cluster each rank is, where a system knows only ranks."""

from __future__ import annotations

from tfdist.cluster.errors import ClusterError

# How many of the ranks are parameter servers.
VARIABLE = "TFDIST_PS"


def roles(size: int, servers: int) -> list[tuple[str, int]]:
    """The job and the index in it, by rank: workers; with parameter servers a chief, workers, and those at the end.

    Args:
        size: how many ranks there are.
        servers: how many of them are parameter servers.

    Raises:
        ClusterError: if no worker is left.

    Example:
        >>> roles(2, servers=0)
        [('worker', 0), ('worker', 1)]
        >>> roles(4, servers=1)
        [('chief', 0), ('worker', 0), ('worker', 1), ('ps', 0)]
    """
    if servers == 0:
        return [("worker", rank) for rank in range(size)]
    workers = size - 1 - servers
    if servers < 0 or workers < 1:
        raise ClusterError(
            f"Received: {VARIABLE}={servers} with {size} processes. Expected: a chief, at least one worker and the "
            f"parameter servers, {servers + 2 if servers > 0 else 'a positive number'} or more in all"
        )
    return [
        ("chief", 0),
        *(("worker", index) for index in range(workers)),
        *(("ps", index) for index in range(servers)),
    ]
