"""`PipelineStrategy.summary`: the stages of a plan, its schedule, and what to expect of it, as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tfdist.layer_graph.chunk import Chunk
from tfdist.plain_text import plain_text
from tfdist.strategies.pipeline.plan import PipelinePlan
from tfdist.strategies.pipeline.schedule import Schedule
from tfdist.strategies.pipeline.timeline import simulate, speed_up

# Cost of a backward pass, in forward passes: it computes two products for each one of the forward pass, and one more if
# it runs the forward pass again.
_BACKWARD, _RECOMPUTE = 2.0, 3.0
_UNITS = ("", "K", "M", "G", "T", "P")


class StageSummary(NamedTuple):
    """One stage, or one of the chunks of an interleaved schedule.

    Attributes:
        device: where it runs.
        layers: names of its calls, in order.
        parameters: number of its parameters.
        parameter_bytes: the size of its parameters.
        flops: the cost of its forward computation, in any unit: it is shown as a share.
        sent_bytes: bytes per row that go from it to later stages.
    """

    device: str
    layers: Sequence[str]
    parameters: int
    parameter_bytes: float
    flops: float
    sent_bytes: float


def describe(plan: PipelinePlan, rows: int | None, width: int) -> str:
    """The stages of a plan, and what to expect of it, as text.

    Args:
        plan: the plan.
        rows: the rows of a batch; `None` if that is not known.
        width: the width of the text, in characters.
    """
    schedule = plan.schedule
    flops = [sum(cost.flops for cost in plan.costs_of_chunk(chunk.index)) for chunk in plan.chunks]
    forward = [value / max(sum(flops), 1.0) for value in flops]
    factors = [_RECOMPUTE if recompute else _BACKWARD for recompute in plan.recompute]
    backward = [value * factor for value, factor in zip(forward, factors, strict=True)]
    # The speed-up against one device, which would not recompute: useful work (`once`), not all work (`busy`), counts.
    once = sum((1 + _BACKWARD) * value for value in forward)
    busy = sum(f + b for f, b in zip(forward, backward, strict=True))
    predicted = speed_up(simulate(schedule, forward, backward)) * once / busy if busy else 1.0
    stages = [_stage(plan, chunk, value) for chunk, value in zip(plan.chunks, flops, strict=True)]
    rows = None if rows is None else math.ceil(rows / schedule.microbatches / plan.replicas)
    return summary(stages, schedule, rows, predicted * plan.replicas, plan.replicas, width)


def summary(
    stages: Sequence[StageSummary], schedule: Schedule, rows: int | None, predicted: float, replicas: int, width: int
) -> str:
    """A table of the stages, and below it the schedule and what to expect.

    Args:
        stages: stages in order.
        schedule: in which order they work.
        rows: rows of a micro-batch; `None`: not known.
        predicted: the predicted speed-up of all pipelines together.
        replicas: number of pipelines that share a step.
        width: of the text, in characters.
    """
    table = Table(box=SIMPLE_HEAD, show_footer=True, pad_edge=False, padding=(0, 1, 0, 0))
    total = sum(stage.flops for stage in stages)
    numbers = {"justify": "right", "no_wrap": True}
    table.add_column("Stage", **numbers)
    table.add_column("Device", overflow="fold")
    table.add_column("Layers", overflow="fold")
    table.add_column("Calls", str(sum(len(s.layers) for s in stages)), **numbers)
    table.add_column("Parameters", f"{sum(s.parameters for s in stages):,}", **numbers)
    table.add_column("Size", _size(sum(s.parameter_bytes for s in stages)), **numbers)
    table.add_column("FLOPs", **numbers)
    table.add_column("Sent/row", justify="right")
    for number, stage in enumerate(stages):
        first, *others = stage.layers or "-"
        table.add_row(
            str(number),
            Text(stage.device),
            Text(f"{first} … {others[-1]}" if others else first),
            str(len(stage.layers)),
            f"{stage.parameters:,}",
            _size(stage.parameter_bytes),
            f"{stage.flops / total:.1%}" if total else "-",
            _size(stage.sent_bytes) if stage.sent_bytes else "-",
        )
    return plain_text(table, *map(Text, _lines(schedule, rows, predicted, replicas)), width=width)


def _lines(schedule: Schedule, rows: int | None, predicted: float, replicas: int) -> list[str]:
    devices, chunks, count = schedule.devices, schedule.chunks_per_device, schedule.microbatches
    formula = "(K - 1) / (M + K - 1)" if chunks == 1 else "(K - 1) / (V M + K - 1)"
    numbers = f"K = {devices} devices, M = {count}" + (f", V = {chunks} chunks" if chunks > 1 else "")
    copies = f"{replicas} replicas x " if replicas > 1 else ""
    if rows is None:
        of_rows, batch = "", f"the batch of fit, in {copies}{count} micro-batches"
    else:
        of_rows = f" of {rows} rows"
        batch = f"{copies}{count} micro-batches x {rows} rows = {replicas * count * rows} rows per step"
    return [
        f"Schedule: {schedule.name}, {count} micro-batches{of_rows}",
        f"Bubble: {schedule.bubble():.1%} = {formula}, {numbers}",
        f"Predicted speed-up: {predicted:.2f} x one device (at most {devices * replicas})",
        f"Effective batch: {batch}",
    ]


def _size(size: float) -> str:
    """Bytes with a decimal prefix, in at most three digits."""
    exponent = 0
    while size >= 999.5 and exponent < len(_UNITS) - 1:
        size, exponent = size / 1000, exponent + 1
    return f"{size:.3g} {_UNITS[exponent]}B"


def _stage(plan: PipelinePlan, chunk: Chunk, flops: float) -> StageSummary:
    variables = [v for v in (*chunk.trainable, *chunk.state) if plan.homes[id(v)] == chunk.index]
    later = {key for other in plan.chunks[chunk.index + 1 :] for key in other.inputs}
    return StageSummary(
        plan.device_of(chunk.index),
        [call.name for call in chunk.calls],
        sum(math.prod(v.shape) for v in variables),
        sum(math.prod(v.shape) * v._value.dtype.size for v in variables),
        flops,
        sum(_bytes_per_row(plan.graph.shapes[key]) for key in chunk.outputs if key in later),
    )


def _bytes_per_row(shape_and_dtype: tuple) -> float:
    shape, dtype = shape_and_dtype
    return math.prod(dimension or 1 for dimension in shape[1:]) * tf.as_dtype(dtype).size
