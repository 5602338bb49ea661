"""What `PipelineStrategy.summary` tells about a plan."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfdist.strategies.pipeline.plan import PipelinePlan
from tfdist.strategies.pipeline.simulation import simulate, speed_up
from tfdist.strategies.pipeline.summary import RunSummary, StageSummary, summary

# Back-propagation makes two products for each one of the forward pass; three with the forward pass made again.
_BACKWARD, _RECOMPUTE = 2.0, 3.0


def describe(plan: PipelinePlan, rows: int | None, width: int) -> str:
    """The stages of a plan, and what to expect of it, as text.

    Args:
        plan: the plan.
        rows: of a batch; `None` if that is not known.
        width: of the text, in characters.
    """
    flops = [sum(cost.flops for cost in plan.costs_of_chunk(chunk.index)) for chunk in plan.chunks]
    forward = [value / max(sum(flops), 1.0) for value in flops]
    factors = [_RECOMPUTE if recompute else _BACKWARD for recompute in plan.recompute]
    backward = [value * factor for value, factor in zip(forward, factors, strict=True)]
    schedule = plan.schedule
    # As many times faster than one device, which need not recompute.
    once = schedule.microbatches * sum((1 + _BACKWARD) * value for value in forward)
    busy = schedule.microbatches * sum(f + b for f, b in zip(forward, backward, strict=True))
    predicted = speed_up(simulate(schedule, forward, backward)) * once / busy if busy else 1.0
    run = RunSummary(
        schedule.name,
        schedule.microbatches,
        None if rows is None else math.ceil(rows / schedule.microbatches / plan.replicas),
        schedule.bubble(),
        predicted * plan.replicas,
        plan.replicas,
        len(plan.devices),
    )
    return summary([_stage(plan, chunk, value) for chunk, value in zip(plan.chunks, flops, strict=True)], run, width)


def _stage(plan: PipelinePlan, chunk: Any, flops: float) -> StageSummary:
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
