"""The results as Markdown. Pure functions of the records."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from benchmarks.data_parallel.measure import Summary
from benchmarks.markdown import spread, table
from benchmarks.sharded.variants import PLAIN, TITLES


def steps(records: Sequence[Mapping]) -> str:
    """A line for each variant: times of two processes, beside the same framework's plain training, and PyTorch's."""
    header = ["", "1 process, ms", "2 processes, ms", "/ plain", "/ PyTorch's", "Drift"]
    found = {_key(r): r["samples_ms"] for r in records}
    lines = []
    for framework, processes, variant in found:
        if processes == 1:
            continue
        rounds, plain = found[framework, 2, variant], found[framework, 2, PLAIN]
        alone = found[framework, 1, PLAIN] if variant == PLAIN else []
        peer, own = found.get(("torch", 2, variant)), Summary.of(rounds)
        # Of windows that were measured right after each other.
        ratios = [mine / other for pair in zip(rounds, plain, strict=True) for mine, other in zip(*pair, strict=True)]
        lines.append(
            [
                TITLES[framework][variant],
                spread([*itertools.chain(*alone)], 0) if alone else "",
                spread([*itertools.chain(*rounds)], 0),
                "" if variant == PLAIN else spread(ratios),
                f"{own.median / Summary.of(peer).median:.2f}" if peer and framework != "torch" else "",
                f"{own.drift:.2f}",
            ]
        )
    return f"{records[0]['rows']} sequences of 128 tokens a process:\n\n{table(header, lines, left=1)}"


def sent(records: Sequence[Mapping]) -> str:
    """A line for each variant."""
    plain = {r["framework"]: r["sent"] for r in records if r["variant"] == PLAIN}
    lines = [
        [TITLES[r["framework"]][r["variant"]], f"{r['sent'] / 1e6:.1f}", f"{r['sent'] / plain[r['framework']]:.2f}"]
        for r in records
    ]
    return table(["", "MB a step", "/ plain"], lines, left=1)


def memory(records: Sequence[Mapping]) -> str:
    """A line for each variant and number of processes, without what a process with a tiny model has."""
    header = ["", "Processes", "Variables, MB", "/ plain", "Between steps, MB", "/ plain", "Peak, MB", "/ plain"]
    tiny = {(r["framework"], r["variant"]): r for r in records if r["shape"] == "tiny"}
    full = [r for r in records if r["shape"] == "full"]
    plain = {r["framework"]: r for r in full if r["variant"] == PLAIN}
    lines = []
    for r in full:
        cells = []
        for kind in ("held", "between", "peak"):
            own, whole = (x[kind] - tiny[x["framework"], x["variant"]][kind] for x in (r, plain[r["framework"]]))
            cells += [f"{own / 1e6:.0f}", f"{own / whole:.2f}"]
        lines.append([TITLES[r["framework"]][r["variant"]], str(r["processes"]), *cells])
    return table(header, lines, left=1)


def _key(record: Mapping) -> tuple[str, int, str]:
    return record["framework"], record["processes"], record["variant"]
