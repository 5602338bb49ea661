"""`tfdist.FullyShardedStrategy`: data parallelism in which each replica keeps a part of every weight and slot (ZeRO-3).

steps/shards.py        the variables: gathered where they are read, with gradients that come back as parts
memory/kinds.py        blocks whose weights are gathered before their forward and their backward pass, and freed after
optimizers/in_parts.py the optimizer on parts: norms and tests for finite gradients are sums over the replicas
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.server import ProcessGoneError
from tfdist.inspection.model_state import all_optimizers_of, gather, is_sharded, own_methods, parts_of
from tfdist.memory.modes import regularization_losses
from tfdist.memory.policy import GatherPolicy
from tfdist.optimizers.sharded_optimizer import ELEMENTWISE, ShardedOptimizer
from tfdist.runtime.peers import PeerTimeoutError
from tfdist.steps.flat_bucket import FlatBucket
from tfdist.steps.keras_step import KerasStep, shadowed
from tfdist.steps.shards import ShardedVariable, own_part
from tfdist.strategies.data_parallel.strategy import DataParallelHooks
from tfdist.strategies.multi_worker import MultiWorkerExtended, MultiWorkerMirroredStrategy


class _FullyShardedExtended(MultiWorkerExtended):
    """The part of `FullyShardedStrategy` that `tf.distribute` calls."""

    # How many hosts keep the same parts.
    _copies = 1

    def _by_direct(self, name: str) -> Any:
        found = super()._by_direct(name)
        are_rows = self._copies > 1 and name in ("gather_rows", "scatter_rows")
        return functools.partial(found, within_host=True) if are_rows else found

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        strategy = self._container_strategy()
        like = kwargs.get("colocate_with")
        is_split = like is None and strategy.shards(strategy._created)
        is_weight = is_split and kwargs.get("trainable") is True and kwargs.get("shape") is None
        if strategy.num_replicas_in_sync == 1 or not (is_weight or isinstance(like, ShardedVariable)):
            return super()._create_variable(next_creator, **kwargs)
        kwargs.pop("colocate_with", None)
        device = self.worker_devices[0]
        # Values are drawn as one process draws them, one variable at a time; the chief's count.
        given = self._get_variable_creator_initial_value(0, device, None, **kwargs)
        with tf.device(device):
            value = given() if callable(given) else given
        layout = FlatBucket(value.dtype, (value.shape,), strategy.number_of_parts)
        if not value.dtype.is_floating:
            return super()._create_variable(next_creator, **{**kwargs, "initial_value": value})
        parts, name = [], kwargs.pop("name", None) or "weight"
        aggregation = kwargs.get("aggregation", tf.VariableAggregation.NONE)
        for i, device in enumerate(self.worker_devices):
            with tf.device(device):
                part = own_part(layout, strategy.first_part + i, value)
                own = {**kwargs, "initial_value": part, "name": f"{name}/replica_{i}/" if i else name}
                parts.append(next_creator(**own))
        variable = ShardedVariable(strategy, parts, aggregation, layout)
        variable._tfdist_number = next(strategy._variable_numbers)
        strategy._sharded_variables[variable._tfdist_number] = variable
        return variable


class FullyShardedHooks(DataParallelHooks):
    """Models whose weights are sharded."""

    streams_weights = True
    keeps_parts = True

    def check(self, model: keras.Model) -> None:
        super().check(model)
        if model.jit_compile is True:
            raise ValueError(
                "Received: compile(jit_compile=True) under FullyShardedStrategy, which gathers weights between layers. "
                "Expected: jit_compile=False or 'auto' (the default)."
            )
        if model.run_eagerly and own_methods(model, "train_step"):
            raise ValueError(
                "Received: run_eagerly=True and a train_step of the model's own, under FullyShardedStrategy. Only a "
                "graph tells whether it changes gradients, of which each replica has a part. Expected: "
                "run_eagerly=False."
            )
        for optimizer in all_optimizers_of(model):
            _check_optimizer(optimizer)

    def decide_jit_compile(self, decide: Callable, model: Any) -> bool:
        return False

    def initialize_variable(self, initialize: Callable, variable: Any, value: Any) -> None:
        # It may be made later than it was created, where the scope of its name is left already.
        self._strategy._created = variable
        try:
            initialize(variable, value)
        finally:
            self._strategy._created = None

    def _arrange(self, callback_list: Any, callbacks: list, model: Any) -> list:
        for callback in callbacks:
            # It is the chief's alone, and would wait for the others.
            if isinstance(callback, keras.callbacks.TensorBoard) and callback.histogram_freq and self.peers:
                raise ValueError(
                    f"Received: TensorBoard(histogram_freq={callback.histogram_freq}) under FullyShardedStrategy on "
                    "several processes, of which the chief alone would read weights. Expected: histogram_freq=0."
                )
        return super()._arrange(callback_list, callbacks, model)

    @contextlib.contextmanager
    def collected(self, model: keras.Model) -> Iterator[None]:
        with super().collected(model), self._strategy.collecting(model):
            yield

    def fits_into_memory(self, decide: Callable, model: Any) -> bool:
        return False

    def save(self, write: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        with self._strategy.collecting(model):
            return super().save(write, model, *args, **kwargs)


class FullyShardedStrategy(MultiWorkerMirroredStrategy):
    """Data parallelism for models that fit on no single device: each of N replicas keeps 1/N of all weights.

    Weights, gradients and optimizer slots are split over the replicas. A weight is gathered where a layer reads it, and
    its gradient is reduced to the parts. Weights, history and files are those of one process, as under
    `MultiWorkerMirroredStrategy`; the replicas are the processes of a cluster, or without one the devices of this
    process.

    Args:
        reshard_after_forward: whether a block's weights are freed after its forward pass, and gathered again for its
            backward pass (ZeRO-3). False: they stay until then, which saves a third of the communication (ZeRO-2).
        blocks: which layers are gathered together: names or classes of layers, each of which is a block; or "auto", as
            in `tfdist.memory.MemoryPolicy`.
        prefetch: how many blocks ahead weights are gathered; 0 or more.
        memory: `None`, or "recompute": blocks keep their inputs only, and are run again in the backward pass.
        cluster: the cluster and this process' place in it; by default what `tfdist.discover()` finds.
        compression: `None`, or `"bf16"` or `"fp16"`, to which gradients are cast for the sums, as in
            `MultiWorkerMirroredStrategy`; weights are gathered as they are.
        shard_within: `None`: all replicas share the parts. `"host"`: those of a host do, and each host keeps all parts,
            so weights are gathered on the host, and between hosts go the sums of gradients only (HSDP). It needs
            `transport="direct"`, and equally many processes on each host, two or more, each with one device.
        batch_norm: as in `MultiWorkerMirroredStrategy`.
        batch_shares: as in `MultiWorkerMirroredStrategy`, but for `"auto"`; all replicas keep equal parts of weights.
        transport: as in `MultiWorkerMirroredStrategy`.
        start_timeout: how long to wait at the start until all processes are there, in seconds.
        peer_timeout: how long to wait for another process that has not yet come to the same call, in seconds.

    Raises:
        tfdist.ClusterError: as in `MultiWorkerMirroredStrategy`.
        ValueError: for unknown arguments; where `shard_within="host"` cannot be; when a model is trained with an
            optimizer that does not update each element by itself.

    Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models" (2020).

    Example (started by `tfdist run -n 2 train.py`):
        >>> import keras, numpy as np, tfdist
        >>> strategy = tfdist.FullyShardedStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    """

    _extended_class = _FullyShardedExtended
    _hooks_class = FullyShardedHooks

    def __init__(
        self,
        *,
        reshard_after_forward: bool = True,
        blocks: str | Sequence[str | type] = "auto",
        prefetch: int = 1,
        memory: str | None = None,
        compression: str | None = None,
        shard_within: str | None = None,
        cluster: ClusterConfig | None = None,
        batch_norm: str = "global",
        batch_shares: Sequence[float] | None = None,
        transport: str | None = None,
        start_timeout: float = 300.0,
        peer_timeout: float = 1800.0,
    ):
        if memory not in (None, "recompute"):
            raise ValueError(f"Received: memory={memory!r}. Expected: None, or 'recompute'.")
        if compression not in (None, "bf16", "fp16"):
            raise ValueError(
                f"Received: compression={compression!r} under FullyShardedStrategy, where no replica has whole "
                "gradients of the global batch. Expected: None, 'bf16' or 'fp16'."
            )
        if batch_shares == "auto":
            raise ValueError(
                "Received: batch_shares='auto' under FullyShardedStrategy, which gathers weights while it computes, so "
                "that nobody knows how long a process waits. Expected: a number for each process, such as [2, 1]."
            )
        if shard_within not in (None, "host"):
            raise ValueError(f"Received: shard_within={shard_within!r}. Expected: None, or 'host'.")
        mode = "gather+recompute" if memory else "gather" if reshard_after_forward else "gather+keep"
        self._is_collecting = False
        self._created: keras.Variable | None = None
        self._sharded_variables: weakref.WeakValueDictionary[int, ShardedVariable] = weakref.WeakValueDictionary()
        super().__init__(
            cluster=cluster,
            compression=compression,
            batch_norm=batch_norm,
            batch_shares=batch_shares,
            memory=GatherPolicy(mode, blocks=blocks, prefetch=prefetch),
            transport=transport,
            start_timeout=start_timeout,
            peer_timeout=peer_timeout,
        )
        # How many parts a weight has; the number of this process' first one; whether no process before has the same.
        self.number_of_parts, self.is_first_copy = self.num_replicas_in_sync, True
        self.first_part = self.extended._input_position()[1] * len(self.extended.worker_devices)
        if shard_within and self._job:
            hosts, rank = _hosts_to_shard_within(self.extended), self._job.peers.rank
            own = next(ranks for ranks in hosts if rank in ranks)
            self.extended._copies, self.number_of_parts = len(hosts), len(own)
            self.first_part, self.is_first_copy = own.index(rank), own is hosts[0]

    @contextlib.contextmanager
    def _traced(self, step: KerasStep, batch: Any) -> Iterator[None]:
        losses = functools.partial(regularization_losses, step.model)
        with super()._traced(step, batch), shadowed(step.model, _get_regularization_losses=losses):
            yield

    def shards(self, variable: keras.Variable | None) -> bool:
        """Whether a variable that is being made is split, if it is a weight; `None`: it is none of Keras'."""
        return True

    def all_parts(self, variable: ShardedVariable) -> tf.Tensor:
        """All parts of a variable, one below the other; all processes call it."""
        if self.extended._copies > 1:
            (whole,) = self.extended._gather_of_rows()([variable._values[0].read_value()])
            # Hosts do not wait for each other here, and the chief might end before others have heard that all read.
            self._peers.acknowledge("weight read", f"read weight '{variable.name}', too")
            return whole
        (parts,) = gather(self, [variable])
        return tf.reshape(parts, [-1, parts.shape[-1]])

    def meet_to_read(self, variable: ShardedVariable) -> None:
        """Waits until all processes are about to read a variable."""
        if self._peers:
            self._meet(variable._tfdist_number, f"read weight '{variable.name}', too")

    def _meet(self, number: int | None, waits_for: str) -> int | None:
        """Tells all processes which variable this one reads, `None` if it answers; returns what the chief reads."""
        numbers = self._peers.gather("weight", number, f"{waits_for} (each process has a part of it)")
        if set(numbers) - {None, numbers[0]}:
            read = zip(self._peers.names, numbers, strict=True)
            raise RuntimeError(
                f"Received: processes that read other weights at the same point: {dict(read)}. Expected: all read, or "
                "save, the same ones in the same order. Look for code that only one rank runs."
            )
        return numbers[0]

    @contextlib.contextmanager
    def collecting(self, model: keras.Model) -> Iterator[None]:
        """While the block runs on the chief, it can read any variable: the others answer, and run the block after."""
        if self._is_collecting or not self._peers or not any(map(is_sharded, model.variables)):
            yield
            return
        waits_for, is_together = "save the model, too", True
        self._is_collecting = True
        try:
            # The chief says what it reads next; nobody has more than one whole variable at a time.
            while not self.is_chief and (number := self._meet(None, waits_for)) is not None:
                self.all_parts(self._sharded_variables[number])
            yield
        except (PeerTimeoutError, ProcessGoneError):
            is_together = False
            raise
        finally:
            self._is_collecting = False
            if self.is_chief and is_together:
                self._meet(None, waits_for)


def _hosts_to_shard_within(extended: MultiWorkerExtended) -> Sequence[Sequence[int]]:
    """The ranks of the processes of each host.

    Raises:
        ValueError: if the processes of a host cannot share the parts.
    """
    hosts = extended._by_direct("hosts")
    if hosts is None:
        raise ValueError(
            "Received: shard_within='host' with TensorFlow's collectives, or with several devices in a process. "
            "Expected: transport='direct', which knows the hosts, and one device in each process."
        )
    counts = [len(ranks) for ranks in hosts]
    if len(set(counts)) > 1 or counts[0] == 1:
        raise ValueError(
            f"Received: shard_within='host' on hosts with {', '.join(map(str, counts))} processes that share memory. "
            "Expected: equally many on each host, and two or more; with one, each would keep all weights, as under "
            "MultiWorkerMirroredStrategy."
        )
    return hosts


def _check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses optimizers that need to see whole variables.

    Raises:
        ValueError: for one that does not update each element by itself.
    """
    is_outer = parts_of(optimizer) and not isinstance(optimizer, ShardedOptimizer)
    if not is_outer and type(optimizer) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ValueError(
            f"Received: optimizer {type(optimizer).__name__} under FullyShardedStrategy, where each replica updates a "
            f"part of each variable. Expected: one of {names}, which update each element by itself."
        )
