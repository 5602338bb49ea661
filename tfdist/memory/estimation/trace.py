"""Traces a training step for a batch that is never computed, and lists the operations of its graph.

`tfdist.memory.estimation.liveness` runs through the list.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import _DefaultDistributionStrategy, distribute_utils
from tfdist.inspection.model_parts import parts_of
from tfdist.memory.estimation.batch import symbolic
from tfdist.memory.estimation.liveness import Operation, as_made, simulate
from tfdist.memory.op_recorder import GRADIENT, block_finder, record_blocks, upstream
from tfdist.steps.keras_step import shadowed

# Operations whose outputs take no memory of their own: they show their first input, or what is always there.
VIEWS = frozenset(
    {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "Snapshot"}
    | {"ReadVariableOp", "Placeholder", "VarHandleOp", "Const", "Bitcast", "EnsureShape"}
)
# Kernels that write their result into an input, if nobody else reads that.
_IN_PLACE = frozenset(
    {"Add", "AddV2", "AddN", "Sub", "Mul", "RealDiv", "Maximum", "Minimum", "SquaredDifference", "Pow", "Neg", "Exp"}
    | {"Log", "Sqrt", "Rsqrt", "Square", "Tanh", "Sigmoid", "Erf", "Relu", "Relu6", "Elu", "Selu", "Softmax", "BiasAdd"}
    | {"TanhGrad", "SigmoidGrad", "ReluGrad", "Relu6Grad", "EluGrad", "SqrtGrad", "RsqrtGrad", "SoftplusGrad"}
    | {"Abs", "Sign", "Reciprocal", "LogicalAnd", "LogicalOr", "LogicalNot", "Select", "SelectV2", "Cos", "Sin"}
    | {"Softplus"}
)
_CHANGE_NOTHING = frozenset({"ReadVariableOp", "Placeholder", "VarHandleOp", "ResourceGather"})
_FUNCTIONS = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("While", "StatelessWhile"), ("cond", "body")),
}
GRADIENTS, OPTIMIZER, OTHER = "gradients of weights", "optimizer", "loss and metrics"


def operations_of(graph: tf.Graph, default_device: str, label: Callable[[tf.Operation], str]) -> list[Operation]:
    """The operations of a graph that matter for its outputs or change something.

    Args:
        graph: of a traced function, with static shapes; what has none counts as nothing.
        default_device: of operations that have none.
        label: for what an operation makes.
    """
    every = graph.get_operations()
    used = _used(graph, every)
    number = {id(tensor): n for n, tensor in enumerate(tensor for op in every for tensor in op.outputs)}
    parts = [(op, inputs, outputs) for op in every if op in used for inputs, outputs in _parts(op)]
    place = {op: position for position, (op, _, _) in enumerate(parts)}
    return [
        Operation(
            device=short_device(op.device) or default_device,
            inputs=tuple(number[id(tensor)] for tensor in inputs),
            outputs=tuple(number[id(tensor)] for tensor in outputs),
            sizes=tuple(map(bytes_of, outputs)),
            waits=tuple(place[before] for before in op.control_inputs),
            is_view=op.type in VIEWS,
            is_in_place=op.type in _IN_PLACE,
            inside=_inside(graph, op, default_device),
            label=label(op),
            name=op.name,
        )
        for op, inputs, outputs in parts
    ]


def bytes_of(tensor: tf.Tensor) -> int:
    """The size of a tensor of known shape; 0 for resources and the like, which are only handles."""
    count = tensor.shape.num_elements()
    return 0 if count is None or tensor.dtype in (tf.resource, tf.variant, tf.string) else count * tensor.dtype.size


def short_device(device: str) -> str:
    """The name of a device of this process without the parts that are the same for all: "GPU:0".

    Example:
        >>> short_device("/job:localhost/replica:0/task:0/device:CPU:1")
        'CPU:1'
    """
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}" if spec.device_type else ""


def _parts(op: tf.Operation) -> list[tuple[Sequence[tf.Tensor], Sequence[tf.Tensor]]]:
    """Inputs and outputs. TensorFlow takes an IdentityN apart before it runs a graph: no tensor waits for the others.

    Keras sends all gradients through one: no weight could be updated before the last gradient is there.
    """
    if op.type == "IdentityN" and not op.control_inputs:
        return [([given], [made]) for given, made in zip(op.inputs, op.outputs, strict=True)]
    return [(op.inputs, op.outputs)]


def _used(graph: tf.Graph, every: Sequence[tf.Operation]) -> set[tf.Operation]:
    """What TensorFlow keeps of a graph: what its outputs need, and what changes something."""
    ends = [tensor.op for tensor in getattr(graph, "outputs", [])]
    ends += [op for op in every if op.op_def.is_stateful and op.type not in _CHANGE_NOTHING]
    ends += list(getattr(graph, "control_outputs", []))
    return upstream(ends, lambda op: [*(tensor.op for tensor in op.inputs), *op.control_inputs])


def _inside(graph: tf.Graph, op: tf.Operation, default_device: str) -> int:
    """Bytes needed by the functions that an operation calls (branches, loop bodies); of several, the largest number."""
    names = [op.get_attr(name).name for name in _FUNCTIONS.get(op.type, ())]
    bodies = [getattr(graph._get_function(name), "graph", None) for name in names]
    peaks = [0]
    for operations in (operations_of(body, default_device, lambda op: "") for body in bodies if body is not None):
        peaks.append(sum(usage.peak for usage in simulate(operations, as_made(operations)).values()))
    return max(peaks)


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A training step of a model.

    Attributes:
        graph: its operations.
        forward: names of the operations of the forward pass, and of those that run it again, with their blocks.
        labels: what operations make, by their names: blocks, `GRADIENTS`, `OPTIMIZER` or `OTHER`.
    """

    graph: tf.Graph
    forward: Mapping[str, str]
    labels: Mapping[str, str]


def trace_step(model: keras.Model, batch: Any) -> TracedStep:
    """Traces a training step as `fit` would: the model's `train_step` on each replica, in one graph for all of them.

    Nothing is computed, and variables stay as they are. While it is traced, operations of blocks are recorded, and so
    are the gradients that the optimizer gets.

    Args:
        model: a compiled model.
        batch: `tf.TensorSpec`s as `train_step` takes them on one replica: `(x, y)` or `(x, y, sample_weight)`.
    """
    strategy = model.distribute_strategy
    replicas = len(compute_devices(model))
    # Makes the variables of the optimizer and the metrics now. Keras would make them in the first step.
    built_from = symbolic(batch)
    with strategy.scope():
        # Also does what the strategy does before a fit. The method of the class: that of a model with mode "auto"
        # would take this batch for one of a fit.
        type(model)._maybe_symbolic_build(model, data_batch=built_from)
        if model._distribute_strategy is None:
            model._symbolic_build(data_batch=built_from)
    applied: list[tf.Tensor] = []

    @tf.autograph.experimental.do_not_convert
    def step(*batches: Any) -> Any:
        several = strategy.num_replicas_in_sync > 1
        data = distribute_utils.regroup(batches, always_wrap=True) if several else batches[0]
        return strategy.run(model.train_step, args=(data,))

    with record_blocks() as blocks, contextlib.ExitStack() as stack:
        for part in [model.optimizer, *parts_of(model.optimizer)]:
            stack.enter_context(_noted_gradients(part, applied))
        graph = tf.function(step, autograph=False).get_concrete_function(*[batch] * replicas).graph
    gradients = _gradient_operations([_through_views(tensor) for tensor in applied], blocks)
    block_of = block_finder(blocks)

    def label(operation: tf.Operation) -> str:
        if operation.name in gradients:
            return GRADIENTS
        rest = OPTIMIZER if model.optimizer.name in operation.name.split("/") else OTHER
        return block_of(operation.name) or rest

    return TracedStep(graph, blocks, {op.name: label(op) for op in graph.get_operations()})


def compute_devices(model: keras.Model) -> list[str]:
    """The devices of this process that compute a model's steps."""
    strategy = model.distribute_strategy
    # TensorFlow's strategy of models that were made outside of any scope.
    if isinstance(strategy, _DefaultDistributionStrategy):
        return ["GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"]
    return [short_device(device) for device in strategy.extended.worker_devices]


@contextlib.contextmanager
def _noted_gradients(optimizer: keras.Optimizer, noted: list[tf.Tensor]) -> Iterator[None]:
    """Records the gradients with which an optimizer updates weights."""
    update = optimizer._backend_apply_gradients

    def noting(gradients: Any, variables: Any) -> None:
        noted.extend(tf.nest.flatten(list(gradients), expand_composites=True))
        update(gradients, variables)

    with shadowed(optimizer, _backend_apply_gradients=noting):
        yield


def _gradient_operations(applied: Sequence[tf.Tensor], blocks: Mapping[str, str]) -> set[str]:
    """Names of the operations between the backward pass and the optimizer, including those that compute the gradients.

    On this way gradients may be scaled, clipped, packed and reduced.
    """

    def before(operation: tf.Operation) -> list[tf.Operation]:
        is_made_here = operation.name in blocks or GRADIENT in operation.name
        return [] if is_made_here else [tensor.op for tensor in operation.inputs]

    return {operation.name for operation in upstream([tensor.op for tensor in applied], before)}


def _through_views(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that a view (of a view, ...) shows."""
    while tensor.op.type in VIEWS and tensor.op.inputs:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor
