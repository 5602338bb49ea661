"""The tables that `tfdist check` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfdist.launch.check.member import COMPARED, Member
from tfdist.launch.check.network import Link

# A table of all pairs that still fits on a screen.
_MATRIX = 8
_UNITS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))


def members_table(members: Sequence[Member]) -> str:
    """Who is there, one line each."""
    rows = [["rank", "task", "host", "address", "cores", "GPUs", *COMPARED]]
    for rank, member in enumerate(members):
        versions = [member.versions.get(name, "-") for name in COMPARED]
        places = [member.task, member.host, member.address, str(member.cores), str(member.gpus)]
        rows.append([str(rank), *places, *versions])
    return _aligned(rows)


def links_table(members: Sequence[Member], found: Sequence[Mapping[int, Link]]) -> str:
    """Latency and bandwidth from each of those that measured (lines) to each other (columns), or the extremes.

    Args:
        members: all processes.
        found: for each of them, what it has measured, by the other's rank.
    """
    measured = [rank for rank, links in enumerate(found) if links]
    if not measured:
        return ""
    if len(measured) <= _MATRIX:
        rows = [["from \\ to", *(f"{rank} {members[rank].host}" for rank in measured)]]
        for rank in measured:
            rows.append([f"{rank} {members[rank].host}", *(_shown(found[rank].get(other)) for other in measured)])
        return "\n" + _aligned(rows)
    open_ways = [
        (link, rank, other) for rank in measured for other, link in found[rank].items() if link.problem is None
    ]
    lines = [f"\n{len(open_ways)} ways measured, between {len(measured)} processes"]
    if open_ways:
        slow = max(open_ways, key=lambda way: way[0].latency or 0.0)
        narrow = min(open_ways, key=lambda way: way[0].bandwidth or 0.0)
        lines.append(f"longest latency: {_between(members, slow)}")
        lines.append(f"lowest bandwidth: {_between(members, narrow)}")
    return "\n".join(lines)


def _between(members: Sequence[Member], way: tuple[Link, int, int]) -> str:
    link, rank, other = way
    return f"{_shown(link)}, from rank {rank} on {members[rank].host} to rank {other} on {members[other].host}"


def _shown(link: Link | None) -> str:
    """A measurement.

    Example:
        >>> _shown(Link(latency=0.00015, bandwidth=118e6))
        '150 us, 118 MB/s'
    """
    if link is None:
        return "-"
    if link.problem is not None or link.latency is None or link.bandwidth is None:
        return "blocked"
    factor, unit = next((unit for unit in _UNITS if link.bandwidth >= unit[0]), (1.0, "B/s"))
    return f"{link.latency * 1e6:.0f} us, {link.bandwidth / factor:.3g} {unit}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
