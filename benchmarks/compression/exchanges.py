"""What the replicas of one process give each other in the steps that are traced within a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def noted_exchanges() -> Iterator[list[tuple[tuple[int, ...], Any]]]:
    """Collects shape and dtype of each dense tensor that a replica adds up or gives to the others, in this order.

    What only the steps before a compressor's `start_step` send does not count.
    """
    from tfdist.compression import power_sgd, top_k
    from tfdist.steps import gradients, in_step, reduce
    from tfdist.strategies.data_parallel import batch_norm

    found: list[tuple[tuple[int, ...], Any]] = []
    all_reduce, all_gather, pack = reduce.all_reduce, reduce.all_gather, gradients.pack

    def note(value: Any) -> None:
        if reduce.local_replica() == 0 and not isinstance(value, gradients.tf.IndexedSlices):
            found.append((tuple(value.shape), value.dtype))

    def noting_sum(value: Any, **how: Any) -> Any:
        note(value)
        return all_reduce(value, **how)

    def noting_gather(shards: Any) -> Any:
        for shard in shards:
            note(shard)
        return all_gather(shards)

    def noting_sums(values: Any) -> Any:
        packed = pack(values)
        note(packed)
        return gradients.unpack(all_reduce(packed, differentiable=False), values)

    with contextlib.ExitStack() as stack:
        for module in (gradients, batch_norm, in_step):
            stack.enter_context(mock.patch.object(module, "all_reduce", noting_sum))
        for module in (power_sgd, top_k):
            stack.enter_context(mock.patch.object(module, "sum_of", noting_sums))
        stack.enter_context(mock.patch.object(top_k, "all_gather", noting_gather))
        yield found
