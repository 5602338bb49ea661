"""Sums of the micro-batches' weight gradients, on the devices of the variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.layer_graph.chunk import Chunk
from tfdist.strategies.pipeline.plan import PipelinePlan
from tfdist.strategies.pipeline.weight_gradients import RowProduct


class GradientSums:
    """The gradients of all chunks' trainable variables, added up over micro-batches."""

    def __init__(self, plan: PipelinePlan):
        self._plan = plan
        self._sums: dict[tuple[int, int], Any] = {}
        self._factors: dict[tuple[int, int], tuple[RowProduct, list]] = {}

    def add(self, chunk: Chunk, gradients: Sequence[Any], products: Sequence[RowProduct | None]) -> None:
        """Adds one micro-batch's gradients of a chunk, on the current device."""
        for i, (gradient, product) in enumerate(zip(gradients, products, strict=True)):
            if product is not None:
                self._factors.setdefault((chunk.index, i), (product, []))[1].append(gradient)
            elif gradient is not None:
                before = self._sums.get((chunk.index, i))
                self._sums[chunk.index, i] = gradient if before is None else added(before, gradient)

    def of_chunks(self) -> list[Any]:
        """The gradients of the first chunk's variables, then of the second one's, and so on; `None` where none is."""
        for (index, i), (product, pairs) in self._factors.items():
            with tf.device(self._plan.device_of(index)):
                lefts, rights = zip(*pairs, strict=True)
                self._sums[index, i] = product.compute(lefts, rights)
        self._factors = {}
        return [self._sums.get((chunk.index, i)) for chunk in self._plan.chunks for i in range(len(chunk.trainable))]


def added(first: Any, second: Any) -> Any:
    """The sum of two gradients, each a tensor or `IndexedSlices`."""
    if isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([first.values, second.values], 0),
            tf.concat([first.indices, second.indices], 0),
            first.dense_shape,
        )
    return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)
