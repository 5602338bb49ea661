"""What replicas exchange: sums, gathers, values of the chief, all made of what collectives carry.

Collectives know int32, int64 and floats of 16 (not bfloat16), 32 and 64 bits, dense and not empty. The rest is made of
them:

dtypes   the same bits, or the same values, in a dtype that is carried
text     how long each text is, and the bytes of all
ragged   the lengths of the rows, and the values
sparse   shapes, indices and values; indices count on from one replica to the next
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat.upstream import (
    CheckpointInitialValue,
    ControlFlowFuncGraph,
    DistributedValues,
    cross_device_ops,
    distribute_utils,
    values,
)
from tfdist.runtime.exchange import Exchange, ExchangeError, Purpose
from tfdist.runtime.peers import Peers
from tfdist.steps.keras_step import check_that_all_are_here, global_replica, local_replica, step_of

_AGREED = "tfdist_agreed"
# A gather along an axis, of a dense tensor for each replica of this process, or of one.
Gather = Callable[[Any, int], Any]
# Bytes above which a tensor travels by itself, where others share a collective: they would be copied.
_LARGE = 4 << 20
# Numbers that travel together, at most: 16 MiB as float32.
_CHUNK = 4 << 20
# What NumPy adds up, and what it does slowly: that is added up as float32, and rounded where it leaves the host. All
# else goes TensorFlow's way.
_ADDED = (tf.float32, tf.float64, tf.int32, tf.int64)
_NARROW = (tf.bfloat16, tf.float16)
_SUM, _GATHER = "Collective sum of the replicas: %s", "Collective gather of the replicas: %s"
# In place of dtypes that collectives do not know: wider ones, in which each value is exact, or of the same size.
_CAST = {
    **dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32),
    tf.bfloat16: tf.float32,
}
_BITCAST = {tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.int64, tf.complex128: tf.int64}


def all_reduce(value: tf.Tensor | tf.IndexedSlices, differentiable: bool = True) -> Any:
    """The sum over all replicas.

    Args:
        value: of this replica, in its context.
        differentiable: whether a dense tensor's gradient of the sum is the sum of gradients. Where nobody asks for
            one, or it is given in another way, tracing takes less time without: for each such sum TensorFlow looks for
            variables in all that the sum is made of, which is the whole step of every other replica of this process.
    """
    check_that_all_are_here()
    context = tf.distribute.get_replica_context()
    if not differentiable:
        value = tf.stop_gradient(value)
    if differentiable or not context.strategy.extended._use_merge_call():
        return context.all_reduce(tf.distribute.ReduceOp.SUM, value)
    return context.merge_call(_reduced, args=(value,))


def sum_of_each() -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]] | None:
    """A function that adds up several tensors of one dtype at once; `None` where they have to be packed into one."""
    check_that_all_are_here()
    return getattr(tf.distribute.get_strategy().extended, "_sum_of_each", lambda: None)()


def _reduced(strategy: Any, value: Any) -> Any:
    """TensorFlow's `all_reduce`."""
    destinations = value.device if isinstance(value, tf.Tensor) else value
    return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, [(value, destinations)])[0]


def all_gather(shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Stacks the shards of all replicas, with few collectives.

    Args:
        shards: matrices of this replica, with the same shapes on all of them.

    Returns:
        For each matrix those of all replicas, one below the other, in the order of the replicas.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return list(shards)
    check_that_all_are_here()
    context = tf.distribute.get_replica_context()
    extended = context.strategy.extended
    is_branch = isinstance(tf.compat.v1.get_default_graph(), ControlFlowFuncGraph)
    # Strategies of several processes may have a way of their own.
    gather = getattr(extended, "_gather_of_rows", lambda: None)()
    if gather is None and not extended._use_merge_call() and not is_branch:
        # Compiled by XLA: there only an all-reduce works. Each replica pads its shard with zeros to the whole, and the
        # sum of all of them is the stack of the shards.
        return gathered_together(functools.partial(_by_all_reduce, context), shards)
    if gather is None and not is_branch and len(extended.worker_devices) == context.num_replicas_in_sync:
        stacked = list(context.merge_call(_copy_to_all_devices, args=tuple(shards)))
    elif gather is None and tf.executing_eagerly():
        stacked = [context.all_gather(shard, axis=0) for shard in shards]
    else:
        # As the strategy does for an all-reduce. Its public all_gather sends the shapes around, too, and transposes.
        gather = gather or functools.partial(gathered_together, functools.partial(_launched, extended))
        stacked = gather(shards)
    agreed(stacked)
    return stacked


def _together(matrices: Sequence[tf.Tensor]) -> Iterator[list[int]]:
    """The positions of matrices that share a collective, which takes a millisecond: small ones of one dtype."""
    small: dict[tf.DType, list[int]] = {}
    for i, one in enumerate(matrices):
        if one.shape.num_elements() * one.dtype.size > _LARGE:
            yield [i]
        else:
            small.setdefault(one.dtype, []).append(i)
    yield from small.values()


def gathered_together(gather: Callable[[tf.Tensor], tf.Tensor], shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The shards of all replicas, of which the small ones share a collective.

    Args:
        gather: stacks the shards of one matrix.
        shards: as those of `all_gather`.
    """
    stacked: list = [None] * len(shards)
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    for chosen in _together(shards):
        rows, width = [shards[i].shape[0] for i in chosen], shards[chosen[0]].shape[-1]
        if len(chosen) == 1:
            stacked[chosen[0]] = tf.ensure_shape(gather(shards[chosen[0]]), [replicas * rows[0], width])
            continue
        whole = gather(tf.concat([shards[i] for i in chosen], 0))
        by_replica = tf.reshape(whole, [replicas, sum(rows), width])
        for i, part in zip(chosen, tf.split(by_replica, rows, 1), strict=True):
            stacked[i] = tf.reshape(part, [-1, width])
    return stacked


def scattered_together(scatter: Callable[[tf.Tensor], tf.Tensor], matrices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """This replica's rows of sums of matrices, of which the small ones share a collective.

    Args:
        scatter: returns the rows for one matrix.
        matrices: as those of `reduce_scatter`.
    """
    own: list = [None] * len(matrices)
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    for chosen in _together(matrices):
        if len(chosen) == 1:
            own[chosen[0]] = scatter(matrices[chosen[0]])
            continue
        rows, width = [matrices[i].shape[0] // replicas for i in chosen], matrices[chosen[0]].shape[-1]
        columns = [tf.reshape(matrices[i], [replicas, count, width]) for i, count in zip(chosen, rows, strict=True)]
        whole = scatter(tf.reshape(tf.concat(columns, 1), [-1, width]))
        for i, part in zip(chosen, tf.split(whole, rows), strict=True):
            own[i] = part
    return own


def _launched(extended: Any, shard: tf.Tensor) -> tf.Tensor:
    # TensorFlow gathers no bfloat16, but these are only bits.
    sent = tf.bitcast(shard, tf.float16) if shard.dtype == tf.bfloat16 else shard
    gathered = extended._get_cross_device_ops(sent)._launchers[local_replica()]._all_gather(sent, None)
    return tf.bitcast(gathered, shard.dtype) if sent is not shard else gathered


def _by_all_reduce(context: Any, shard: tf.Tensor) -> tf.Tensor:
    before, rows = global_replica() * shard.shape[0], shard.shape[0]
    after = (context.num_replicas_in_sync - 1) * rows - before
    return all_reduce(tf.pad(shard, [[before, after], [0, 0]]), differentiable=False)


def reduce_scatter(matrices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Adds up matrices over all replicas, each of which gets its own rows of the sums: `all_gather` the other way.

    It sends half of what an all-reduce does: between the devices of a process; by the direct transport, where each
    process has one replica; by TensorFlow's collectives in a graph on CPUs. By NCCL and Horovod, compiled by XLA, and
    between the devices of a process in a branch or outside of a graph, it is an all-reduce, of which each replica cuts
    out its rows. It has no gradient.

    Args:
        matrices: of this replica, with the same shapes on all of them, `[replicas * rows, width]`.

    Returns:
        For each matrix this replica's `[rows, width]` of the sum; the first rows are the first replica's.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return list(matrices)
    check_that_all_are_here()
    context = tf.distribute.get_replica_context()
    extended = context.strategy.extended
    matrices = [tf.stop_gradient(one) for one in matrices]
    is_branch = isinstance(tf.compat.v1.get_default_graph(), ControlFlowFuncGraph)
    if (scatter := getattr(extended, "_scatter_of_rows", lambda: None)()) is not None:
        return scatter(matrices)
    is_local = len(extended.worker_devices) == context.num_replicas_in_sync
    if is_local and extended._use_merge_call() and not is_branch and not tf.executing_eagerly():
        return list(context.merge_call(_add_on_all_devices, args=tuple(matrices)))
    return scattered_together(_rows_of_this, matrices)


def _rows_of_this(matrix: tf.Tensor) -> tf.Tensor:
    whole = all_reduce(matrix, differentiable=False)
    rows = whole.shape[0] // tf.distribute.get_strategy().num_replicas_in_sync
    return whole[global_replica() * rows : (global_replica() + 1) * rows]


def _add_on_all_devices(strategy: tf.distribute.Strategy, *matrices: Any) -> tuple:
    """Adds up matrices of devices of one process: each device adds up its rows of all of them."""
    devices, results = strategy.extended.worker_devices, []
    for matrix in matrices:
        parts = []
        for one in strategy.experimental_local_results(matrix):
            with tf.device(one.device):
                parts.append(tf.split(one, len(devices)))
        added = []
        for device, rows in zip(devices, zip(*parts, strict=True), strict=True):
            with tf.device(device):
                added.append(tf.add_n(rows))
        results.append(distribute_utils.regroup(tuple(added), always_wrap=True))
    return tuple(results)


def exchanged_rows(launcher: Any, matrix: tf.Tensor) -> tf.Tensor:
    """This replica's rows of the sum, of what all others send it: TensorFlow 2.21 has no reduce-scatter on CPUs.

    Args:
        launcher: of this replica's collectives, from TensorFlow.
        matrix: of this replica, of a shape that is the same on all, with equally many rows for each.
    """
    size = launcher._group_size
    with tf.device(launcher._device):
        parts = tf.raw_ops.CollectiveAllToAllV2(
            input=tf.reshape(matrix, [size, matrix.shape[0] // size, *matrix.shape[1:]]),
            group_size=size,
            group_key=launcher._group_key,
            instance_key=launcher._next_instance_key(),
            ordering_token=[launcher._get_ordering_token()],
            timeout_seconds=launcher._options.timeout_seconds or 0,
        )
        return tf.add_n(tf.unstack(parts))


def _copy_to_all_devices(strategy: tf.distribute.Strategy, *shards: Any) -> tuple:
    """Gathers shards of devices of one process: each device concatenates copies of all of them."""
    gathered = []
    for shard in shards:
        parts, whole = strategy.experimental_local_results(shard), []
        for device in strategy.extended.worker_devices:
            with tf.device(device):
                whole.append(tf.concat(parts, 0))
        gathered.append(distribute_utils.regroup(tuple(whole), always_wrap=True))
    return tuple(gathered)


def agreed(values: Iterable[tf.Tensor]) -> None:
    """Notes that tensors have the same values on all replicas: a strategy has reduced or gathered them."""
    for value in values:
        if tf.is_symbolic_tensor(value):
            names_agreed_in(value.graph).add(value.name)


def names_agreed_in(graph: tf.Graph) -> set[str]:
    """The names of the tensors of a graph that have the same values on all replicas."""
    kept = graph.get_collection_ref(_AGREED)
    if not kept:
        kept.append(set())
    return kept[0]


def broadcast_bytes(strategy: tf.distribute.Strategy, peers: Peers, data: bytes | None) -> bytes:
    """Gives every process what rank 0 has; all call it at the same point.

    Args:
        strategy: of several processes.
        peers: these processes.
        data: what rank 0 has; `None` on the others.

    Returns:
        The bytes, on every process.
    """
    is_sender = peers.rank == 0
    size = peers.gather("broadcast", len(data) if is_sender else None, "take over what is on the chief's disk")[0]
    received = bytearray()
    # A sum to which all others add 0, since every transport can add float32 numbers; half of one holds 16 bits exactly.
    add = _sum_of(strategy)
    for begin in range(0, size, 2 * _CHUNK):
        length = min(2 * _CHUNK, size - begin)
        numbers = np.zeros((length + 1) // 2, "<u2")
        if is_sender:
            numbers = np.frombuffer(data[begin : begin + length] + b"\0" * (length % 2), "<u2")
        total = add(tf.constant(numbers, tf.float32)).numpy().astype("<u2")
        received += total.tobytes()[:length]
    return bytes(received)


def _sum_of(strategy: tf.distribute.Strategy) -> tf.types.experimental.PolymorphicFunction:
    first = strategy.extended._input_position()[1] * len(strategy.extended.worker_devices)

    def on_replica(numbers: tf.Tensor) -> tf.Tensor:
        # One replica of each process has the numbers, its others have zeros. Identity: all are on a replica's device.
        return all_reduce(tf.identity(numbers) if global_replica() == first else tf.zeros_like(numbers))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)], autograph=False)
    def add(numbers: tf.Tensor) -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(on_replica, (numbers,)))[0]

    return add


def broadcast(make: Callable[..., Callable], device: str, **kwargs: Any) -> Callable[[], tf.Tensor]:
    """A function that returns a variable's initial value, which is the chief's on all workers.

    Args:
        make: `StrategyExtended._get_variable_creator_initial_value` for the first replica of a worker, of TensorFlow:
            it is given the variable's arguments, and returns such a function.
        device: the first replica's.
        kwargs: the variable's arguments.
    """

    def initial_value() -> tf.Tensor:
        with tf.device(device):
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            if isinstance(value, CheckpointInitialValue):
                value = value.wrapped_value
            value = tf.convert_to_tensor(value, kwargs.get("dtype"))
            sent = to_carried(value)
            return from_carried(make(**{**kwargs, "initial_value": sent, "dtype": sent.dtype})(), value.dtype)

    return initial_value


def to_carried(value: tf.Tensor) -> tf.Tensor:
    """The value in a dtype that collectives know."""
    if value.dtype in _CAST:
        return tf.cast(value, _CAST[value.dtype])
    return tf.bitcast(value, _BITCAST[value.dtype]) if value.dtype in _BITCAST else value


def from_carried(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """What `to_carried` was given, of that dtype."""
    return tf.bitcast(value, dtype) if dtype in _BITCAST else tf.cast(value, dtype)


def of_first_replica(value: tf.Tensor) -> tf.Tensor:
    """The value of the first replica, on all of them."""
    # The others add zeros.
    carried = to_carried(value)
    return from_carried(all_reduce(carried if global_replica() == 0 else tf.zeros_like(carried)), value.dtype)


def gathered(value: Any, axis: int, gather: Gather) -> Any:
    """What all replicas have, one behind the other.

    Args:
        value: dense, ragged or sparse tensors of the replicas of this process, or a single one.
        axis: along which dimension; ragged and sparse tensors have rows only.
        gather: does it with what collectives carry.

    Raises:
        ValueError: for rows of other dimensions.
    """
    kind = values_of(value)[0]
    if isinstance(kind, (tf.RaggedTensor, tf.SparseTensor)):
        if axis:
            raise ValueError(f"Received: axis={axis} to gather a {type(kind).__name__}. Expected: axis=0.")
        return (_ragged if isinstance(kind, tf.RaggedTensor) else _sparse)(value, gather)
    axis %= kind.shape.rank or 1
    if 0 in [size for number, size in enumerate(kind.shape) if number != axis]:
        return _nothing(value, axis, gather)
    if kind.dtype == tf.string:
        return _text(value, axis, gather)
    return each(lambda one: from_carried(one, kind.dtype), gather(each(to_carried, value), axis))


def in_order_of_rows(value: Any, whole: Any, sizes: tf.Tensor, workers: int) -> Any:
    """Sorts what was gathered by worker into the order of the rows of a global batch.

    Args:
        value: what this process had.
        whole: what came of it.
        sizes: how many rows of it each replica had, worker by worker.
        workers: how many there are.
    """
    count = len(values_of(value))
    begins = tf.cumsum(sizes, exclusive=True)
    # Local replica k of worker w has piece `k * workers + w`.
    replicas = tf.reshape(tf.transpose(tf.reshape(tf.range(workers * count), [workers, count])), [-1])
    rows = tf.ragged.range(tf.gather(begins, replicas), tf.gather(begins + sizes, replicas)).flat_values
    if not isinstance(whole, tf.SparseTensor):
        return tf.gather(whole, rows)
    places = tf.gather(tf.cast(tf.argsort(rows), tf.int64), whole.indices[:, 0])
    indices = tf.concat([places[:, tf.newaxis], whole.indices[:, 1:]], 1)
    return tf.sparse.reorder(tf.SparseTensor(indices, whole.values, whole.dense_shape))


def _nothing(value: Any, axis: int, gather: Gather) -> Any:
    """Of tensors without columns, say: TensorFlow's collective of no bytes ends the process."""
    sizes = gather(each(lambda one: tf.shape(one)[axis][tf.newaxis], value), 0)

    def put_together(one: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        shape = tf.tensor_scatter_nd_update(tf.shape(one), [[axis]], [tf.reduce_sum(sizes)])
        return tf.zeros(shape, one.dtype)

    return each(put_together, value, sizes)


def _ragged(value: Any, gather: Gather) -> Any:
    depth = values_of(value)[0].ragged_rank
    lengths = [gather(each(lambda one, i=i: one.nested_row_lengths()[i], value), 0) for i in range(depth)]
    flat = gathered(each(lambda one: one.flat_values, value), 0, functools.partial(of_any_size, gather))
    return each(lambda flat, *lengths: tf.RaggedTensor.from_nested_row_lengths(flat, lengths), flat, *lengths)


def _sparse(value: Any, gather: Gather) -> Any:
    shapes = gather(each(lambda one: one.dense_shape[tf.newaxis], value), 0)
    counts = gather(each(lambda one: tf.shape(one.indices)[:1], value), 0)
    indices = of_any_size(gather, each(lambda one: one.indices, value))
    values = gathered(each(lambda one: one.values, value), 0, functools.partial(of_any_size, gather))

    def put_together(shapes: tf.Tensor, counts: tf.Tensor, indices: tf.Tensor, values: tf.Tensor) -> tf.SparseTensor:
        rows = indices[:, 0] + tf.repeat(tf.cumsum(shapes[:, 0], exclusive=True), counts)
        shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], tf.reduce_max(shapes[:, 1:], 0)], 0)
        return tf.SparseTensor(tf.concat([rows[:, tf.newaxis], indices[:, 1:]], 1), values, shape)

    return each(put_together, shapes, counts, indices, values)


def _text(value: Any, axis: int, gather: Gather) -> Any:
    rank = values_of(value)[0].shape.rank
    order = [axis, *(i for i in range(rank) if i != axis)]
    value = each(lambda one: tf.transpose(one, order), value)
    sizes = gather(each(tf.strings.length, value), 0)
    texts = each(lambda one: tf.io.decode_raw(tf.strings.reduce_join(one), tf.uint8), value)

    def put_together(sizes: tf.Tensor, codes: tf.Tensor) -> tf.Tensor:
        characters = tf.gather([bytes([code]) for code in range(256)], codes)
        texts = tf.RaggedTensor.from_row_lengths(characters, tf.reshape(sizes, [-1]))
        whole = tf.reshape(tf.strings.reduce_join(texts, -1), tf.shape(sizes))
        return tf.transpose(tf.ensure_shape(whole, sizes.shape), [order.index(i) for i in range(rank)])

    return each(put_together, sizes, of_any_size(gather, each(to_carried, texts)))


def of_any_size(gather: Gather, value: Any, axis: int = 0) -> Any:
    """A gather of what may be nothing at all on every replica: TensorFlow's collective of no bytes ends the process."""
    sizes = gather(each(lambda one: tf.shape(one)[axis][tf.newaxis] + 1, value), 0)
    whole = gather(
        each(lambda one: tf.pad(one, [[int(i == axis), 0] for i in range(one.shape.rank)]), value),
        axis,
    )

    def without_first(whole: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        ends = tf.cumsum(sizes)
        return tf.gather(whole, tf.ragged.range(ends - sizes + 1, ends).flat_values, axis=axis)

    return each(without_first, whole, sizes)


def values_of(value: Any) -> list:
    """The tensors of the replicas of this process."""
    return list(value.values) if isinstance(value, DistributedValues) else [value]


def each(make: Callable[..., Any], *values: Any) -> Any:
    """What is made of the values of each replica, where they are."""
    results = []
    for of_one in zip(*map(values_of, values), strict=False):
        with tf.device(getattr(of_one[0], "device", None)):
            results.append(make(*of_one))
    if not all(isinstance(value, DistributedValues) for value in values):
        return results[0]  # what was gathered is the same on all, and a single one where it was of one device
    return distribute_utils.regroup(tuple(results), wrap_class=type(values[0]), always_wrap=True)


class DirectReduction(cross_device_ops.CollectiveAllReduce):
    """TensorFlow's `CollectiveAllReduce`, carried by `tfdist.runtime.exchange` in place of its gRPC servers.

        replicas' tensors ---+
        token.read_value() --+--> numpy_function: Exchange.all_reduce --> sum, on each replica's device
                                             |
                                             +--> token.assign()

    All processes have to exchange the same values in the same order. TensorFlow may run operations that do not depend
    on each other in any order, so each of these reads a variable that the one before has written. It gathers slices,
    too, where each process has one replica.

    Args:
        exchange: connects the processes.
        original: what it stands for.

    Attributes:
        hosts: the ranks of the processes of each host.
    """

    def __init__(self, exchange: Exchange, original: cross_device_ops.CollectiveAllReduce) -> None:
        super().__init__(original._devices, original._group_size, original._options, original._collective_keys)
        self._exchange, self.hosts = exchange, exchange.hosts
        self._token = _token_of(exchange)

    def _all_reduce(self, reduce_op: Any, value: Any, replica_id: int, options: Any) -> Any:
        # Called for one replica at a time: with several in a process, the first one would wait for the second.
        if len(self._devices) > 1:
            return super()._all_reduce(reduce_op, value, replica_id, options)

        def of_one(one: Any) -> Any:
            if _is_dense(one):
                return self._sum(reduce_op, [one])[0]
            if isinstance(one, tf.IndexedSlices) and reduce_op == tf.distribute.ReduceOp.SUM:
                return self._slices(one)
            return super(DirectReduction, self)._all_reduce(reduce_op, one, replica_id, options)

        return tf.nest.map_structure(of_one, value)

    def _all_reduce_per_replica_values(self, reduce_op: Any, per_replica_values: Sequence[Any], options: Any) -> list:
        results = []
        for value in per_replica_values:
            if all(map(_is_dense, value.values)):
                summed = self._sum(reduce_op, value.values)
                results.append(distribute_utils.regroup(summed, wrap_class=values.Mirrored))
            else:
                results += super()._all_reduce_per_replica_values(reduce_op, [value], options)
        return results

    def seconds_waited(self) -> float:
        """For how long this process has exchanged values, in all."""
        return self._exchange.seconds_waited

    def sum_of_each(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over all processes; each process has one replica.

        Args:
            values: of this process, of one dtype; shapes and dtype are the same on all.
        """
        with tf.device("CPU:0"):
            sums = self._added(self._exchange.all_reduce_each, values, len(values))
        with tf.device(self._devices[0]):
            found = [tf.ensure_shape(one, value.shape) for one, value in zip(sums, values, strict=True)]
        agreed(found)
        return found

    def gather_rows(self, matrices: Sequence[tf.Tensor], within_host: bool = False) -> list[tf.Tensor]:
        """The rows of all processes, one below the other, by rank; each process has one replica.

        Args:
            matrices: of this process; shapes and dtypes are the same on all.
            within_host: whether those of this host are meant, of which each host has equally many.
        """
        purpose, parts = _purpose(), self._parts(within_host)

        def gather(*tables: np.ndarray) -> list[np.ndarray]:
            return self._exchange.all_gather(tables, purpose, within_host)

        with tf.device("CPU:0"):
            gathered = self._call(_GATHER, gather, [one.dtype for one in matrices], matrices)
        with tf.device(self._devices[0]):
            shapes = [[one.shape[0] * parts, *one.shape[1:]] for one in matrices]
            return [tf.reshape(whole, shape) for whole, shape in zip(gathered, shapes, strict=True)]

    def scatter_rows(self, matrices: Sequence[tf.Tensor], within_host: bool = False) -> list[tf.Tensor]:
        """This process' rows of sums over all processes; each process has one replica.

        Args:
            matrices: of this process, with equally many rows for each; shapes and dtypes are the same on all.
            within_host: whether each host has all rows, as in `gather_rows`; sums are over all processes nevertheless.
        """
        scatter = functools.partial(self._exchange.reduce_scatter, within_host=within_host)
        own: list = [None] * len(matrices)
        for dtype in dict.fromkeys(one.dtype for one in matrices):
            chosen = [i for i, one in enumerate(matrices) if one.dtype == dtype]
            with tf.device("CPU:0"):
                found = self._added(scatter, [matrices[i] for i in chosen], len(chosen))
            with tf.device(self._devices[0]):
                for i, rows in zip(chosen, found, strict=True):
                    shape = matrices[i].shape
                    own[i] = tf.reshape(rows, [shape[0] // self._parts(within_host), *shape[1:]])
        return own

    def _parts(self, within_host: bool) -> int:
        return len(self.hosts[0]) if within_host else self._group_size

    def _slices(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """The slices of all processes: who applies them adds up those of one row."""
        parts, purpose = [slices.values, slices.indices], _purpose()

        def gather(*tables: np.ndarray) -> list[np.ndarray]:
            return self._exchange.gather_rows(tables, purpose)

        with tf.device("CPU:0"):
            gathered = self._call(_GATHER, gather, [part.dtype for part in parts], parts)
        with tf.device(self._devices[0]):
            rows, indices = (
                tf.ensure_shape(x, tf.TensorShape([None]).concatenate(part.shape[1:]))
                for x, part in zip(gathered, parts, strict=True)
            )
            return tf.IndexedSlices(rows, indices, slices.dense_shape)

    def _sum(self, reduce_op: Any, replicas: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with tf.device("CPU:0"):
            (total,) = self._added(self._exchange.all_reduce, replicas)
        total.set_shape(replicas[0].shape)
        results = []
        for device in self._devices:
            with tf.device(device):
                mean = reduce_op == tf.distribute.ReduceOp.MEAN
                results.append(total / self._group_size if mean else tf.identity(total))
        return results

    def _added(self, exchange: Callable[..., Any], given: Sequence[tf.Tensor], results: int = 1) -> list[tf.Tensor]:
        """What a method of the exchange adds up of tensors of one dtype."""
        dtype = given[0].dtype
        is_narrow, purpose = dtype in _NARROW, _purpose()

        def add_up(*parts: np.ndarray) -> np.ndarray:
            return exchange(parts, np.dtype(dtype.as_numpy_dtype) if is_narrow else None, purpose)

        parts = [tf.cast(part, tf.float32) for part in given] if is_narrow else list(given)
        sums = self._call(_SUM, add_up, [parts[0].dtype] * results, parts)
        return [tf.cast(one, dtype) for one in sums]

    def _call(
        self, failure: str, function: Callable[..., Any], dtypes: Sequence[tf.DType], arguments: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        def in_turn(number: np.ndarray, *given: np.ndarray) -> list[np.ndarray]:
            try:
                found = function(*map(np.asarray, given))
                return [*(found if isinstance(found, list) else [found]), number + 1]
            except ExchangeError as error:
                raise tf.errors.UnavailableError(None, None, failure % error) from None

        *results, number = tf.numpy_function(in_turn, [self._token.read_value(), *arguments], [*dtypes, tf.int64])
        self._token.assign(number)
        return results


@functools.cache
def _token_of(exchange: Exchange) -> tf.Variable:
    """One for all that use an exchange: sums of devices and of hosts may be in the same graph."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False)


def _purpose() -> Purpose:
    """The step that is traced."""
    step = step_of(tf.distribute.get_strategy())
    return Purpose() if step is None else Purpose(*step.purpose)


def _is_dense(value: Any) -> bool:
    return not isinstance(value, tf.IndexedSlices) and value.dtype in (*_ADDED, *_NARROW)
