"""Weights of which each replica keeps a part: read as a whole, updated part by part.

One variable over two replicas, in rows of 64 bytes; the last row of the second part is padding:

    whole   a a a a a a a a      part 0   a a a a
                                 part 1   a a a .

A `ShardedVariable` is what stands behind a Keras variable, in place of TensorFlow's `MirroredVariable`:

    on a replica     reading gathers the parts; the gradient of what was read is reduced, and scattered, to the parts
                     assigning keeps this replica's part of the value, of its mean over the replicas' rows
    in an optimizer  reading and assigning are about the part, slots of sharded variables are sharded: see `in_parts`
    elsewhere        reading gathers the parts of all processes, which all of them have to do; see `collecting`

Parts of a table, with a `RowLayout`, are whole rows: `tf.gather` of it looks them up, and gathers no more
(`looked_up`).

So the gradient that a tape returns for such a variable is this replica's part: of the sum over the replicas, weighted
by their rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat.upstream import CondBranchFuncGraph, ControlFlowFuncGraph, DistributedVariable, distribute_lib
from tfdist.steps.flat_bucket import FlatBucket, RowLayout
from tfdist.steps.gradients import all_reduce_sum, own_rows_of_sums, weighted
from tfdist.steps.keras_step import check_that_all_are_here, current_step, global_replica, local_replica, shadowed
from tfdist.steps.local_values import Dependence
from tfdist.steps.reduce import all_gather, all_reduce

# Operations that add up, and the one that takes a value for one of another shape.
_SUMS = ("AddN", "AddV2", "Identity")
# And those that put the gradients of a table's rows together.
_OF_TABLES = (*_SUMS, "Reshape", "ConcatV2", "UnsortedSegmentSum")
_TAKEN = "PlaceholderWithDefault"


@contextlib.contextmanager
def outside_of_branches() -> Iterator[None]:
    """While the block runs, operations go to the graph around branches and loops.

    Replicas run a loop's passes, each at its own pace, and take different branches: what they exchange there would meet
    something else, or nobody. A branch that all of them take is not left: it may have updated what is read.
    """
    graph, step = tf.compat.v1.get_default_graph(), current_step()
    kept = CondBranchFuncGraph if step is not None and step.here.agreed else ()
    while isinstance(graph, ControlFlowFuncGraph) and not isinstance(graph, kept):
        graph = graph.outer_graph
    with graph.as_default() if not tf.executing_eagerly() else contextlib.nullcontext():
        yield


def own_part(layout: FlatBucket, replica: int, value: tf.Tensor) -> tf.Tensor:
    """What a replica keeps of a value, in memory of its own: a slice would keep the whole value."""
    return tf.raw_ops.DeepCopy(x=layout.cut(replica, lambda _: value))


def gathered(parts: Sequence[tf.Tensor], layouts: Sequence[FlatBucket]) -> list[tf.Tensor]:
    """The whole values of parts of this replica; gradients come back as parts."""

    @tf.custom_gradient
    def read(*parts: tf.Tensor) -> tuple[tuple, Callable]:
        return tuple(_of_all_replicas(parts, layouts)), lambda *gradients: scattered(gradients, layouts)

    return list(read(*parts))


def _of_all_replicas(parts: Sequence[tf.Tensor], layouts: Sequence[FlatBucket]) -> list[tf.Tensor]:
    return [layout.values(whole)[0] for layout, whole in zip(layouts, all_gather(parts), strict=True)]


def scattered(gradients: Sequence[Any], layouts: Sequence[FlatBucket]) -> list[Any]:
    """This replica's parts of the gradients of the global batch; `None` stays `None`.

    Args:
        gradients: of the whole values, from the rows of this replica, on each replica of the same ones.
        layouts: of their variables.
    """
    # That of a loss which was divided by the number of replicas; others are divided where they are applied.
    weight = _training_step().relative_weight
    found: list = [None] * len(gradients)
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    wholes = [layouts[i].whole(layouts[i].dense({0: gradients[i]})) for i in present]
    options = tf.distribute.get_strategy()._gradient_options
    for i, own in zip(present, own_rows_of_sums(wholes, options, weight), strict=True):
        # That of a table is added to gradients of the rows that this replica has.
        found[i] = _noted(own, own.shape if isinstance(layouts[i], RowLayout) else layouts[i].shapes[0])
        if isinstance(gradients[i], tf.IndexedSlices):
            current_step().here.of_slices.add(id(found[i]))
    return found


def _training_step() -> Any:
    step = current_step()
    if step is None:
        raise NotImplementedError(
            "Received: a training loop of your own, or gradients of weights outside of fit, with weights of which each "
            "replica has a part. Expected: model.fit or model.train_on_batch, with a train_step of your own if you "
            "need one."
        )
    return step


def _noted(part: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """A part of a gradient, which optimizers apply as it is, and which a graph takes for one of another shape."""
    step = current_step()
    # TensorFlow compares the shapes of gradients within a tf.function with those of what it has read.
    is_within = tf.compat.v1.get_default_graph() is not step.graph
    part = _taken_for(tf.TensorShape(None) if is_within else shape, part)
    step.here.scattered[id(part)] = part
    return part


def looked_up(variable: ShardedVariable, ids: tf.Tensor) -> tf.Tensor:
    """Rows of a table of which each replica has some; the gradient is that of this replica's part, as slices.

        ids of all replicas -> each puts in the rows that it has, zeros for others' -> sum -> rows of own ids
        gradients of all, with the ids -> each takes those of the rows that it has

    Args:
        variable: the table, with a `RowLayout`.
        ids: numbers of rows, a tensor of integers of any shape.
    """
    layout, (rows, width) = variable.layout, variable.shape
    first = (variable._distribute_strategy.first_part + local_replica()) * layout.shard_rows
    flat = tf.reshape(tf.cast(ids, tf.int64), [-1])
    problem = f"Received: ids for '{variable.name}', a table of {rows} rows. Expected: ids from 0 to {rows - 1}."
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all((flat >= 0) & (flat < rows)), [problem, flat])]):
        # One more, which counts for nothing: collectives of no bytes end the process.
        sent = tf.concat([flat, [0]], 0)

    def of_all(values: tf.Tensor) -> tf.IndexedSlices:
        """What all replicas have for their ids, by replica."""
        shape = tf.constant([rows, values.shape[1]], tf.int64)
        return all_reduce(tf.IndexedSlices(tf.pad(values, [[0, 1], [0, 0]]), sent, shape))

    number = float(global_replica() + 1)
    everyone = of_all(tf.fill([tf.size(flat), 1], number))
    owners, places = everyone.values[:, 0], everyone.indices - first
    is_here = (owners > 0) & (places >= 0) & (places < layout.shard_rows)
    own, here = tf.where(tf.equal(owners, number)), tf.where(is_here)

    @tf.custom_gradient
    def exchanged(found: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        # Where hosts have copies, those of one count.
        given = found if variable.is_first_copy else tf.zeros_like(found)
        whole = tf.scatter_nd(here, given, tf.stack([tf.size(owners, tf.int64), width]))

        def back(gradient: tf.Tensor) -> tf.Tensor:
            (given,) = weighted(_training_step().relative_weight, [gradient])
            return _noted(tf.gather_nd(of_all(given).values, here), tf.TensorShape([None, width]))

        return tf.gather_nd(all_reduce(whole, differentiable=False), own), back

    # The gradient of this is slices: of a row that is looked up twice, Keras' optimizers square each gradient.
    found = exchanged(tf.gather(variable.part(), tf.gather_nd(places, here)))
    found = tf.reshape(found, tf.concat([tf.shape(ids), [width]], 0))
    found.set_shape([*ids.shape, width])
    return found


def _taken_for(shape: tf.TensorShape, value: tf.Tensor) -> tf.Tensor:
    """The same value, which a graph takes for one of another shape.

    So a `train_step` is traced to its end that takes a part of a gradient for the whole, and can be refused in words.
    """
    if tf.executing_eagerly():
        return value
    same = tf.raw_ops.PlaceholderWithDefault(input=value, shape=tf.TensorShape(None))
    same.set_shape(shape)
    return same


def to_apply(gradient: Any, variable: ShardedVariable) -> Any:
    """This replica's part of a gradient, for an optimizer; `None` if it is not what `scattered` returned."""
    # As where something is exchanged: what one replica applies, all apply.
    check_that_all_are_here()
    if tf.executing_eagerly():
        return gradient
    here, within = current_step().here, tf.compat.v1.get_default_graph()
    is_slices = isinstance(gradient, tf.IndexedSlices)
    values = gradient.values if is_slices else gradient
    if not _is_scattered(values, here.scattered, _OF_TABLES if variable.is_table else _SUMS):
        return None
    captured, graph = within.capture(values), within
    here.scattered[id(captured)] = captured
    while graph is not values.graph:
        here.branches.add(graph.name)
        graph = graph.outer_graph
    if not is_slices:
        return _taken_for(variable.part().shape, captured)
    shape = tf.constant(variable.part().shape.as_list(), tf.int64)
    return tf.IndexedSlices(_taken_for(values.shape, captured), within.capture(gradient.indices), shape)


def _is_scattered(gradient: Any, known: Container[int], kinds: Sequence[str] = _OF_TABLES) -> bool:
    """Whether a gradient is among the known ones, or put together of such by these kinds of operations."""
    waiting = [gradient]
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in known:
            continue
        if not tf.is_symbolic_tensor(tensor) or tensor.op.type not in kinds:
            return False
        waiting += [one for one in tensor.op.inputs if one.dtype.is_floating]
    return True


def other_readers() -> list[str]:
    """The names of the operations of this replica's step that read parts of gradients, but those of optimizers."""
    here, found = current_step().here, set()
    waiting = [one for one in here.scattered.values() if tf.is_symbolic_tensor(one)]
    while waiting:
        read = waiting.pop()
        for op in read.consumers():
            functions = [value.func.name for value in op.node_def.attr.values() if value.HasField("func")]
            if op.type in _OF_TABLES and _is_scattered(op.outputs[0], here.scattered):
                waiting += op.outputs
            elif any(name.startswith(tuple(here.branches)) for name in functions):
                # An optimizer applies it in one branch; the other one may read it, too.
                graphs = [getattr(op, name, None) for name in ("_true_graph", "_false_graph")]
                waiting += [within for graph in graphs if graph for outer, within in graph.captures if outer is read]
            elif op.type != _TAKEN:
                found.add(op.name)
    return sorted(found)


def in_parts(weights: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """While an optimizer works on weights of this replica: sharded variables are their parts."""
    return shadowed(current_step().here, in_parts=weights)


def _of_the_batch(value: tf.Tensor) -> tf.Tensor:
    """What a step assigns: the mean over all replicas' rows of what is computed from them, as for all state."""
    step = current_step()
    if step is None or step.here.state is None or step.here.is_updating or not step.can_meet():
        return value
    if step.graph is not None and step.here.state.dependence_of(value) is Dependence.SAME:
        return value
    return all_reduce_sum([value], weight=step.weight)[0]


class ShardedVariable(DistributedVariable):
    """A variable of which each replica keeps a part.

    Args:
        strategy: the strategy, with more than one replica.
        values: the parts of this process, one on each of its devices.
        aggregation: TensorFlow's.
        layout: of the variable.
    """

    is_sharded = True  # `inspection.model_state.is_sharded` asks

    def __init__(
        self,
        strategy: Any,
        values: Sequence[tf.Variable],
        aggregation: Any,
        layout: FlatBucket | None = None,
        **_: Any,
    ) -> None:
        self._layout = layout
        super().__init__(strategy, values, aggregation)

    def __getattr__(self, name: str) -> Any:
        # Others delegate to the value of a replica: here that would gather all parts, to find no attribute.
        raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")

    @property
    def layout(self) -> FlatBucket:
        """How it is laid out."""
        return self._layout

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the whole."""
        return self._layout.shapes[0]

    def get_shape(self) -> tf.TensorShape:
        return self._layout.shapes[0]

    @property
    def is_table(self) -> bool:
        """Whether each replica has whole rows, which can be looked up."""
        return isinstance(self._layout, RowLayout)

    @property
    def is_first_copy(self) -> bool:
        """Whether no process before this one has the same parts."""
        return self._distribute_strategy.is_first_copy

    @property
    def handle(self) -> tf.Tensor:
        """That of a part, on its replica. Elsewhere a tape asks for it, which would give the gradient of a part."""
        context = tf.distribute.get_replica_context()
        is_on_replica = context is not None and context.strategy is self._distribute_strategy
        if not is_on_replica and distribute_lib.get_update_replica_id() is None:
            _training_step()
        return super().handle

    def part(self) -> tf.Tensor:
        """The part of this replica, in whose context it is called. A tape records it as a read of the variable."""
        return self._values[local_replica()].read_value()

    def own_rows(self) -> dict[int, tf.Tensor]:
        """The rows of the whole that this process saves, without padding: each part's by the number of its first."""
        _, end = self._layout.begins
        places = enumerate(self._values if self.is_first_copy else [], self._distribute_strategy.first_part)
        firsts = [(number * self._layout.shard_rows, part) for number, part in places]
        return {first: part.read_value()[: end - first] for first, part in firsts if first < end}

    def assign_rows(self, rows_of: Callable[[int, int], np.ndarray]) -> None:
        """Sets this process' parts, without the others; `rows_of` gives the rows of the whole from one to another."""
        for number, part in enumerate(self._values, self._distribute_strategy.first_part):
            first, value = number * self._layout.shard_rows, np.zeros(part.shape, self._layout.dtype.as_numpy_dtype)
            rows = rows_of(first, min(first + len(value), self._layout.begins[-1]))
            value[: len(rows)] = rows
            with tf.device(part.device):
                part.assign(value)

    def _get(self) -> Any:
        with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
            return self._read()

    def _read(self) -> Any:
        if (index := self._own_index()) is not None:
            return self._values[index]
        if tf.distribute.in_cross_replica_context():
            return self._of_all_processes()
        with outside_of_branches():
            return gathered([self.part()], [self._layout])[0]

    def _own_index(self) -> int | None:
        """The index of the part that this code is about, among those of this process; `None`: the whole."""
        if tf.distribute.in_cross_replica_context():
            return distribute_lib.get_update_replica_id()
        step = current_step()
        return local_replica() if step is not None and step.here.in_parts else None

    def _of_all_processes(self) -> tf.Tensor:
        if not tf.executing_eagerly():  # Keras asks for shapes only
            value = tf.numpy_function(lambda: self._of_all_processes().numpy(), [], self.dtype)
            return tf.ensure_shape(value, self.shape)
        strategy = self._distribute_strategy
        strategy.meet_to_read(self)
        return self._layout.values(strategy.all_parts(self))[0]

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Some rows, as `tf.gather` asks for them: those of a table are looked up where they are."""
        with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
            is_whole = tf.distribute.in_cross_replica_context() or self._own_index() is not None
            if is_whole or not self.is_table:
                return tf.gather(self.read_value(), indices, name=name)
            return looked_up(self, indices)

    def _get_cross_replica(self) -> tf.Tensor:
        return self._get()

    def _dense_var_to_tensor(self, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
        return tf.convert_to_tensor(self._get(), dtype=dtype, name=name)

    def value(self) -> tf.Tensor:
        return self._dense_var_to_tensor()

    def read_value(self) -> tf.Tensor:
        return self._dense_var_to_tensor()

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self._write("assign", value)

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self._write("assign_add", value)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self._write("assign_sub", value)

    def _write(self, method: str, value: Any) -> ShardedVariable:
        with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
            index = self._own_index()
            value = tf.convert_to_tensor(value, self.dtype)
            first = self._distribute_strategy.first_part
            if index is not None and value.shape == self._values[index].shape:
                getattr(self._values[index], method)(value)
                return self
            value = tf.ensure_shape(value, self.shape)
            if index is None and not tf.distribute.in_cross_replica_context():
                index, value = local_replica(), _of_the_batch(value)
            for i, part in enumerate(self._values) if index is None else [(index, self._values[index])]:
                with tf.device(part.device):
                    getattr(part, method)(own_part(self._layout, first + i, value))
        return self

    def _gather_saveables_for_checkpoint(self) -> Any:
        raise NotImplementedError(
            f"Received: variable '{self.name}' of a FullyShardedStrategy, in a tf.train.Checkpoint or a SavedModel. "
            "Expected: model.save, model.save_weights or tfdist.callbacks.BackupAndRestore; to export the model, load "
            "what was saved without the strategy."
        )
