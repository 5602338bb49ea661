"""Which values of a traced step are local to a replica, and how they depend on its rows of the batch.

This goes through the operations of the graph once, in the order in which they were made. Global values, the same on
all replicas, are: what a collective has summed or gathered, constants, weights, and state that was written from global
values. Everything else is local. The average of a local value over the replicas is exact if the value is linear in
means over the rows.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.compat.upstream import get_read_write_resource_inputs
from tfdist.layer_graph.chunk import UNSEEDED
from tfdist.steps.reduce import names_agreed_in


class Dependence(enum.Enum):
    """How a value depends on the rows of its replica."""

    SAME = "not: it is global, the same on all replicas"
    DRAWN = "not: it was drawn, by each replica with other numbers; the first one draws those of one process"
    ROWS = "a value for each row, along the first axis; random numbers and the next batch are taken for such"
    MEAN = "linear in means over the rows"
    SUM = "linear in sums over the rows"
    COUNT = "how many rows there are, or values"
    DERIVED = "computed from one such mean or sum: to be computed again from that of the global batch"
    MIXED = "anything else"


class Access(NamedTuple):
    """An operation that reads a watched variable, or writes it.

    Attributes:
        handle: id of the variable's handle.
        operation: what reads or writes.
        is_write: which of them.
        dependence: how the value that is written, or read, depends on the rows.
    """

    handle: int
    operation: tf.Operation
    is_write: bool
    dependence: Dependence


# Beginnings of operations' types.
_COLLECTIVES = ("Collective", "Nccl", "Horovod")
# The collective that gives each replica values of its own.
_OF_EACH = "CollectiveAllToAllV2"
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile", "Case")
_CUTS = ("StridedSlice", "Transpose", "ConcatV2", "Pack", "Unpack", "SplitV")
_SUMS = ("Add", "AddV2", "AddN", "Sub", "BiasAdd")
# What is added to a denominator, so that it is not 0, is no larger.
_TINY = 1e-5
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
    Abs Acos Ceil Cos Elu Equal Erf Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual IsFinite IsInf IsNan
    LeakyRelu Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum NotEqual OnesLike Pow
    Reciprocal Relu Relu6 Rint Round Rsqrt Selu SelectV2 Sigmoid Sign Sin Softplus Softsign Sqrt Square
    SquaredDifference Tanh ZerosLike OneHot Xdivy Xlogy MulNoNan DivNoNan MaxPool AvgPool InTopKV2 Bitcast BitwiseAnd
    """
# Their results can be computed again from other inputs of the same shapes.
_PURE = {*_CUTS, *_SUMS, *_LINEAR, *_REDUCTIONS, *_PRODUCTS, *_ELEMENTWISE.split(), "Mul", "RealDiv"} - {*_READS}


class LocalValues:
    """The local values of one replica in one graph.

    Args:
        graph: where the replica's step is traced. What it has already is taken for the same on all replicas.
        rows: what the replica begins with: its rows of the batch.
        same: variables' parts on this replica, whose values are the same on all replicas when the step begins.
        watched: those of them of which accesses are told.
        others: devices of other replicas, of whose operations this one sees only what is agreed on.
        by_row: finds in an operation's name that a layer has made it which computes each row by itself.
        is_more: asked of the handle of another variable that the step uses, whether that is to be watched, too.
    """

    def __init__(
        self,
        graph: tf.Graph,
        rows: Iterable[Any],
        same: Iterable[tf.Variable],
        watched: Iterable[tf.Variable],
        others: Iterable[str],
        by_row: re.Pattern | None = None,
        is_more: Callable[[tf.Tensor], bool] = lambda handle: False,
    ) -> None:
        self._graph = graph
        self._others, self._by_row, self._is_more = frozenset(others), by_row, is_more
        # By the names of tensors, and by the ids of handles.
        self._local = {one.name: Dependence.ROWS for one in rows if tf.is_tensor(one)}
        self._variables = {id(part.handle): Dependence.SAME for part in same}
        self._watched = {id(part.handle) for part in watched}
        self._drawn: set[str] = set()
        # By the names of placeholders: what they stand for.
        self._captured: dict[str, tf.Tensor] = {}
        self.skip()

    def dependence_of(self, value: tf.Tensor) -> Dependence:
        """How a tensor depends on the rows. `accesses` has to be read before."""
        return self._local.get(value.name, Dependence.SAME)

    def adds_up(self, value: tf.Tensor) -> bool:
        """Whether the replicas' values add up to that of the global batch, as sums over rows and numbers of rows do."""
        if self._graph is not tf.compat.v1.get_default_graph():
            return False
        list(self.accesses())
        return self.dependence_of(value) in (Dependence.SUM, Dependence.COUNT)

    def is_of_no_row(self, value: tf.Tensor) -> bool:
        """Whether a tensor is made of nothing but what is the same on all replicas, and of the lengths of rows."""
        list(self.accesses())
        waiting, seen = [value], set()
        while waiting:
            one = waiting.pop()
            if one.name in seen or self.dependence_of(one) is Dependence.SAME:
                continue
            seen.add(one.name)
            if one.op.type in ("StridedSlice", "Unpack") and self._takes_shape_of_rows(one.op):
                if _sizes(one.op)[one.value_index] is Dependence.COUNT:
                    return False
            elif one.op.op_def.is_stateful or not one.op.inputs:
                return False
            else:
                waiting += one.op.inputs
        return True

    def take_for_same(self, handle: int) -> None:
        """Takes the value of a variable, by the id of its handle, for the same on all replicas from now on."""
        self._variables[handle] = Dependence.SAME

    def take_for_drawn(self, seed: tf.Tensor) -> None:
        """Takes a seed, and what is made of it, for the replica's own."""
        self._drawn.add(seed.name)

    def skip(self) -> None:
        """Takes what was made since the last time for the same on all replicas."""
        self._seen = len(self._graph.get_operations())

    def accesses(self) -> Iterator[Access]:
        """Goes through the operations since the last time, and tells which access watched variables."""
        operations = self._graph.get_operations()
        begin, self._seen = self._seen, len(operations)
        names = names_agreed_in(self._graph)
        for operation in _in_order(operations[begin:]):
            # A replica may have asked for another one's device.
            if operation.device in self._others and _are_same(map(self.dependence_of, operation.inputs)):
                continue
            handles = {one.name: self._handle(one) for one in operation.inputs if one.dtype == tf.resource}
            for name, handle in handles.items():
                if handle is not None and handle not in self._variables and self._is_more(self._captured[name]):
                    self._variables[handle] = Dependence.SAME
                    self._watched.add(handle)
            for output, dependence in zip(operation.outputs, self._outputs(operation, handles), strict=True):
                dependence = Dependence.DRAWN if output.name in self._drawn else dependence
                if dependence is not Dependence.SAME and output.name not in names:
                    self._local[output.name] = dependence
            if any(handle in self._variables for handle in handles.values()):
                yield from self._accesses_by(operation, handles)

    def _accesses_by(self, operation: tf.Operation, handles: dict[str, int | None]) -> Iterator[Access]:
        reads, writes = get_read_write_resource_inputs(operation)
        # In the order of the inputs, which is the same on all replicas; these are sets.
        for tensor in operation.inputs:
            handle, is_write = handles.get(tensor.name), tensor in writes
            if handle not in self._variables or not (is_write or tensor in reads):
                continue
            dependence = self._variables[handle]
            if is_write:
                given = [self.dependence_of(one) for one in operation.inputs if one.dtype != tf.resource]
                if _draws_in_calls(operation):
                    given.append(Dependence.MIXED)
                if operation.type != "AssignVariableOp":
                    given += [self._variables.get(other, Dependence.ROWS) for other in handles.values()]
                dependence = _join(given)
                is_mean = dependence is Dependence.MEAN and operation.type.startswith("Assign")
                if dependence not in (Dependence.SAME, Dependence.DRAWN) and not is_mean:
                    dependence = Dependence.MIXED
                self._variables[handle] = dependence
            if handle in self._watched:
                yield Access(handle, operation, is_write, dependence)

    def _outputs(self, operation: tf.Operation, handles: dict[str, int | None]) -> list[Dependence]:
        kind, count = operation.type, len(operation.outputs)
        if kind == "Const" or (kind.startswith(_COLLECTIVES) and kind != _OF_EACH):
            return [Dependence.SAME] * count
        if kind == "Placeholder":
            is_captured = self._handle(operation.outputs[0]) is not None
            return [Dependence.SAME if is_captured else Dependence.ROWS] * count
        given = [
            self._variables.get(handles[one.name], Dependence.ROWS) if one.name in handles else self.dependence_of(one)
            for one in operation.inputs
        ]
        if kind == "IdentityN":
            return given
        if operation.op_def.is_stateful and (kind not in (*_READS, *_CALLS) or _draws_in_calls(operation)):
            # Random numbers, the next batch.
            return [Dependence.ROWS] * count
        if set(given) - {Dependence.SAME} == {Dependence.DRAWN}:
            return [Dependence.DRAWN] * count
        given = [Dependence.ROWS if one is Dependence.DRAWN else one for one in given]
        is_forward = self._by_row is not None and "gradient_tape/" not in operation.name
        if is_forward and _are_rows(given) and self._by_row.search(operation.name):
            return [Dependence.ROWS] * count
        if kind in ("StridedSlice", "Unpack") and self._takes_shape_of_rows(operation):
            return _sizes(operation)
        if _are_same(given):
            return [Dependence.SAME] * count
        made = _made_by(operation, given)
        if made in (Dependence.MIXED, Dependence.DERIVED):
            made = Dependence.DERIVED if _can_be_computed_again(operation, given) else Dependence.MIXED
        return [made] * count

    def _takes_shape_of_rows(self, operation: tf.Operation) -> bool:
        shape = operation.inputs[0].op
        return shape.type == "Shape" and self.dependence_of(shape.inputs[0]) is Dependence.ROWS

    def _handle(self, tensor: tf.Tensor) -> int | None:
        """The id of what the graph has captured as this tensor: a variable's handle, say."""
        if tensor.name not in self._captured and tensor.op.type == "Placeholder":
            self._captured = {internal.name: external for external, internal in self._graph.captures}
        external = self._captured.get(tensor.name)
        return None if external is None else id(external)


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


def draws(operation: tf.Operation) -> bool:
    """Whether an operation draws random numbers from a state of its own, or a function that it calls does."""
    return operation.type in UNSEEDED or _draws_in_calls(operation)


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


def _are_same(given: Iterable[Dependence]) -> bool:
    return all(one is Dependence.SAME for one in given)


def _are_rows(given: Iterable[Dependence]) -> bool:
    """Whether some of these are a value for each row, and the others the same on all replicas."""
    return {Dependence.ROWS} == set(given) - {Dependence.SAME}


def _made_by(operation: tf.Operation, given: list[Dependence]) -> Dependence:
    """What an operation makes of its inputs, of which some are local."""
    kind, first = operation.type, given[0]
    others_are_same = _are_same(given[1:])
    by_row = all(one in (Dependence.SAME, Dependence.ROWS) for one in given)
    if Dependence.ROWS in given and operation.outputs and _moves_rows(operation, given):
        return Dependence.MIXED
    if kind == "Cast" and first is not Dependence.ROWS and _loses_fractions(*operation.inputs, *operation.outputs):
        return Dependence.MIXED
    if kind in (*_LINEAR, "ReadVariableOp"):
        return Dependence.MIXED if first is Dependence.SAME else first
    if kind in _SUMS:
        dependence = _join(given)
        # Each replica adds it, and the replicas' sums are added up.
        is_counted = dependence in (Dependence.SUM, Dependence.COUNT) and Dependence.SAME in given
        same = [one for one, how in zip(operation.inputs, given, strict=True) if how is Dependence.SAME]
        return Dependence.MIXED if is_counted and not all(map(_is_tiny, same)) else dependence
    if kind == "Mul" and Dependence.SAME in given:
        return given[1] if first is Dependence.SAME else first
    if kind == "RealDiv" and others_are_same:
        return first
    if kind in ("RealDiv", "DivNoNan") and given == [Dependence.SUM, Dependence.COUNT]:
        return Dependence.MEAN
    if kind in ("Shape", "Size"):
        return Dependence.COUNT
    if kind in _REDUCTIONS:
        return _reduction_of(operation, first)
    if kind in _CUTS:
        if first is Dependence.COUNT and others_are_same:
            return first
        if first is Dependence.MEAN or (kind in ("ConcatV2", "Pack") and _join(given) is Dependence.MEAN):
            return Dependence.MEAN
        return Dependence.ROWS if _join(given) is Dependence.ROWS and _keeps_first_axis(operation) else Dependence.MIXED
    if kind in ("ArgMax", "ArgMin"):
        return Dependence.ROWS if by_row and _keeps_first_axis(operation) else Dependence.MIXED
    if kind in ("Softmax", "LogSoftmax"):
        return Dependence.ROWS if by_row and operation.inputs[0].shape.rank != 1 else Dependence.MIXED
    if kind in _PRODUCTS and others_are_same:
        transposed = kind == "MatMul" and operation.get_attr("transpose_a")
        return Dependence.MIXED if transposed else first
    if kind == "GatherV2":
        return Dependence.ROWS if first is Dependence.SAME and by_row else Dependence.MIXED
    if by_row and (kind in ("Mul", "RealDiv") or kind in _ELEMENTWISE.split() or kind in _READS):
        return Dependence.ROWS
    return Dependence.MIXED


def _loses_fractions(before: tf.Tensor, after: tf.Tensor) -> bool:
    """Whether a cast is not linear."""
    return after.dtype == tf.bool or (after.dtype.is_integer and not before.dtype.is_integer)


def _can_be_computed_again(operation: tf.Operation, given: list[Dependence]) -> bool:
    """Whether a single input would have to be replaced, wherever numbers of rows are known while tracing."""
    (local, *others) = [one for one in zip(operation.inputs, given, strict=True) if one[1] is not Dependence.SAME]
    is_known = local[1] in (Dependence.MEAN, Dependence.SUM, Dependence.DERIVED) and not local[0].dtype.is_complex
    return operation.type in _PURE and is_known and not others


def _is_tiny(value: tf.Tensor) -> bool:
    known = tf.get_static_value(value)
    return known is not None and bool(np.all(np.abs(known) <= _TINY))


def _sizes(operation: tf.Operation) -> list[Dependence]:
    """What an operation takes out of the shape of rows: how many there are, or other sizes."""
    shape = operation.inputs[0].op.inputs[0].shape
    if shape.rank is None:
        return [Dependence.COUNT] * len(operation.outputs)
    if operation.type == "Unpack":
        return [Dependence.COUNT if i == 0 else _size(size) for i, size in enumerate(shape)]
    begin, strides = (tf.get_static_value(operation.inputs[i]) for i in (1, 3))
    first = 0
    if begin is not None and strides is not None and strides[0] > 0 and not operation.get_attr("begin_mask"):
        first = int(begin[0] if begin[0] >= 0 else max(0, begin[0] + shape.rank))
    if first == 0:
        return [Dependence.COUNT]
    return [_size(shape[first] if operation.get_attr("shrink_axis_mask") else shape[first:].num_elements())]


def _size(size: int | None) -> Dependence:
    """Of the length of the longest row, say, each replica has its own."""
    return Dependence.MIXED if size is None else Dependence.SAME


def _moves_rows(operation: tf.Operation, given: list[Dependence]) -> bool:
    """Whether rows may be along another axis than the first afterwards: a sum over the first is none of rows."""
    kind, before, after = operation.type, operation.inputs[0].shape, operation.outputs[0].shape
    first, made = (shape[0] if shape.rank else None for shape in (before, after))
    if kind == "ExpandDims":
        return tf.get_static_value(operation.inputs[1]) in (None, 0, -(after.rank or 0))
    if kind == "Squeeze":
        axes = operation.get_attr("squeeze_dims")
        return first == 1 if not axes else 0 in axes or -(before.rank or 0) in axes
    if kind == "Reshape":
        # What belongs to a row stays together: unless the first axis was made of something else.
        return after.rank == 0 or (made is not None and (not first or made % first > 0))
    if kind == "GatherV2":
        return tf.get_static_value(operation.inputs[2]) != 0
    if kind == "OneHot":
        return operation.get_attr("axis") == 0
    if kind in (*_SUMS, "Mul", "RealDiv", "BatchMatMulV2", "BatchMatMulV3", *_ELEMENTWISE.split()):
        # Broadcasting aligns the last axes.
        of_rows = [one for one, how in zip(operation.inputs, given, strict=True) if how is Dependence.ROWS]
        return any(one.shape.rank != after.rank for one in of_rows)
    return False


def _keeps_first_axis(operation: tf.Operation) -> bool:
    """Whether an operation that rearranges values leaves the first axis alone."""
    kind = operation.type
    if kind == "StridedSlice":
        masks = [operation.get_attr(name) & 1 for name in ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask")]
        strides, rank = tf.get_static_value(operation.inputs[3]), operation.inputs[0].shape.rank
        whole = strides is not None and strides[0] == 1 and masks[0] and masks[1]
        # An ellipsis may stand for no axis at all.
        several = masks[2] and strides is not None and rank is not None and rank >= len(strides)
        return bool((whole or several) and not masks[3])
    if kind == "Transpose":
        order = tf.get_static_value(operation.inputs[1])
        return order is not None and order[0] == 0
    if kind in ("Pack", "Unpack"):
        return operation.get_attr("axis") > 0
    axis = tf.get_static_value(operation.inputs[-1])
    rank = operation.inputs[0].shape.rank
    return axis is not None and (axis > 0 or (axis < 0 and rank is not None and axis != -rank))


def _join(given: Iterable[Dependence]) -> Dependence:
    """How a sum of values depends on the rows."""
    kinds = set(given) - {Dependence.SAME}
    if not kinds:
        return Dependence.SAME
    return kinds.pop() if len(kinds) == 1 else Dependence.MIXED


def _reduction_of(operation: tf.Operation, dependence: Dependence) -> Dependence:
    # The mean of integers is one.
    is_linear = operation.type == "Sum" or (operation.type == "Mean" and not operation.outputs[0].dtype.is_integer)
    if dependence in (Dependence.SAME, Dependence.DERIVED):
        return Dependence.MIXED
    if dependence in (Dependence.MEAN, Dependence.SUM):
        return dependence if is_linear else Dependence.MIXED
    if dependence is Dependence.COUNT:
        return dependence if operation.type == "Prod" else Dependence.MIXED
    axes, rank = tf.get_static_value(operation.inputs[1]), operation.inputs[0].shape.rank
    over_rows = axes is None or any(axis == 0 or axis == -(rank or 0) for axis in np.reshape(axes, -1))
    if not over_rows or dependence is Dependence.MIXED:
        return dependence
    return Dependence[operation.type.upper()] if is_linear else Dependence.MIXED
