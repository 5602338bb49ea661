"""What collectives send, and how long that takes. Pure."""

from __future__ import annotations

from tfdist.planning.hardware import Link


def ring_bytes(size: float, devices: int) -> float:
    """What each device sends in a ring all-reduce of `size` bytes: 2 (N - 1) / N of it (arXiv 1802.05799).

    Example:
        >>> ring_bytes(100, 2), ring_bytes(100, 4), ring_bytes(100, 1)
        (100.0, 150.0, 0.0)
    """
    return 2 * (devices - 1) / devices * size


def all_reduce_seconds(size: float, devices: int, link: Link) -> float:
    """How long a ring all-reduce takes: 2 (N - 1) messages one after the other.

    Example:
        >>> round(all_reduce_seconds(1e9, 4, Link(latency=1e-3, bandwidth=1e9)), 6)
        1.506
    """
    return 2 * (devices - 1) * link.latency + ring_bytes(size, devices) / link.bandwidth
