"""Measures schedules, speed, memory and tracing of pipelines, and prints the tables."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from benchmarks.data_parallel import machine
from benchmarks.data_parallel.processes import TrialError
from benchmarks.data_parallel.table import fill
from benchmarks.pipeline import memory, real_compute, schedule_efficiency, tables, trace_cost
from benchmarks.pipeline.arguments import parse
from benchmarks.pipeline.children import Children, say
from benchmarks.process_files import busy_cores

README = Path(__file__).with_name("README.md")
# What a desktop's background takes.
_MOST_BUSY = 0.1

MEASURES: dict[str, Callable[[Children, int, bool], list[dict]]] = {
    "schedules": schedule_efficiency.measure,
    "compute": real_compute.measure,
    "memory": memory.measure,
    "tracing": trace_cost.measure,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a part failed, and 2 if the machine is busy."""
    options = parse(arguments)
    # As KeyboardInterrupt does: unwinds, so that the processes that measure are ended.
    signal.signal(signal.SIGTERM, _leave)
    keeps = options.results is not None
    results = json.loads(options.results.read_text()) if keeps and options.results.exists() else {}
    children, failed = Children(options.cores, options.deadline), False
    for part in options.parts:
        busy = busy_cores()
        if busy > _MOST_BUSY and not options.busy_anyway:
            say(
                f"{busy:.2f} cores are busy with other programs, expected at most {_MOST_BUSY}: times would be theirs, "
                "too. End them, or measure anyway by --busy-anyway."
            )
            return 2
        facts = {**machine.describe(options.cores), "busy_before": busy}
        began = time.monotonic()
        try:
            records = MEASURES[part](children, options.samples, options.quick)
        except TrialError as error:
            say(f"{part} failed: {error}")
            failed = True
            continue
        say(f"{part}: {time.monotonic() - began:.0f} s")
        results[part] = {"machine": facts, "records": records}
        if keeps:
            # After each part: what has been measured stays, whatever comes.
            options.results.write_text(json.dumps(results, indent=1) + "\n")
    report = tables.report(results)
    print(report)
    if options.write_readme:
        README.write_text(fill(README.read_text(), report))
    return 1 if failed else 0


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
