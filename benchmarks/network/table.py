"""The table of `benchmarks.network`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from benchmarks import markdown
from benchmarks.network.links import NETWORKS


def table(found: Mapping) -> str:
    """A line for each training; times are compared with those of one process, and of the link alone."""
    header = [
        "network",
        "",
        "compression",
        "ms a step",
        "MB sent",
        "of them on the link, ms",
        "step / longer of the two",
        "hidden",
    ]
    alone = {peer: statistics.median(one["ms"]) for peer, one in found["alone"].items()}
    rows = [["one process", peer, "", f"{ms:.0f}", "", "", "", ""] for peer, ms in alone.items()]
    for record in found["records"]:
        network, compute = NETWORKS[record["network"]], alone[record["peer"]]
        sent, step = statistics.median(record["bytes"]), statistics.median(record["ms"])
        link = 8 * sent / (1e3 * network.megabits)
        hidden = (compute + link - step) / min(compute, link)
        rows.append(
            [
                network.title,
                record["peer"],
                record["method"],
                markdown.spread(record["ms"], 0),
                f"{sent / 1e6:.2f}",
                f"{link:.0f}",
                f"{step / max(compute, link):.2f}",
                f"{max(0.0, hidden):.0%}",
            ]
        )
    return markdown.table(header, rows, left=3)
