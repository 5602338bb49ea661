"""Weight gradients, added up over the micro-batches of a step: as they come, or as one product at the end.

Back-propagation of a dense layer makes two products: the gradient of its inputs, for which an earlier stage waits, and
that of its weights, for which nobody waits (zero-bubble pipelines, arXiv 2401.10241, split them for that reason).
Moreover `x1.T @ dy1 + x2.T @ dy2` is `concat(x1, x2).T @ concat(dy1, dy2)`: one larger product, without the additions,
each of which reads and writes as much memory as the layer has weights. So with weight_gradients="batched" a backward
pass leaves the factors of such a gradient, a `RowProduct`, and `GradientSums` multiplies them once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.layer_graph.chunk import Chunk


@dataclasses.dataclass(frozen=True)
class RowProduct:
    """A weight gradient, before it is computed: the product of two tensors, summed over the rows of a micro-batch.

    Attributes:
        left: the first factor, with the rows in its first dimension.
        right: the second one.
        operation: the operation that would compute it, for its attributes.
        dtype: what the result is cast to.
        shape: what the result is reshaped to.
    """

    left: tf.Tensor
    right: tf.Tensor
    operation: tf.Operation
    dtype: tf.DType
    shape: tf.TensorShape

    def compute(self, lefts: Sequence[tf.Tensor], rights: Sequence[tf.Tensor]) -> tf.Tensor:
        """The sum of the products of several pairs of factors, by one operation on the current device."""
        left = tf.concat(lefts, 0) if len(lefts) > 1 else lefts[0]
        right = tf.concat(rights, 0) if len(rights) > 1 else rights[0]
        kind, operation = self.operation.type, self.operation
        if kind == "MatMul":
            product = tf.matmul(left, right, transpose_a=True)
        elif kind == "Einsum":
            product = tf.einsum(operation.get_attr("equation").decode(), left, right)
        else:
            product = tf.raw_ops.Conv2DBackpropFilter(
                input=left,
                filter_sizes=self.shape.as_list(),
                out_backprop=right,
                **{name: operation.get_attr(name) for name in _CONVOLUTION_ATTRIBUTES},
            )
        return tf.reshape(tf.cast(product, self.dtype), self.shape)


_CONVOLUTION_ATTRIBUTES = ("strides", "padding", "use_cudnn_on_gpu", "explicit_paddings", "data_format", "dilations")


def as_row_product(gradient: tf.Tensor) -> RowProduct | None:
    """The factors of a symbolic gradient, if it is a product over rows and nothing else; otherwise `None`."""
    if not gradient.shape.is_fully_defined():
        return None
    operation = gradient.op
    while operation.type in ("Cast", "Reshape", "Identity"):
        operation = operation.inputs[0].op
    if operation.type == "MatMul":
        usable = operation.get_attr("transpose_a") and not operation.get_attr("transpose_b")
        left, right = (0, 1)
    elif operation.type == "Einsum":
        usable, (left, right) = _sums_over_rows(operation), (0, 1)
    elif operation.type == "Conv2DBackpropFilter":
        usable, (left, right) = operation.outputs[0].shape == gradient.shape or _is_filter(operation, gradient), (0, 2)
    else:
        return None
    if not usable:
        return None
    return RowProduct(operation.inputs[left], operation.inputs[right], operation, gradient.dtype, gradient.shape)


def _sums_over_rows(operation: tf.Operation) -> bool:
    terms, _, result = operation.get_attr("equation").decode().partition("->")
    first, comma, second = terms.partition(",")
    return bool(comma and first and second) and first[0] == second[0] and first[0] not in result and "." not in terms


def _is_filter(operation: tf.Operation, gradient: tf.Tensor) -> bool:
    sizes = tf.get_static_value(operation.inputs[1])
    return sizes is not None and list(sizes) == gradient.shape.as_list()


class GradientSums:
    """The gradients of all chunks' trainable variables, added up over micro-batches on the devices of the chunks.

    Args:
        chunks: the chunks.
        device_of: the device of a chunk, by its index.
    """

    def __init__(self, chunks: Sequence[Chunk], device_of: Callable[[int], str]):
        self._chunks, self._device_of = chunks, device_of
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
        # The products, which nothing has waited for, come last: each on the device of its chunk.
        for (index, i), (product, pairs) in self._factors.items():
            with tf.device(self._device_of(index)):
                lefts, rights = zip(*pairs, strict=True)
                self._sums[index, i] = product.compute(lefts, rights)
        self._factors = {}
        return [self._sums.get((chunk.index, i)) for chunk in self._chunks for i in range(len(chunk.trainable))]


def added(first: Any, second: Any) -> Any:
    """The sum of two gradients, each a tensor or `IndexedSlices`; of two sparse ones, it is sparse."""
    if isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([first.values, second.values], 0),
            tf.concat([first.indices, second.indices], 0),
            first.dense_shape,
        )
    return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)
