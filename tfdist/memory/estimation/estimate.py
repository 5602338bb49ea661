"""What each device holds in a training step: weights, slots, the batch, and what the step makes.

`estimate` reads it from the graph of the step; `measure` runs steps and asks TensorFlow's allocator.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfdist.inspection.model_parts import optimizers_of, seed_generators_of
from tfdist.inspection.replica_values import parts_of_variable
from tfdist.memory.estimation.batch import map_rows
from tfdist.memory.estimation.liveness import Operation, Usage, as_made, newest_first, simulate
from tfdist.memory.estimation.trace import (
    TracedStep,
    bytes_of,
    compute_devices,
    operations_of,
    short_device,
    trace_step,
)

_STEPS = 3
# Bytes. Some allocators of CPUs count large tensors only.
_SOME = 1024


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What one device holds in a training step; all sizes in bytes.

    Attributes:
        device: such as "GPU:0".
        weights: of the model's variables.
        slots: of the optimizer's.
        batch: of the inputs and targets of a replica.
        step: of the tensors that the step makes, at its peak: activations, gradients and intermediate results.
        at_peak: the same by block of the model, and for gradients of weights, optimizer, loss and metrics.
        timeline: the same after each operation of the step.
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
    """Traces a training step for a global batch of these specifications, and runs through its operations."""
    replicas = compute_devices(model)
    sharing = model.distribute_strategy.num_replicas_in_sync
    # The replica with the most rows.
    on_each = map_rows(batch, lambda rows: -(-rows // sharing))
    traced = trace_step(model, on_each)
    operations = operations_of(traced.graph, replicas[0], lambda op: traced.labels[op.name])
    # Either order may be nearer to what happens. The larger peak is taken: too much is safer than too little.
    usages = max((simulate(operations, order(operations)) for order in (as_made, newest_first)), key=_sum_of_peaks)
    weights = _bytes_by_device(part for variable in model.variables for part in parts_of_variable(variable))
    known = {
        id(part) for variable in (*model.variables, *model.metrics_variables) for part in parts_of_variable(variable)
    }
    slots = _bytes_by_device(variable for variable in traced.graph.variables if id(variable) not in known)
    rows = sum(bytes_of(spec) for spec in tf.nest.flatten(on_each) if spec is not None)
    devices = []
    for name in dict.fromkeys([*replicas, *sorted({*usages, *weights, *slots})]):
        usage = usages.get(name, Usage())
        resident = weights[name], slots[name], rows * (name in replicas)
        devices.append(DeviceMemory(name, *resident, usage.peak, usage.at_peak, usage.timeline))
    return Estimate(traced, operations, devices)


def _sum_of_peaks(usages: dict[str, Usage]) -> int:
    return sum(usage.peak for usage in usages.values())


def _bytes_by_device(variables: Iterable[tf.Variable]) -> Counter[str]:
    found: Counter[str] = Counter()
    for variable in variables:
        found[short_device(variable.device)] += variable.shape.num_elements() * variable.dtype.size
    return found


def measure(model: keras.Model, batch: Any) -> dict[str, int]:
    """Runs a few steps on zeros, and measures all but the first; weights, slots and metrics are put back.

    Args:
        model: a compiled and built model.
        batch: specifications of `(x, y)` or `(x, y, sample_weight)`, of all replicas together.

    Returns:
        For each device whose memory TensorFlow counts ("GPU:0"), bytes at the peak of a step, besides what is in use
        before it; the median of the steps.

    Raises:
        RuntimeError: if TensorFlow counts the memory of no device, or of none for itself.
    """
    devices = _counted()
    variables = [*model.variables, *model.metrics_variables, *(g.state for g in seed_generators_of(model))]
    variables += [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]
    saved = [np.array(variable) for variable in variables]
    before = model.train_function
    peaks: dict[str, list[int]] = {device: [] for device in devices}
    try:
        # The method of the class: that of a model with mode "auto" would choose modes now.
        type(model).make_train_function(model, force=True)
        data = tf.data.Dataset.from_tensors(tree.map_structure(_zeros, batch))
        iterator = iter(model.distribute_strategy.experimental_distribute_dataset(data.repeat()))
        for _ in range(1 + _STEPS):
            held = {}
            for device in devices:
                tf.config.experimental.reset_memory_stats(device)
                held[device] = tf.config.experimental.get_memory_info(device)["current"]
            logs = model.train_function(iterator)
            tree.map_structure(np.asarray, logs)  # waits for the end
            for device in devices:
                peaks[device].append(tf.config.experimental.get_memory_info(device)["peak"] - held[device])
    finally:
        model.train_function = before
        for variable, value in zip(variables, saved, strict=True):
            variable.assign(value)
    return {device: sorted(found[1:])[_STEPS // 2] for device, found in peaks.items()}


def _zeros(spec: tf.TensorSpec | None) -> tf.Tensor | None:
    return None if spec is None else tf.zeros(spec.shape, spec.dtype)


def _counted() -> list[str]:
    """The devices whose memory TensorFlow counts: GPUs, and a CPU with a certain allocator."""
    # In a cluster TensorFlow lists the devices of all tasks. A short name stands for the device of this process.
    found = list(dict.fromkeys(short_device(device.name) for device in tf.config.list_logical_devices()))
    counted = [device for device in found if device.startswith(("GPU", "CPU")) and _is_counted(device)]
    shared = sum(device.startswith("CPU") for device in counted or found) > 1
    if not counted or shared:
        reasons = ["whose memory TensorFlow does not count"] if not counted else []
        reasons += ["which share one allocator"] if shared else []
        raise RuntimeError(
            f"Received: measured=True with {', '.join(counted or found)}, {' and '.join(reasons)}. Expected: a GPU; "
            "or, on a CPU, a single logical device, and TF_CPU_ALLOCATOR_USE_BFC=1 in the environment before "
            "TensorFlow is imported."
        )
    return counted


def _is_counted(device: str) -> bool:
    try:
        before = tf.config.experimental.get_memory_info(device)["current"]
        with tf.device(device):
            some = tf.zeros([_SOME], tf.uint8)
        return tf.config.experimental.get_memory_info(device)["current"] >= before + some.shape[0]
    except (ValueError, tf.errors.OpError):
        return False
