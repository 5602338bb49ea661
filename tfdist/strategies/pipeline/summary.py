"""What a pipeline looks like, as text: its stages, its schedule, and what to expect of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tfdist.plain_text import plain_text

_UNITS = ("", "K", "M", "G", "T", "P")


@dataclasses.dataclass(frozen=True)
class StageSummary:
    """One stage, or one of the chunks of an interleaved schedule.

    Attributes:
        device: where it runs.
        layers: names of its calls, in order.
        parameters: number of its parameters.
        parameter_bytes: their size.
        flops: what its forward computation costs, in any unit: it is shown as a share.
        sent_bytes: bytes per row that go from it to later stages.

    Example:
        >>> StageSummary("GPU:0", ["conv1", "conv2"], 1200, 4800, 2e9, 65536).layers[-1]
        'conv2'
    """

    device: str
    layers: Sequence[str]
    parameters: int
    parameter_bytes: float
    flops: float
    sent_bytes: float


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """How a pipeline runs its stages.

    Attributes:
        schedule: name of the schedule.
        micro_batches: number of micro-batches of a step.
        rows: rows of a micro-batch; `None`: not known.
        bubble: ideal share of time in which devices wait, from 0 to 1.
        speed_up: predicted by simulation with the stages' costs; None: not shown.
        replicas: number of copies of the pipeline that share a step.
        devices: of one pipeline, if not as many as the stages name.

    Example:
        >>> RunSummary("1f1b", micro_batches=8, rows=4, bubble=1 / 9).replicas
        1
    """

    schedule: str
    micro_batches: int
    rows: int | None
    bubble: float
    speed_up: float | None = None
    replicas: int = 1
    devices: int | None = None


def summary(stages: Sequence[StageSummary], run: RunSummary, width: int = 100) -> str:
    """A table of the stages, and below it the schedule and what to expect.

    Args:
        stages: stages in order.
        run: how they run.
        width: of the text, in characters.

    Raises:
        ValueError: if there are no stages.

    Example:
        >>> stages = [StageSummary(f"GPU:{i}", [f"dense_{i}"], 1000, 4000, 1e6, 400 * (1 - i)) for i in range(2)]
        >>> print(summary(stages, RunSummary("gpipe", 4, 8, bubble=1 / 5), width=80).splitlines()[-1])
        Effective batch: 4 micro-batches x 8 rows = 32 rows per step
    """
    if not stages:
        raise ValueError("The pipeline has no stages, but a summary needs at least one: cut the model first.")
    table = Table(box=SIMPLE_HEAD, show_footer=True, pad_edge=False, padding=(0, 1, 0, 0))
    total = sum(stage.flops for stage in stages)
    table.add_column("Stage", justify="right", no_wrap=True)
    table.add_column("Device", overflow="fold")
    table.add_column("Layers", overflow="fold")
    table.add_column("Calls", str(sum(len(s.layers) for s in stages)), justify="right", no_wrap=True)
    table.add_column("Parameters", f"{sum(s.parameters for s in stages):,}", justify="right", no_wrap=True)
    table.add_column("Size", _size(sum(s.parameter_bytes for s in stages)), justify="right", no_wrap=True)
    table.add_column("FLOPs", justify="right", no_wrap=True)
    table.add_column("Sent/row", justify="right")
    for number, stage in enumerate(stages):
        table.add_row(
            str(number),
            Text(stage.device),
            Text(_layers(stage.layers)),
            str(len(stage.layers)),
            f"{stage.parameters:,}",
            _size(stage.parameter_bytes),
            f"{stage.flops / total:.1%}" if total else "-",
            _size(stage.sent_bytes) if stage.sent_bytes else "-",
        )
    lines = _lines(run.devices or len({stage.device for stage in stages}), len(stages), run)
    return plain_text(table, *map(Text, lines), width=width)


def _lines(devices: int, stages: int, run: RunSummary) -> list[str]:
    chunks = stages // devices
    formula = "(K - 1) / (M + K - 1)" if chunks == 1 else "(K - 1) / (V M + K - 1)"
    numbers = f"K = {devices} devices, M = {run.micro_batches}" + (f", V = {chunks} chunks" if chunks > 1 else "")
    copies = f"{run.replicas} replicas x " if run.replicas > 1 else ""
    rows = "" if run.rows is None else f" of {run.rows} rows"
    batch = f"the batch of fit, in {copies}{run.micro_batches} micro-batches"
    if run.rows is not None:
        total = run.replicas * run.micro_batches * run.rows
        batch = f"{copies}{run.micro_batches} micro-batches x {run.rows} rows = {total} rows per step"
    lines = [
        f"Schedule: {run.schedule}, {run.micro_batches} micro-batches{rows}",
        f"Bubble: {run.bubble:.1%} = {formula}, {numbers}",
        f"Effective batch: {batch}",
    ]
    if run.speed_up is not None:
        lines.insert(2, f"Predicted speed-up: {run.speed_up:.2f} x one device (at most {devices * run.replicas})")
    return lines


def _layers(names: Sequence[str]) -> str:
    if len(names) <= 1:
        return "".join(names) or "-"
    return f"{names[0]} … {names[-1]}"


def _size(size: float) -> str:
    """Bytes with a decimal prefix, in at most three digits."""
    exponent = 0
    while size >= 999.5 and exponent < len(_UNITS) - 1:
        size, exponent = size / 1000, exponent + 1
    return f"{size:.3g} {_UNITS[exponent]}B"
