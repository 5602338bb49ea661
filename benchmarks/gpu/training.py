"""How many images, or tokens, a second?"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks import markdown
from benchmarks.asking import Answering, answering
from benchmarks.children import Children
from benchmarks.data_parallel.processes import Command, say

# Windows of each variant for one of the benchmark's samples.
_WINDOWS = 4
# Variants that are measured beside each other, by the arguments that `worker` reads: all of them have to fit into the
# GPU's memory. Each is compared with the first one.
GROUPS: dict[str, dict[str, dict]] = {
    "strategies": {
        "plain Keras": {},
        "MirroredStrategy": {"strategy": "Mirrored"},
        "MirroredStrategy on two halves of it": {"strategy": "Mirrored", "halves": True},
        "PipelineStrategy on two halves of it": {"strategy": "Pipeline", "halves": True},
    },
    "XLA": {
        "plain Keras": {"jit_compile": True},
        "MirroredStrategy": {"strategy": "Mirrored", "jit_compile": True},
    },
    "memory": {
        "plain Keras": {},
        "HostOffloadStrategy": {"strategy": "HostOffload"},
        'MirroredStrategy(memory="recompute")': {"strategy": "Mirrored", "memory": "recompute"},
        'MirroredStrategy(memory="swap")': {"strategy": "Mirrored", "memory": "swap"},
    },
}


def of(model: str, group: str) -> Callable[[Children, int, bool], list[dict]]:
    """What measures a model: one record for each variant of a group, with all its windows."""

    def measure(children: Children, samples: int, quick: bool) -> list[dict]:
        with contextlib.ExitStack() as stack:
            processes = {}
            for name, settings in GROUPS[group].items():
                words = json.dumps({"model": model, "quick": quick, **settings})
                commands = functools.partial(_command, words)
                processes[name] = stack.enter_context(answering(commands, children.deadline))
            return _measure(processes, 1 if quick else samples * _WINDOWS)

    return measure


def _command(settings: str, address: str) -> tuple[Command, ...]:
    # Unlike other benchmarks it hides no GPU, and takes no cores away from the process that feeds one. As several
    # processes use the GPU, none may take all of its memory.
    environ = {**os.environ, "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    words = (sys.executable, "-m", f"{__package__}.worker", settings, address)
    return (Command(words, environ, tuple(os.sched_getaffinity(0))),)


def _measure(processes: Mapping[str, Answering], windows: int) -> list[dict]:
    """Windows of all processes in turns: a clock that changes changes it for all."""
    for process in processes.values():
        process.begin("prepare")
    records = [{"variant": name, "rates": [], **p.result()} for name, p in processes.items()]
    # The first round is not counted.
    for counted in [False] + [True] * windows:
        for record in records:
            rate = processes[record["variant"]].ask("rate")
            record["rates"] += [rate] if counted else []
    for record in records:
        record["peak"] = processes[record["variant"]].ask("peak")
        rate = statistics.median(record["rates"])
        say(f"{record['variant']}: {rate:,.0f} {record['unit']} a second, peak {record['peak']}")
    return records


def table(records: Sequence[Mapping]) -> str:
    """Each variant beside the first one, plain Keras; windows of the same round are compared with each other."""
    header = ["", f"{records[0]['unit']} a second", "time beside plain Keras", "peak, GiB"]
    rows = markdown.table(header, [_row(record, records[0]) for record in records], left=1)
    return f"On {records[0]['device']}:\n\n{rows}"


def _row(record: Mapping, plain: Mapping) -> list[str]:
    slower = [100 * (base / rate - 1) for base, rate in zip(plain["rates"], record["rates"], strict=True)]
    beside = f"{statistics.median(slower):+.1f} % ({min(slower):+.1f} to {max(slower):+.1f})"
    peak = "" if record["peak"] is None else f"{record['peak'] / 2**30:.2f}"
    return [record["variant"], markdown.spread(record["rates"], decimals=0), "" if record is plain else beside, peak]
