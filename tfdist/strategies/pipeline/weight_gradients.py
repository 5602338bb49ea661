"""Weight gradients of several micro-batches as one product: split off from the backward pass and made later.

Back-propagation of a dense layer makes two products: the gradient of its inputs, for which an earlier stage waits, and
that of its weights, for which nobody waits (zero-bubble pipelines, arXiv 2401.10241, split them for that reason).
Moreover `x1.T @ dy1 + x2.T @ dy2` is `concat(x1, x2).T @ concat(dy1, dy2)`: one larger product, without the additions,
each of which reads and writes as much memory as the layer has weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class RowProduct:
    """A gradient that is a sum over rows of a product of two tensors, before it is computed.

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
        """The sum of the products of several pairs of factors, by one operation."""
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
    """Takes a symbolic gradient apart, if it is a product over rows and nothing else."""
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
