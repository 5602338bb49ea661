"""How many images, or tokens, a second?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks import markdown
from benchmarks.children import Children, say

PLAIN = "plain Keras"
# By the arguments of what is measured, as `worker` reads them.
VARIANTS = {
    PLAIN: {},
    "MirroredStrategy": {"strategy": "Mirrored"},
    "MirroredStrategy on two halves of it": {"strategy": "Mirrored", "halves": True},
    "PipelineStrategy on two halves of it": {"strategy": "Pipeline", "halves": True},
    "HostOffloadStrategy": {"strategy": "HostOffload"},
    'memory="recompute"': {"strategy": "Mirrored", "memory": "recompute"},
    'memory="swap"': {"strategy": "Mirrored", "memory": "swap"},
    "plain Keras, XLA": {"jit_compile": True},
    "MirroredStrategy, XLA": {"strategy": "Mirrored", "jit_compile": True},
}


def of(model: str) -> Callable[[Children, int, bool], list[dict]]:
    """What measures a model: one record for each variant, with all windows of all samples."""

    def measure(children: Children, samples: int, quick: bool) -> list[dict]:
        records = [{"variant": name, "rates": [], "unit": "", "peak": None} for name in VARIANTS]
        # In turns: a clock that changes changes it for all.
        for _ in range(samples):
            for record in records:
                settings = {"model": model, "quick": quick, **VARIANTS[record["variant"]]}
                found = children.python(f"{__package__}.worker", settings, children.cores)
                record["rates"] += found["rates"]
                record |= {"unit": found["unit"], "device": found["device"], "peak": found["peak"]}
                say(f"{model}, {record['variant']}: {statistics.median(found['rates']):,.0f} {found['unit']} a second")
        return records

    return measure


def table(records: Sequence[Mapping]) -> str:
    """Each variant beside plain Keras of the same kind, whose step XLA compiles or does not."""
    plain = {"XLA" in record["variant"]: record for record in records if record["variant"].startswith(PLAIN)}
    rows = []
    for record in records:
        base = statistics.median(plain["XLA" in record["variant"]]["rates"])
        slower = 100 * (base / statistics.median(record["rates"]) - 1)
        peak = "" if record["peak"] is None else f"{record['peak'] / 2**30:.2f}"
        speed = markdown.spread(record["rates"], decimals=0)
        rows.append([record["variant"], speed, "" if record["variant"].startswith(PLAIN) else f"{slower:+.1f} %", peak])
    header = ["", f"{records[0]['unit']} a second", "time beside plain Keras", "peak, GiB"]
    return f"On {records[0]['device']}:\n\n{markdown.table(header, rows, left=1)}"
