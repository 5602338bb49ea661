"""Trace files of pipelined steps, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.strategies.pipeline.simulation import Interval


def write_trace(
    path: str | os.PathLike[str], measured: Sequence[Interval] | None, predicted: Sequence[Interval]
) -> None:
    """Writes a measured and a predicted step as Chrome trace events: two processes, with a thread for each stage.

    Both begin at 0, so that they can be compared.

    Args:
        path: file to write, usually with the ending `.json`.
        measured: what was measured; None or empty: nothing was.
        predicted: what was simulated.

    Raises:
        OSError: if the file cannot be written.

    Example:
        >>> from tfdist.strategies.pipeline.schedule import gpipe
        >>> from tfdist.strategies.pipeline.simulation import simulate
        >>> write_trace("step.json", None, simulate(gpipe(2, 4), [0.01, 0.01], [0.02, 0.02]))
    """
    events = [*_events(1, "measured", measured or ()), *_events(2, "predicted", predicted)]
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n", encoding="utf-8")


def _events(process: int, name: str, intervals: Sequence[Interval]) -> list[dict[str, Any]]:
    if not intervals:
        return []
    events = [
        _metadata(process, 0, "process_name", name=name),
        _metadata(process, 0, "process_sort_index", sort_index=process),
    ]
    for device in sorted({interval.device for interval in intervals}):
        events.append(_metadata(process, device, "thread_name", name=f"stage {device}"))
        events.append(_metadata(process, device, "thread_sort_index", sort_index=device))
    zero = min(interval.begin for interval in intervals)
    for device, instruction, begin, end in intervals:
        events.append(
            {
                "ph": "X",
                "pid": process,
                "tid": device,
                "name": f"{instruction.kind} {instruction.microbatch}",
                "cat": instruction.kind,
                "ts": (begin - zero) * 1e6,
                "dur": (end - begin) * 1e6,
                "args": {"chunk": instruction.chunk, "microbatch": instruction.microbatch},
            }
        )
    return events


def _metadata(process: int, thread: int, what: str, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": arguments}
