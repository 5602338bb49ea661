"""Which values of a traced step are local to a replica, and how they depend on its rows of the batch.

This goes through the operations of the graph once, in the order in which they were made. Global values, the same on
all replicas, are: what a collective has summed or gathered, constants, weights, and state that was written from global
values. Everything else is local. The average of a local value over the replicas is exact if the value is linear in
means over the rows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.compat.upstream import get_read_write_resource_inputs
from tfdist.layer_graph.pure_call import UNSEEDED


class Local(enum.Enum):
    """How a local value depends on the rows of the replica."""

    ROWS = "a value for each row, along the first axis"
    MEAN = "linear in means over the rows"
    SUM = "linear in sums over the rows"
    COUNT = "how many rows there are, or values"
    MIXED = "anything else"


class Access(NamedTuple):
    """An operation that reads a watched variable, or writes it.

    Attributes:
        handle: id of the variable's handle.
        operation: what reads or writes.
        is_write: which of them.
        local: how the value that is written, or read, depends on the rows; `None` if it is global.
    """

    handle: int
    operation: tf.Operation
    is_write: bool
    local: Local | None


_AGREED = "tfdist_agreed"
# Beginnings of operations' types.
_COLLECTIVES = ("Collective", "Nccl", "Horovod")
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile", "Case")
_CUTS = ("StridedSlice", "Transpose", "ConcatV2", "Pack", "Unpack", "SplitV")
_SUMS = ("Add", "AddV2", "AddN", "Sub", "BiasAdd")
_LINEAR = (
    "Identity",
    "EnsureShape",
    "Cast",
    "Reshape",
    "Squeeze",
    "ExpandDims",
    "Neg",
    "StopGradient",
    "ReadVariableOp",
)
_REDUCTIONS = ("Mean", "Sum", "Max", "Min", "Prod", "Any", "All")
_PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2dNative")
_ELEMENTWISE = """
    Abs Acos Ceil Cos Elu Equal Erf Exp Expm1 Floor Greater GreaterEqual LeakyRelu Less LessEqual Log Log1p
    LogicalAnd LogicalNot LogicalOr Maximum Minimum NotEqual OnesLike Pow Reciprocal Relu Relu6 Rsqrt Selu SelectV2
    Sigmoid Sign Sin Softplus Softsign Sqrt Square SquaredDifference Tanh ZerosLike OneHot Xdivy Xlogy MulNoNan
    DivNoNan MaxPool AvgPool InTopKV2 Bitcast BitwiseAnd
    """


def agreed(values: Iterable[tf.Tensor]) -> None:
    """Notes that tensors have the same values on all replicas: a strategy has reduced or gathered them."""
    for value in values:
        if tf.is_symbolic_tensor(value):
            _names_agreed_in(value.graph).add(value.name)


def exchanged(call: Callable[[], Any]) -> tuple[Any, bool]:
    """What a call returns, and whether replicas have exchanged something in it."""
    if tf.executing_eagerly():
        return call(), False
    graph = tf.compat.v1.get_default_graph()
    operations, names = len(graph.get_operations()), len(_names_agreed_in(graph))
    result = call()
    made = graph.get_operations()[operations:]
    return result, len(_names_agreed_in(graph)) > names or any(one.type.startswith(_COLLECTIVES) for one in made)


class LocalValues:
    """The local values of one replica in one graph.

    Args:
        graph: where the replica's step is traced. What it has already is taken for the same on all replicas.
        rows: what the replica begins with: its rows of the batch.
        same: variables' parts on this replica, whose values are the same on all replicas when the step begins.
        watched: those of them of which accesses are told.
        others: devices of other replicas, of whose operations this one sees only what is agreed on.
    """

    def __init__(
        self,
        graph: tf.Graph,
        rows: Iterable[Any],
        same: Iterable[tf.Variable],
        watched: Iterable[tf.Variable],
        others: Iterable[str],
    ) -> None:
        self._graph = graph
        self._others = frozenset(others)
        # By the names of tensors, and by the ids of handles.
        self._local: dict[str, Local] = {one.name: Local.ROWS for one in rows if tf.is_tensor(one)}
        self._variables: dict[int, Local | None] = {id(part.handle): None for part in same}
        self._watched = {id(part.handle) for part in watched}
        # By the names of placeholders: what they stand for.
        self._captured: dict[str, int] = {}
        self.skip()

    def of(self, value: tf.Tensor) -> Local | None:
        """How a tensor depends on the rows; `None` if it is global. `accesses` has to be read before."""
        return self._local.get(value.name)

    def skip(self) -> None:
        """Takes what was made since the last time for the same on all replicas."""
        self._seen = len(self._graph.get_operations())

    def accesses(self) -> Iterator[Access]:
        """Goes through the operations since the last time, and tells which access watched variables."""
        operations = self._graph.get_operations()
        begin, self._seen = self._seen, len(operations)
        names = _names_agreed_in(self._graph)
        for operation in _in_order(operations[begin:]):
            # A replica may have asked for another one's device.
            if operation.device in self._others and not any(self.of(one) for one in operation.inputs):
                continue
            handles = {one.name: self._handle(one) for one in operation.inputs if one.dtype == tf.resource}
            outputs = self._outputs(operation, handles)
            for output, local in zip(operation.outputs, outputs, strict=True):
                if local is not None and output.name not in names:
                    self._local[output.name] = local
            if any(handle in self._variables for handle in handles.values()):
                yield from self._of_variables(operation, handles)

    def _of_variables(self, operation: tf.Operation, handles: dict[str, int | None]) -> Iterator[Access]:
        reads, writes = get_read_write_resource_inputs(operation)
        for tensor in (*reads, *writes):
            handle, is_write = handles[tensor.name], tensor in writes
            if handle not in self._variables:
                continue
            local = self._variables[handle]
            if is_write:
                given = [self.of(one) for one in operation.inputs if one.dtype != tf.resource]
                if _draws_in_calls(operation):
                    given.append(Local.MIXED)
                if operation.type != "AssignVariableOp":
                    given += [self._variables.get(other, Local.ROWS) for other in handles.values()]
                local = _sum(given) if operation.type.startswith("Assign") else _mixed(given)
                local = local if local in (None, Local.MEAN) else Local.MIXED
                self._variables[handle] = local
            if handle in self._watched:
                yield Access(handle, operation, is_write, local)

    def _outputs(self, operation: tf.Operation, handles: dict[str, int | None]) -> list[Local | None]:
        kind, count = operation.type, len(operation.outputs)
        if kind == "Const" or kind.startswith(_COLLECTIVES):
            return [None] * count
        if kind == "Placeholder":
            local = Local.ROWS if self._handle(operation.outputs[0]) is None else None
            return [local] * count
        given = [
            self._variables.get(handles[one.name], Local.ROWS) if one.name in handles else self.of(one)
            for one in operation.inputs
        ]
        if kind == "IdentityN":
            return given
        if operation.op_def.is_stateful and (kind not in (*_READS, *_CALLS) or _draws_in_calls(operation)):
            # Random numbers, the next batch.
            return [Local.ROWS] * count
        return [None if all(local is None for local in given) else _made_by(operation, given)] * count

    def _handle(self, tensor: tf.Tensor) -> int | None:
        """The id of what the graph has captured as this tensor: a variable's handle, say."""
        if tensor.name not in self._captured and tensor.op.type == "Placeholder":
            self._captured = {internal.name: id(external) for external, internal in self._graph.captures}
        return self._captured.get(tensor.name)


def _in_order(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Operations, each after those whose outputs it takes: one may have been given another input since it was made."""
    waiting = {operation.name: operation for operation in operations}
    for operation in list(waiting.values()):
        stack = [operation]
        while stack:
            top = stack[-1]
            before = [one.op for one in top.inputs if one.op.name in waiting] if top.name in waiting else []
            if before:
                stack += before
                continue
            stack.pop()
            if waiting.pop(top.name, None) is not None:
                yield top


def only_updates(value: tf.Tensor) -> bool:
    """Whether all that is made of a value read from a variable is written to variables, by linear operations."""
    waiting = [value]
    while waiting:
        for operation in waiting.pop().consumers():
            if operation.type in (*_LINEAR, *_SUMS, "ReadVariableOp", "Mul", "RealDiv"):
                waiting += operation.outputs
            elif not operation.type.startswith("Assign"):
                return False
    return True


def _draws_in_calls(operation: tf.Operation) -> bool:
    """Whether the functions that an operation calls draw random numbers that nobody has given a seed."""
    if operation.type not in _CALLS:
        return False
    names, seen = _called(operation.node_def.attr.values()), set()
    while names:
        name = names.pop()
        function = operation.graph._get_function(name) if name not in seen else None
        seen.add(name)
        for node in () if function is None else function.cached_definition.node_def:
            if node.op in UNSEEDED:
                return True
            names += _called(node.attr.values())
    return False


def _called(attributes: Iterable[Any]) -> list[str]:
    return [one.name for value in attributes for one in (value.func, *value.list.func) if one.name]


def _made_by(operation: tf.Operation, given: list[Local | None]) -> Local:
    """What an operation makes of its inputs, of which some are local."""
    kind, first = operation.type, given[0]
    others_are_same = all(local is None for local in given[1:])
    by_row = all(local in (None, Local.ROWS) for local in given)
    if kind in (*_LINEAR, "ReadVariableOp"):
        return first or Local.MIXED
    if kind in _SUMS:
        return _sum(given)
    if kind == "Mul" and None in given:
        return first or given[1]
    if kind == "RealDiv" and others_are_same:
        return first
    if kind in ("RealDiv", "DivNoNan") and given == [Local.SUM, Local.COUNT]:
        return Local.MEAN
    if kind in ("Shape", "Size"):
        return Local.COUNT
    if kind in _REDUCTIONS:
        return _reduced(operation, first)
    if kind in _CUTS:
        if first is Local.COUNT and others_are_same:
            return first
        if first is Local.MEAN or (kind in ("ConcatV2", "Pack") and _sum(given) is Local.MEAN):
            return Local.MEAN
        return Local.ROWS if _sum(given) is Local.ROWS and _keeps_first_axis(operation) else Local.MIXED
    if kind in ("ArgMax", "ArgMin"):
        return Local.ROWS if by_row and _keeps_first_axis(operation) else Local.MIXED
    if kind in ("Softmax", "LogSoftmax"):
        return Local.ROWS if by_row and operation.inputs[0].shape.rank != 1 else Local.MIXED
    if kind in _PRODUCTS and others_are_same:
        transposed = kind == "MatMul" and operation.get_attr("transpose_a")
        return Local.MIXED if transposed else first
    if kind == "GatherV2":
        return Local.ROWS if first is None and by_row else Local.MIXED
    if by_row and (kind in ("Mul", "RealDiv") or kind in _ELEMENTWISE.split() or kind in _READS):
        return Local.ROWS
    return Local.MIXED


def _keeps_first_axis(operation: tf.Operation) -> bool:
    """Whether an operation that rearranges values leaves the first axis alone."""
    kind = operation.type
    if kind == "StridedSlice":
        masks = [operation.get_attr(name) & 1 for name in ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask")]
        strides = tf.get_static_value(operation.inputs[3])
        whole = strides is not None and strides[0] == 1 and masks[0] and masks[1]
        return bool((whole or masks[2]) and not masks[3])
    if kind == "Transpose":
        order = tf.get_static_value(operation.inputs[1])
        return order is not None and order[0] == 0
    if kind in ("Pack", "Unpack"):
        return operation.get_attr("axis") > 0
    axis = tf.get_static_value(operation.inputs[-1])
    rank = operation.inputs[0].shape.rank
    return axis is not None and (axis > 0 or (axis < 0 and rank is not None and axis != -rank))


def _sum(given: Iterable[Local | None]) -> Local | None:
    kinds = {local for local in given if local is not None}
    if not kinds:
        return None
    return kinds.pop() if len(kinds) == 1 else Local.MIXED


def _mixed(given: Iterable[Local | None]) -> Local | None:
    return None if all(local is None for local in given) else Local.MIXED


def _reduced(operation: tf.Operation, local: Local | None) -> Local:
    if local is None:
        return Local.MIXED
    if local in (Local.MEAN, Local.SUM):
        return local if operation.type in ("Mean", "Sum") else Local.MIXED
    if local is Local.COUNT:
        return local if operation.type == "Prod" else Local.MIXED
    axes, rank = tf.get_static_value(operation.inputs[1]), operation.inputs[0].shape.rank
    over_rows = axes is None or any(axis == 0 or axis == -(rank or 0) for axis in np.reshape(axes, -1))
    if not over_rows or local is Local.MIXED:
        return local
    return {"Mean": Local.MEAN, "Sum": Local.SUM}.get(operation.type, Local.MIXED)


def _names_agreed_in(graph: tf.Graph) -> set[str]:
    kept = graph.get_collection_ref(_AGREED)
    if not kept:
        kept.append(set())
    return kept[0]
