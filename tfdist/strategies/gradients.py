"""One all-reduce a step: gradients, and the state that a step updates, packed into one flat vector.

A collective between machines costs about a millisecond whatever its size, so everything that replicas have to agree
on in a step travels together: gradients, and the moving statistics that the forward pass has updated locally.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

WIRE_DTYPES = {None: None, "bf16": tf.bfloat16}


def all_reduce_sum(values: Sequence[tf.Tensor | tf.IndexedSlices], wire_dtype: tf.DType | None = None) -> list:
    """Sums tensors over all replicas, the dense ones of one dtype in one collective.

    Args:
        values: tensors or `tf.IndexedSlices`, with the same shapes (slices: any number of rows) on every replica.
        wire_dtype: dtype to which wider floating dense tensors are cast for the sum, e.g. `tf.bfloat16`: half the
            bytes; every addition then rounds to 8 significant bits (relative error up to 2**-8 of the partial sum).

    Returns:
        A list of the sums, in the dtypes and shapes of `values`.
    """
    context = tf.distribute.get_replica_context()
    results: list = [None] * len(values)
    groups: dict[tf.DType, list[int]] = {}
    for i, value in enumerate(values):
        if not isinstance(value, tf.IndexedSlices):
            groups.setdefault(value.dtype, []).append(i)
    for dtype, indices in groups.items():
        flat = tf.concat([tf.reshape(values[i], [-1]) for i in indices], 0) if len(indices) > 1 else values[indices[0]]
        narrow = wire_dtype is not None and dtype.is_floating and wire_dtype.size < dtype.size
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(flat, wire_dtype) if narrow else flat)
        summed = tf.cast(summed, dtype) if narrow else summed
        if len(indices) == 1:
            results[indices[0]] = summed
            continue
        shapes = [values[i].shape for i in indices]
        if all(shape.is_fully_defined() for shape in shapes):
            sizes = [shape.num_elements() for shape in shapes]
        else:
            shapes = [tf.shape(values[i]) for i in indices]
            sizes = tf.stack([tf.reduce_prod(shape) for shape in shapes])
        parts = tf.split(summed, sizes, num=len(indices))
        for i, part, shape in zip(indices, parts, shapes, strict=True):
            results[i] = tf.reshape(part, shape)
    for i, value in enumerate(values):
        if isinstance(value, tf.IndexedSlices):
            results[i] = context.all_reduce(tf.distribute.ReduceOp.SUM, value)
    return results


def scale(value: tf.Tensor | tf.IndexedSlices, factor: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    """`value * factor`, also for `tf.IndexedSlices`; 0 where `factor` is 0, whatever `value` is."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(scale(value.values, factor), value.indices, value.dense_shape)
    return tf.math.multiply_no_nan(value, tf.cast(factor, value.dtype))
