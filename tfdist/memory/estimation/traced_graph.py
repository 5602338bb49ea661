"""A TensorFlow graph as the list of operations that `tfdist.memory.estimation.liveness` runs through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.memory.estimation.execution_order import as_made
from tfdist.memory.estimation.liveness import simulate
from tfdist.memory.estimation.operation import Operation

# What they return takes no memory of its own: it is their first input, or there all the time.
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
    """The size of a tensor of known shape; resources and the like are known by handles, and are nothing."""
    count = tensor.shape.num_elements()
    return 0 if count is None or tensor.dtype in (tf.resource, tf.variant, tf.string) else count * tensor.dtype.size


def short_device(device: str) -> str:
    """The name of a device of this process without what it is the same for all: "GPU:0".

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
    waiting = [tensor.op for tensor in getattr(graph, "outputs", [])]
    waiting += [op for op in every if op.op_def.is_stateful and op.type not in _CHANGE_NOTHING]
    waiting += list(getattr(graph, "control_outputs", []))
    used: set[tf.Operation] = set()
    while waiting:
        op = waiting.pop()
        if op not in used:
            used.add(op)
            waiting += [tensor.op for tensor in op.inputs]
            waiting += op.control_inputs
    return used


def _inside(graph: tf.Graph, op: tf.Operation, default_device: str) -> int:
    """What the functions need that an operation calls; of several, the one that needs most."""
    names = [op.get_attr(name).name for name in _FUNCTIONS.get(op.type, ())]
    bodies = [getattr(graph._get_function(name), "graph", None) for name in names]
    peaks = [0]
    for operations in (operations_of(body, default_device, lambda op: "") for body in bodies if body is not None):
        peaks.append(sum(usage.peak for usage in simulate(operations, as_made(operations)).values()))
    return max(peaks)
