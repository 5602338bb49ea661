"""What each device holds in a training step: weights, slots, the batch, and what the step makes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.memory.estimation.batch import split
from tfdist.memory.estimation.execution_order import as_made, newest_first
from tfdist.memory.estimation.liveness import Usage, simulate
from tfdist.memory.estimation.operation import Operation
from tfdist.memory.estimation.traced_graph import bytes_of, operations_of, short_device
from tfdist.memory.estimation.traced_step import TracedStep, compute_devices, trace_step
from tfdist.strategies.replica_values import parts_of_variable


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What one device holds in a training step; all sizes in bytes.

    Attributes:
        device: such as "GPU:0".
        weights: of the model's variables.
        slots: of the optimizer's.
        batch: of the inputs and targets of a replica.
        step: what the step makes, at its peak: activations, gradients, and what is computed on the way.
        at_peak: what that is, by block of the model; and gradients of weights, optimizer, loss and metrics.
        timeline: what the step has made, in the same way, after each operation.
        measured: `step`, measured; `None` where it was not.
    """

    device: str
    weights: int
    slots: int
    batch: int
    step: int
    at_peak: dict[str, int]
    timeline: list[dict[str, int]] = dataclasses.field(repr=False)
    measured: int | None = None

    @property
    def total(self) -> int:
        """All of it, at the peak of the step."""
        return self.weights + self.slots + self.batch + self.step


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A training step, and what each device holds in it.

    Attributes:
        traced: the step.
        operations: of its graph.
        devices: those that hold something, those of the replicas first.
    """

    traced: TracedStep
    operations: Sequence[Operation]
    devices: Sequence[DeviceMemory]


def estimate(model: keras.Model, batch: Any) -> Estimate:
    """Traces a training step, and runs through its operations.

    Args:
        model: a compiled model.
        batch: specifications of a global batch.
    """
    replicas = compute_devices(model)
    on_each = split(batch, model.distribute_strategy.num_replicas_in_sync)
    traced = trace_step(model, on_each)
    operations = operations_of(traced.graph, replicas[0], lambda op: traced.labels[op.name])
    # Which of the orders is nearer to what happens is not known; rather too much than too little.
    usages = max((simulate(operations, order(operations)) for order in (as_made, newest_first)), key=_most)
    weights = _bytes_by_device(part for variable in model.variables for part in parts_of_variable(variable))
    known = {
        id(part) for variable in (*model.variables, *model.metrics_variables) for part in parts_of_variable(variable)
    }
    slots = _bytes_by_device(variable for variable in traced.graph.variables if id(variable) not in known)
    rows = sum(bytes_of(spec) for spec in tf.nest.flatten(on_each) if spec is not None)
    devices = dict.fromkeys([*replicas, *sorted({*usages, *weights, *slots})])
    return Estimate(
        traced,
        operations,
        [_memory(name, weights[name], slots[name], rows * (name in replicas), usages.get(name)) for name in devices],
    )


def _most(usages: dict[str, Usage]) -> int:
    return sum(usage.peak for usage in usages.values())


def _memory(device: str, weights: int, slots: int, batch: int, usage: Usage | None) -> DeviceMemory:
    usage = usage or Usage()
    return DeviceMemory(device, weights, slots, batch, usage.peak, usage.at_peak, usage.timeline)


def _bytes_by_device(variables: Iterable[tf.Variable]) -> Counter[str]:
    found: Counter[str] = Counter()
    for variable in variables:
        found[short_device(variable.device)] += variable.shape.num_elements() * variable.dtype.size
    return found
