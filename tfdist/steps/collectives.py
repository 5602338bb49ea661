"""What replicas exchange in a training step, how long it takes by itself, and broadcasts from the chief."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.compat.upstream import CheckpointInitialValue, ControlFlowFuncGraph, distribute_utils
from tfdist.runtime.peers import Peers
from tfdist.steps.keras_step import KerasStep, current_step, global_replica, local_replica
from tfdist.steps.local_values import agreed

_REPETITIONS = 3


class Gathered(NamedTuple):
    """Shape and dtype of a matrix of each replica that all replicas get."""

    shape: tuple[int, ...]
    dtype: tf.DType


# Shape and dtype of a sum; `None` for one that is no dense tensor of a known shape.
Exchanged = tuple[tuple[int, ...], tf.DType] | Gathered | None


def all_reduce(value: tf.Tensor | tf.IndexedSlices, differentiable: bool = True, noted: bool = True) -> Any:
    """The sum over all replicas; in a Keras step its shape is noted on the step.

    Args:
        value: of this replica, in its context.
        differentiable: whether a dense tensor's gradient of the sum is the sum of gradients. Where nobody asks for
            one, or it is given in another way, tracing takes less time without: for each such sum TensorFlow looks for
            variables in all that the sum is made of, which is the whole step of every other replica of this process.
        noted: whether its shape is noted: a branch that most steps do not take is not what a step costs.
    """
    is_known = isinstance(value, tf.Tensor) and value.shape.is_fully_defined()
    if noted:
        _note((tuple(value.shape), value.dtype) if is_known else None)
    context = tf.distribute.get_replica_context()
    if not differentiable:
        value = tf.stop_gradient(value)
    if differentiable or not context.strategy.extended._use_merge_call():
        return context.all_reduce(tf.distribute.ReduceOp.SUM, value)
    return context.merge_call(_reduced, args=(value,))


def _reduced(strategy: Any, value: Any) -> Any:
    """TensorFlow's `all_reduce`."""
    destinations = value.device if isinstance(value, tf.Tensor) else value
    return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, [(value, destinations)])[0]


def all_gather(shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Stacks the shards of all replicas, with one collective for each.

    Args:
        shards: matrices of this replica, with the same shapes on all of them.

    Returns:
        For each matrix those of all replicas, one below the other, in the order of the replicas.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return list(shards)
    context = tf.distribute.get_replica_context()
    extended = context.strategy.extended
    is_branch = isinstance(tf.compat.v1.get_default_graph(), ControlFlowFuncGraph)
    # Strategies of several processes may have a way of their own.
    gather = getattr(extended, "_gather_of_rows", lambda: None)()
    if gather is None and not extended._use_merge_call() and not is_branch:
        # Compiled by XLA: there only an all-reduce works. Each replica pads its shard with zeros to the whole, and the
        # sum of all of them is the stack of the shards.
        return [_by_all_reduce(context, shard) for shard in shards]
    for shard in shards:
        _note(Gathered(tuple(shard.shape), shard.dtype))
    if gather is None and not is_branch and len(extended.worker_devices) == context.num_replicas_in_sync:
        stacked = list(context.merge_call(_copy_to_all_devices, args=tuple(shards)))
    elif gather is None and tf.executing_eagerly():
        stacked = [context.all_gather(shard, axis=0) for shard in shards]
    else:
        # As the strategy does for an all-reduce. Its public all_gather sends the shapes around, too, and transposes.
        gather = gather or functools.partial(_launched, extended)
        rows = context.num_replicas_in_sync
        stacked = [tf.ensure_shape(gather(one), [rows * one.shape[0], *one.shape[1:]]) for one in shards]
    agreed(stacked)
    return stacked


def _launched(extended: Any, shard: tf.Tensor) -> tf.Tensor:
    return extended._get_cross_device_ops(shard)._launchers[local_replica()]._all_gather(shard, None)


def _by_all_reduce(context: Any, shard: tf.Tensor) -> tf.Tensor:
    before, rows = global_replica() * shard.shape[0], shard.shape[0]
    after = (context.num_replicas_in_sync - 1) * rows - before
    return all_reduce(tf.pad(shard, [[before, after], [0, 0]]), differentiable=False)


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


def _note(one: Exchanged) -> None:
    step = current_step()
    if step is not None and local_replica() == 0:
        step.sums.append(one)


def keep(step: KerasStep, strategy: Any) -> None:
    """Keeps the shapes of what a traced step exchanges on the strategy, for `ExchangeTimer`."""
    if step.kind == "train" and step.sums:
        strategy._sums_of_step[step.model] = tuple(step.sums)


class ExchangeTimer:
    """Times what a training step exchanges, without the step. All processes have to make the same calls.

    Args:
        strategy: a tfdist strategy for data parallelism.
        exchanged: what a step adds up or gathers, one after another.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> strategy = tfdist.MirroredStrategy(["CPU:0"])
        >>> ExchangeTimer(strategy, [((1000,), tf.float32)]).seconds() > 0
        True
    """

    def __init__(self, strategy: Any, exchanged: Sequence[Exchanged]) -> None:
        self._exchange = _function(strategy, [one for one in exchanged if one is not None])
        self._is_fresh = True

    def seconds(self) -> float:
        """The median of some repetitions. Their buffers are filled with zeros within that time."""
        if self._is_fresh:
            self._exchange()
            self._is_fresh = False
        # Whoever comes early waits here for the others, not where it is timed.
        self._exchange().numpy()
        return statistics.median(_timed(self._exchange) for _ in range(_REPETITIONS))


def _timed(exchange: Callable[[], tf.Tensor]) -> float:
    began = time.perf_counter()
    exchange().numpy()
    return time.perf_counter() - began


def _function(strategy: Any, exchanged: Sequence[Any]) -> Callable[[], tf.Tensor]:
    def on_replica() -> tf.Tensor:
        done: list[tf.Tensor] = []
        for one in exchanged:
            shape, dtype = one
            with tf.control_dependencies(done[-1:]):
                zeros = tf.zeros(shape, dtype)
                done += all_gather([zeros]) if isinstance(one, Gathered) else [all_reduce(zeros)]
        with tf.control_dependencies(done):
            return tf.constant(len(done))

    @tf.function
    def exchange() -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(on_replica))[0]

    return exchange


# Bytes that one process has and all need, such as a file on the chief's disk: over the job's own collectives.

# Numbers that travel together, at most: 16 MiB as float32.
_CHUNK = 4 << 20


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


# How initial values travel from the chief whose dtype `CollectiveBcastSend` does not know: as one that it knows.
#
# It knows bool, int32, int64 and floats of 16 (not bfloat16), 32 and 64 bits.

# Wider ones, in which each value is exact, and others of the same size.
_CAST = {tf.int8: tf.int32, tf.uint8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32, tf.bfloat16: tf.float32}
_BITCAST = {tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.int64, tf.complex128: tf.int64}


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
            sent = to_wire(value)
            return from_wire(make(**{**kwargs, "initial_value": sent, "dtype": sent.dtype})(), value.dtype)

    return initial_value


def to_wire(value: tf.Tensor) -> tf.Tensor:
    """The value in a dtype that collectives know."""
    if value.dtype in _CAST:
        return tf.cast(value, _CAST[value.dtype])
    return tf.bitcast(value, _BITCAST[value.dtype]) if value.dtype in _BITCAST else value


def from_wire(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """What `to_wire` was given, of that dtype."""
    return tf.bitcast(value, dtype) if dtype in _BITCAST else tf.cast(value, dtype)
