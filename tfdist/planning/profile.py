"""What a training step of a model costs, as numbers, and how they are read from its graphs without running them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.layer_graph.chunk import uncuttable
from tfdist.layer_graph.costs import costs_of, crossing, flops_of, weights
from tfdist.layer_graph.graph import flatten, functional_of
from tfdist.memory.budget import BlockCost, block_costs
from tfdist.memory.estimate import OPTIMIZER, VIEWS, Estimate, batch_from, bytes_of, estimate, map_rows
from tfdist.memory.modes import plan_of, under
from tfdist.memory.plan import GraphPlan
from tfdist.memory.policy import GatherPolicy
from tfdist.planning.hardware import Device

# A step is traced for the whole batch, and for one that is smaller by this factor.
_SMALLER = 4
_ROWS = 16
_LOOPS = ("While", "StatelessWhile")


class StepCost(NamedTuple):
    """What a part of a step costs.

    Attributes:
        flops: floating-point operations.
        bytes: read and written by all operations.
        operations: how many there are.

    Example:
        >>> device = Device(flops=1e9, bandwidth=1e9, operation=1e-6, memory=10**9)
        >>> round(StepCost(flops=1e6, bytes=2e6, operations=1000).seconds(device), 6)
        0.004
    """

    flops: float
    bytes: float
    operations: float

    def seconds(self, device: Device) -> float:
        """How long it takes, if computing, reading and starting operations do not overlap."""
        return self.flops / device.flops + self.bytes / device.bandwidth + self.operations * device.operation


class Sample(NamedTuple):
    """A step for a number of rows, on one device.

    Attributes:
        rows: of the batch.
        compute: forward and backward pass.
        update: of the weights.
        batch: bytes of the inputs and targets.
        peak: the most bytes that the step's results take at a time.
        blocks: what each block of the model keeps and computes.
    """

    rows: float
    compute: StepCost
    update: StepCost
    batch: float
    peak: float
    blocks: Sequence[BlockCost]


@dataclasses.dataclass(frozen=True)
class LayerProfile:
    """One call of a layer.

    Attributes:
        name: of the layer.
        work: operations of the forward pass of a row, plus ten for each byte of its output.
        parameters: bytes of its variables; of shared ones only in the first call that uses them.
        outputs: bytes of its output for a row.
        arrives: bytes that a cut before it would send for a row.
        cuttable: whether the model may be cut before it.
    """

    name: str
    work: float
    parameters: float
    outputs: float
    arrives: float
    cuttable: bool = True


@dataclasses.dataclass(frozen=True)
class ModelProfile:
    """A model, its optimizer and its batch.

    Attributes:
        name: of the model.
        rows: of the global batch.
        weights: bytes of all variables.
        trainable: bytes of the trained ones, and so of the gradients.
        slots: bytes of the optimizer's variables.
        samples: a step with few rows, and one with all.
        layers: calls of layers in their order; empty if the model is no graph of layers and cannot be cut.
        normalizations: how many layers exchange batch statistics.
        gathered: bytes of the weights of each block that FullyShardedStrategy gathers, in their order.
    """

    name: str
    rows: int
    weights: float
    trainable: float
    slots: float
    samples: tuple[Sample, Sample]
    layers: Sequence[LayerProfile] = ()
    normalizations: int = 0
    gathered: Sequence[float] = ()

    def at(self, rows: float) -> Sample:
        """A step for another number of rows: all numbers are linear in them, with a constant part."""
        few, many = self.samples
        share = (rows - few.rows) / (many.rows - few.rows) if many.rows > few.rows else 1.0

        def between(a: Any, b: Any) -> Any:
            return b if isinstance(b, str) else max(a + share * (b - a), 0.0)

        return tf.nest.map_structure(between, few, many)


def profile_of(model: keras.Model, batch_size: int | None = None, data: Any = None) -> ModelProfile:
    """Traces a step for the whole batch, and a step for a part of it.

    Args:
        model: a compiled model under no strategy.
        batch_size: rows of the global batch.
        data: a batch `(x, y)` or `(x, y, sample_weight)` of arrays, or their specifications, instead.

    Raises:
        ValueError: if a step cannot be traced.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(5, use_bias=False)])
        >>> model.compile("sgd", "mse")
        >>> profile_of(model, 32).trainable
        200.0
    """
    samples = []
    # A policy of the model must not change what is estimated: the plan adds recomputation itself.
    with batch_from(model, "plan", batch_size, data) as batch, under(model, None):
        rows = next(spec.shape[0] for spec in tf.nest.flatten(batch) if spec is not None)
        for count in (max(1, rows // _SMALLER), rows):
            estimated = estimate(model, with_rows(batch, count))
            samples.append(_sample(count, estimated))
    device = estimated.devices[0]
    layers = layers_of(model)
    if any(op.type in _LOOPS for op in estimated.graph.get_operations()):
        samples = [_with_loops(sample, layers) for sample in samples]
    return ModelProfile(
        model.name,
        rows,
        float(device.weights),
        float(sum(_size(variable) for variable in model.trainable_variables)),
        float(device.slots),
        (samples[0], samples[1]),
        layers,
        sum(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers()),
        gathered_blocks(model),
    )


def gathered_blocks(model: keras.Model) -> list[float]:
    """Bytes of the weights of each block that FullyShardedStrategy gathers; what is in no block is gathered at the end.

    Example:
        >>> layers = [keras.layers.Dense(10, use_bias=False) for _ in range(3)]
        >>> gathered_blocks(keras.Sequential([keras.Input((10,)), *layers]))
        [400.0, 400.0, 400.0]
    """
    # Layers that are frozen are split, too, but not weights that were made without `trainable`.
    split = {id(v): float(_size(v)) for layer in model._flatten_layers() for v in layer._trainable_variables}
    plan = plan_of(model, GatherPolicy())
    if isinstance(plan, GraphPlan):
        blocks = [(*chunk.trainable, *chunk.state) for chunk in plan.chunks]
    else:
        blocks = [layer.variables for layer in plan.layers]
    sizes = [sum(split.get(id(variable), 0.0) for variable in block) for block in blocks]
    rest = sum(split.values()) - sum(split.get(key, 0.0) for key in {id(v) for block in blocks for v in block})
    return [size for size in (*sizes, rest) if size]


def _sample(rows: int, estimated: Estimate) -> Sample:
    """The costs of a traced step. Operations of the optimizer are told from the others by their labels."""
    (device, *_) = estimated.devices
    used = {operation.name for operation in estimated.operations}
    parts: dict[bool, list[tf.Operation]] = {True: [], False: []}
    for operation in estimated.graph.get_operations():
        if operation.name in used and operation.type not in VIEWS:
            parts[estimated.labels[operation.name] == OPTIMIZER].append(operation)
    blocks = block_costs(estimated) if estimated.forward else []
    return Sample(rows, cost_of(parts[False]), cost_of(parts[True]), device.batch, device.step, blocks)


def cost_of(operations: Sequence[tf.Operation]) -> StepCost:
    """What operations of a graph with known shapes compute, read and write."""
    moved = sum(bytes_of(tensor) for op in operations for tensor in (*op.inputs, *op.outputs))
    return StepCost(float(sum(map(flops_of, operations))), float(moved), float(len(operations)))


def _with_loops(sample: Sample, layers: Sequence[LayerProfile]) -> Sample:
    """The graph has the body of a loop once. The layers' work is a better estimate; backward is twice forward."""
    flops = max(sample.compute.flops, 3 * sample.rows * sum(layer.work for layer in layers))
    return sample._replace(compute=sample.compute._replace(flops=flops))


def layers_of(model: keras.Model) -> list[LayerProfile]:
    """The calls of a built model's layers; none if it is no graph of layers."""
    functional = functional_of(model)
    if functional is None:
        return []
    graph = flatten(functional)
    costs, closed = costs_of(graph, _ROWS), uncuttable(graph)
    return [
        LayerProfile(
            call.name, work / _ROWS, cost.parameter_bytes, cost.output_bytes / _ROWS, sent, position not in closed
        )
        for position, (call, work, cost, sent) in enumerate(
            zip(graph.calls, weights(costs, "flops"), costs, crossing(graph), strict=True)
        )
    ]


def with_rows(batch: Any, rows: int) -> Any:
    """Specifications of a batch with another number of rows."""
    return map_rows(batch, lambda _: rows)


def _size(variable: keras.Variable) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
