"""Reads what a step costs from a model's graphs, without running them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.layer_graph.chunk import uncuttable
from tfdist.layer_graph.costs import costs_of, crossing, flops_of, weights
from tfdist.layer_graph.graph import flatten, functional_of
from tfdist.memory.application import under
from tfdist.memory.estimation.batch import assumed, batch_of, specifications_of
from tfdist.memory.estimation.block_costs import block_costs
from tfdist.memory.estimation.checks import check_estimable, check_one_batch
from tfdist.memory.estimation.estimate import Estimate, estimate
from tfdist.memory.estimation.traced_graph import VIEWS, bytes_of
from tfdist.memory.estimation.traced_step import OPTIMIZER
from tfdist.planning.profile import LayerProfile, ModelProfile, Sample, StepCost

# How much smaller the other batch is for which a step is traced.
_SMALLER = 4
_ROWS = 16
_LOOPS = ("While", "StatelessWhile")


def profile_of(model: keras.Model, batch_size: int | None = None, data: Any = None) -> ModelProfile:
    """Traces a step for the whole batch, and one for a part of it.

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
    check_one_batch(batch_size, data)
    batch = None if data is None else specifications_of(data)
    check_estimable(model, "plan", batch)
    if batch is None:
        batch = batch_of(model, batch_size)
        with assumed(batch):
            return _profile(model, batch)
    return _profile(model, batch)


def _profile(model: keras.Model, batch: Any) -> ModelProfile:
    rows = next(spec.shape[0] for spec in tf.nest.flatten(batch) if spec is not None)
    samples, estimated = [], None
    for count in (max(1, rows // _SMALLER), rows):
        estimated = _estimate(model, with_rows(batch, count))
        samples.append(_sample(count, estimated))
    device = estimated.devices[0]
    layers = layers_of(model)
    notes = []
    if any(op.type in _LOOPS for op in estimated.traced.graph.get_operations()):
        notes.append("what recurrent layers compute in their loops is estimated by their parameters")
        samples = [_with_loops(sample, layers) for sample in samples]
    if model.jit_compile:
        notes.append("XLA merges operations: a compiled step takes less time and memory than predicted")
    if not layers:
        notes.append("the model is no graph of layers: it cannot be cut into stages")
    return ModelProfile(
        model.name,
        rows,
        float(device.weights),
        float(sum(_size(variable) for variable in model.trainable_variables)),
        float(device.slots),
        (samples[0], samples[1]),
        layers,
        sum(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers()),
        notes,
    )


def _estimate(model: keras.Model, batch: Any) -> Estimate:
    with under(model, None):
        return estimate(model, batch)


def _sample(rows: int, estimated: Estimate) -> Sample:
    (device, *_) = estimated.devices
    used = {operation.name for operation in estimated.operations}
    parts: dict[bool, list[tf.Operation]] = {True: [], False: []}
    for operation in estimated.traced.graph.get_operations():
        if operation.name in used and operation.type not in VIEWS:
            parts[estimated.traced.labels[operation.name] == OPTIMIZER].append(operation)
    blocks = block_costs(estimated) if estimated.traced.forward else []
    return Sample(rows, cost_of(parts[False]), cost_of(parts[True]), device.batch, device.step, blocks)


def cost_of(operations: Sequence[tf.Operation]) -> StepCost:
    """What operations compute, read and write.

    Args:
        operations: of a graph whose shapes are known.
    """
    moved = sum(bytes_of(tensor) for op in operations for tensor in (*op.inputs, *op.outputs))
    return StepCost(float(sum(map(flops_of, operations))), float(moved), float(len(operations)))


def _with_loops(sample: Sample, layers: Sequence[LayerProfile]) -> Sample:
    flops = max(sample.compute.flops, 3 * sample.rows * sum(layer.work for layer in layers))
    compute = StepCost(flops, sample.compute.bytes, sample.compute.operations)
    return Sample(sample.rows, compute, sample.update, sample.batch, sample.peak, sample.blocks)


def layers_of(model: keras.Model) -> list[LayerProfile]:
    """The calls of a model's layers; none if it is no graph of layers.

    Args:
        model: a model that is built.
    """
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

    def changed(spec: tf.TensorSpec | None) -> tf.TensorSpec | None:
        return None if spec is None else tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype)

    return tf.nest.map_structure(changed, batch)


def _size(variable: keras.Variable) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
