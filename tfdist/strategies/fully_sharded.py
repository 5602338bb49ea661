"""`tfdist.FullyShardedStrategy`: data parallelism in which each replica keeps a part of every weight and slot (ZeRO-3).

steps/shards.py        the variables: gathered where they are read, with gradients that come back as parts
strategies/parts.py    how they are made, read and saved
memory/kinds.py        blocks whose weights are gathered before their forward and their backward pass, and freed after
optimizers/in_parts.py the optimizer on parts: norms and tests for finite gradients are sums over the replicas
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.config import ClusterConfig
from tfdist.memory.modes import regularization_losses
from tfdist.memory.policy import GatherPolicy
from tfdist.steps.keras_step import KerasStep, shadowed
from tfdist.steps.shards import ShardedVariable
from tfdist.strategies.multi_worker import MultiWorkerExtended, MultiWorkerMirroredStrategy
from tfdist.strategies.parts import PartsHooks


class _FullyShardedExtended(MultiWorkerExtended):
    """The part of `FullyShardedStrategy` that `tf.distribute` calls."""

    # How many hosts keep the same parts.
    _copies = 1

    def _by_direct(self, name: str) -> Any:
        found = super()._by_direct(name)
        are_rows = self._copies > 1 and name in ("gather_rows", "scatter_rows")
        return functools.partial(found, within_host=True) if are_rows else found


class FullyShardedHooks(PartsHooks):
    """Models whose weights are sharded."""

    streams_weights = True
    keeps_parts = True
    _splits_all = True

    def check(self, model: keras.Model) -> None:
        super().check(model)
        if model.jit_compile is True:
            raise ValueError(
                "Received: compile(jit_compile=True) under FullyShardedStrategy, which gathers weights between layers. "
                "Expected: jit_compile=False or 'auto' (the default)."
            )

    def decide_jit_compile(self, decide: Callable, model: Any) -> bool:
        return False

    def fits_into_memory(self, decide: Callable, model: Any) -> bool:
        return False


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
    # With `shard_within`: how many parts a weight has, and which of them is that of this process.
    _place: tuple[int, int] | None = None

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
        if shard_within and self._job:
            hosts, rank = _hosts_to_shard_within(self.extended), self._job.peers.rank
            own = next(ranks for ranks in hosts if rank in ranks)
            self.extended._copies = len(hosts)
            self._place, self.is_first_copy = (len(own), own.index(rank)), own is hosts[0]

    @contextlib.contextmanager
    def _traced(self, step: KerasStep, batch: Any) -> Iterator[None]:
        losses = functools.partial(regularization_losses, step.model)
        with super()._traced(step, batch), shadowed(step.model, _get_regularization_losses=losses):
            yield

    def shards(self, variable: keras.Variable | None) -> bool:
        return True

    @property
    def number_of_parts(self) -> int:
        return super().number_of_parts if self._place is None else self._place[0]

    @property
    def first_part(self) -> int:
        return super().first_part if self._place is None else self._place[1]

    def all_parts(self, variable: ShardedVariable) -> tf.Tensor:
        if self.extended._copies > 1:
            (whole,) = self.extended._gather_of_rows()([variable._values[0].read_value()])
            # Hosts do not wait for each other here, and the chief might end before others have heard that all read.
            self._peers.acknowledge("weight read", f"read weight '{variable.name}', too")
            return whole
        return super().all_parts(variable)


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
