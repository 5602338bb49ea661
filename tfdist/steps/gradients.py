"""Gradients, and the state that a step updates, weighted and put into few buckets; reduce.py adds them up.

The tensors of a bucket are packed into one matrix, or by the direct transport travel together as they are.

A sum over machines takes about a millisecond whatever its size, so what replicas have to agree on travels together:
gradients, and the moving statistics that the forward pass has updated locally. Of large models, what the end of
back-propagation still computes need not hold back the rest:

time        ----------------------------------------------------->
computes    gradients of layer 3 | of layer 2 | of layer 1 |
sends                            | layer 3, state | layers 2, 1 |

Li et al., "PyTorch distributed: experiences on accelerating data parallel training" (2020).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.steps.keras_step import KerasStep
from tfdist.steps.reduce import all_reduce, from_carried, reduce_scatter, sum_of_each, to_carried

# Bytes to which TensorFlow aligns tensors (EIGEN_MAX_ALIGN_BYTES with AVX-512; a multiple of it with less).
ALIGNMENT = 64

# As PyTorch's. The first bucket of several is small: sending begins early.
BUCKET_BYTES = 25 << 20
_FIRST_BYTES = 1 << 20

# What rounds to infinity in float16, and all above it.
_INFINITE_HALF = 65520.0

NARROW_DTYPES = {None: None, "bf16": tf.bfloat16, "fp16": tf.float16}


@dataclasses.dataclass(frozen=True)
class GradientOptions:
    """How gradients travel.

    Attributes:
        dtype: dtype to which wider floating dense tensors are cast for the sum, e.g. `tf.bfloat16`: half the bytes;
            every addition then rounds to 8 significant bits (relative error up to 2**-8 of the partial sum).
        bucket_bytes: how many bytes travel together, at most, a single tensor aside; `None` for all. Each bucket is
            sent as soon as what is in it is there, and the one before.
        compressor: what compresses the gradients of Keras' steps, a `tfdist.compression.compressor.Compressor`.
    """

    dtype: tf.DType | None = None
    bucket_bytes: int | None = BUCKET_BYTES
    compressor: Any = None


AS_THEY_ARE = GradientOptions()


def all_reduce_sum(
    values: Sequence[tf.Tensor | tf.IndexedSlices],
    options: GradientOptions = AS_THEY_ARE,
    weight: tf.Tensor | None = None,
) -> list:
    """Sums tensors over all replicas, the dense ones of one dtype (and bucket) in one collective.

    Args:
        values: tensors or `tf.IndexedSlices`, with the same shapes (slices: any number of rows) on every replica.
        options: how they travel.
        weight: with what this replica's values are multiplied (a scalar of any float dtype); 0 makes zeros even of NaN.

    Returns:
        A list of the sums, in the dtypes and shapes of `values`.
    """
    results: list = [None] * len(values)
    # A bucket: values -> pack -> x weight -> narrow dtype -> all-reduce -> own dtype -> unpack -> sums. The direct
    # transport needs no packing.
    together = list(buckets(values, options.bucket_bytes))
    add = sum_of_each() if together else None
    for indices in together:
        bucket = [values[i] for i in indices]
        sent = _as_sent(bucket if add else [pack(bucket)], options, weight)
        sums = add(sent) if add else [all_reduce(sent[0], differentiable=False)]
        sums = [tf.cast(one, bucket[0].dtype) for one in sums]
        for i, part in zip(indices, sums if add else unpack(sums[0], bucket), strict=True):
            results[i] = part
    for i, value in enumerate(values):
        if isinstance(value, tf.IndexedSlices):
            (rows,) = weighted(weight, [value.values])
            results[i] = all_reduce(tf.IndexedSlices(rows, value.indices, value.dense_shape))
    return results


def sum_over_replicas(step: KerasStep, value: tf.Tensor) -> tf.Tensor:
    """What the replicas' values add up to; a replica without rows computes on a stand-in, which does not count."""
    if step.has_rows is not None:
        value = tf.where(step.has_rows, value, tf.zeros_like(value))
    return from_carried(all_reduce_sum([to_carried(value)])[0], value.dtype)


def own_rows_of_sums(
    packed: Sequence[tf.Tensor], options: GradientOptions, weight: tf.Tensor | None
) -> list[tf.Tensor]:
    """This replica's rows of the sums of packed matrices over all replicas.

    Args:
        packed: of this replica, each with as many rows for each replica.
        options: how they travel.
        weight: as in `all_reduce_sum`.
    """
    rows = reduce_scatter(_as_sent(packed, options, weight))
    return [tf.cast(own, one.dtype) for own, one in zip(rows, packed, strict=True)]


def _as_sent(packed: Sequence[tf.Tensor], options: GradientOptions, weight: tf.Tensor | None) -> list[tf.Tensor]:
    def narrow(one: tf.Tensor) -> tf.Tensor:
        is_wider = options.dtype is not None and one.dtype.is_floating and options.dtype.size < one.dtype.size
        return tf.cast(one, options.dtype) if is_wider else one

    return [narrow(one) for one in weighted(weight, packed)]


def buckets(values: Sequence[tf.Tensor | tf.IndexedSlices | tf.TensorSpec], most: int | None) -> Iterator[list[int]]:
    """The positions of dense tensors that travel together: of one dtype, and at most so many bytes."""
    groups: dict[tf.DType, list[int]] = {}
    for i, value in enumerate(values):
        if not isinstance(value, tf.IndexedSlices):
            groups.setdefault(value.dtype, []).append(i)
    for group in groups.values():
        yield from _buckets(group, values, most)


def _buckets(indices: list[int], values: Sequence[tf.Tensor], most: int | None) -> Iterator[list[int]]:
    """Groups of neighbours, from the last one: that is the order in which back-propagation reaches variables.

    All replicas send them in this order, so one that has to wait for the first layer must not come first.
    """
    sizes = {i: (values[i].shape.num_elements() or 0) * values[i].dtype.size for i in indices}
    if most is None or sum(sizes.values()) <= most:
        yield indices
        return
    bucket: list[int] = []
    filled, limit = 0, min(most, _FIRST_BYTES)
    for i in reversed(indices):
        if bucket and filled + sizes[i] > limit:
            yield bucket
            bucket, filled, limit = [], 0, most
        bucket.append(i)
        filled += sizes[i]
    yield bucket


def weighted(weight: tf.Tensor | None, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The values times the weight; `None` is 1."""
    values = list(values)
    if not values or weight is None or tf.get_static_value(weight) == 1.0:
        return values
    # Most batches need no pass over them.
    return tf.cond(tf.equal(weight, 1.0), lambda: values, lambda: [scale(value, weight) for value in values])


def pack(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """One matrix of all values, each beginning at a row of its own; a row is as long as TensorFlow aligns memory.

    That is why `unpack` costs nothing: rows of an aligned matrix share its memory, parts of a vector are copied.
    """
    width = ALIGNMENT // values[0].dtype.size
    rows = []
    for value in values:
        size = value.shape.num_elements()
        padding = -(tf.size(value) if size is None else size) % width
        if size is None or padding:
            value = tf.pad(tf.reshape(value, [-1]), [[0, padding]])
        rows.append(tf.reshape(value, [-1, width]))
    return tf.concat(rows, 0) if len(rows) > 1 else tf.identity(rows[0])


def unpack(packed: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The values again, in their shapes, from a packed matrix."""
    width = packed.shape[1]
    sizes = [tf.size(v) if v.shape.num_elements() is None else v.shape.num_elements() for v in values]
    parts = tf.split(packed, [-(-size // width) for size in sizes], num=len(values))
    unpacked = []
    for part, size, value in zip(parts, sizes, values, strict=True):
        if not isinstance(size, int) or size % width:
            part = tf.reshape(part, [-1])[:size]
        unpacked.append(tf.reshape(part, value.shape if value.shape.is_fully_defined() else tf.shape(value)))
    return unpacked


def sum_duplicates(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the same gradient with every row once.

    Keras does not do this: it squares the parts of the gradient of a row that occurs several times one by one.
    """
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def _lookups(indices: tf.Tensor) -> list[tf.Tensor]:
    """The indices of each lookup of a table, whose gradients back-propagation has concatenated."""
    if not tf.is_symbolic_tensor(indices) or indices.op.type != "ConcatV2":
        return [indices]
    return [part for one in indices.op.inputs[:-1] for part in _lookups(one)]


def is_common(gradient: Any, is_of_no_row: Callable[[tf.Tensor], bool]) -> bool:
    """Whether a gradient is of rows of a table that each replica looks up, such as positions; see `numbered`."""
    return isinstance(gradient, tf.IndexedSlices) and any(map(is_of_no_row, _lookups(gradient.indices)))


def numbered(slices: tf.IndexedSlices, is_of_no_row: Callable[[tf.Tensor], bool]) -> tf.IndexedSlices:
    """Slices of rows that each replica looks up, such as positions: with indices that say which of a row's it is.

    One process has one slice where each replica has one. Keras squares slices one by one, so they have to be added up
    before; but not those of a row that is looked up several times, nor those of lookups that depend on the batch.

    Args:
        slices: of a table; of one lookup or several.
        is_of_no_row: whether the indices of a lookup do not depend on the rows of the batch.

    Returns:
        Slices with indices i, i + rows, i + 2 rows ... of the first, second, third ... slice of row i, and -1 - i of
        one that is to stay apart.
    """
    apart = [tf.fill([tf.size(part)], not is_of_no_row(part)) for part in _lookups(slices.indices)]
    is_apart, indices = tf.concat(apart, 0), tf.cast(slices.indices, tf.int64)
    indices = tf.where(is_apart, -1 - indices, indices)
    order = tf.argsort(indices, stable=True)
    in_order = tf.gather(indices, order)
    number = tf.range(tf.size(indices)) - tf.searchsorted(in_order, in_order)
    number = tf.cast(tf.scatter_nd(order[:, tf.newaxis], number, tf.shape(indices)), tf.int64)
    later = number * tf.cast(slices.dense_shape[0], tf.int64)
    return tf.IndexedSlices(slices.values, tf.where(is_apart, indices, indices + later), slices.dense_shape)


def added_by_number(slices: tf.IndexedSlices, dtype: tf.DType) -> tf.IndexedSlices:
    """Adds up what all replicas have from `numbered`."""
    rows, place = tf.cast(slices.dense_shape[0], tf.int64), tf.range(tf.size(slices.indices, tf.int64))
    # What is to stay apart gets an index of its own.
    indices = tf.where(slices.indices < 0, slices.indices - place * rows, slices.indices)
    found = sum_duplicates(tf.IndexedSlices(slices.values, indices, slices.dense_shape))
    indices = tf.where(found.indices < 0, -1 - found.indices, found.indices) % rows
    return tf.IndexedSlices(found.values, tf.cast(indices, dtype), slices.dense_shape)


def is_half(gradient: Any) -> bool:
    """Whether a traced gradient was computed in float16, as a whole, and then cast to the dtype of its variable."""
    if not tf.is_symbolic_tensor(gradient) or gradient.op.type != "Cast":
        return False
    return gradient.op.inputs[0].dtype == tf.float16


def check_finite(check: Callable, halves: Sequence[bool], grads: Sequence[Any]) -> tf.Tensor:
    """`check_finite` of a LossScaleOptimizer, for sums: they overflow where one process' gradients would.

    Args:
        check: the method.
        halves: for each gradient, whether its parts were computed in float16. Their sum is wider.
        grads: the sums.
    """
    rest = check([None if half else gradient for half, gradient in zip(halves, grads, strict=True)])
    fits = [tf.abs(gradient) < _INFINITE_HALF for half, gradient in zip(halves, grads, strict=True) if half]
    return tf.reduce_all([rest, *map(tf.reduce_all, fits)])


def scale(value: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """`value * factor`; 0 where `factor` is 0, whatever `value` is: what a model makes of no rows may be NaN."""
    return tf.math.multiply_no_nan(value, tf.cast(factor, value.dtype))
