"""Which rows of a global batch belong to which replica: the arithmetic, for ints and tensors alike.

rows of a global batch of 10 over 4 replicas:   0 1 2 | 3 4 5 | 6 7 | 8 9
rows of a last batch of 3 over 4 replicas:      0 | 1 | 2 | (none: row 0 stands in, with weight 0)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class GlobalBatch(NamedTuple):
    """A replica's share of a global batch, as Keras' steps receive it.

    Attributes:
        data: the replica's rows.
        rows: how many of them count; 0 if a row stands in for none (int32 scalar).
        global_rows: number of rows of the whole batch (int32 scalar); `None` if only the workers together know.
    """

    data: Any
    rows: Any
    global_rows: Any


def share(rows: Any, pieces: int, piece: int) -> tuple[Any, Any]:
    """Returns `(begin, size)` of one piece of `rows` rows split into `pieces` sizes that differ by at most one.

    Args:
        rows: number of rows, an int or a scalar integer tensor.
        pieces: number of pieces, at least 1.
        piece: which piece, in `[0, pieces)`.

    Example:
        >>> [share(10, 4, i) for i in range(4)]
        [(0, 3), (3, 3), (6, 2), (8, 2)]
    """
    base, extra = rows // pieces, rows % pieces
    if isinstance(rows, int):
        return piece * base + min(piece, extra), base + int(piece < extra)
    return piece * base + tf.minimum(piece, extra), base + tf.cast(piece < extra, base.dtype)


def is_batched(leaf: Any) -> bool:
    """Whether a component of a batch has rows. Scalars, `None` and optionals have none."""
    shape = getattr(leaf, "shape", None)
    return shape is not None and not isinstance(leaf, tf.experimental.Optional) and shape.rank != 0


def static_rows(batch: Any) -> int | None:
    """The number of rows of the largest component of a (nested) batch; `None` if it is not known while tracing."""
    rows = [_static_rows(leaf) for leaf in _batched(batch)]
    return None if None in rows else max(rows, default=None)


def count_rows(batch: Any) -> tf.Tensor:
    """The number of rows of the largest component of a (nested) batch, as an int32 scalar.

    Components may be dense, ragged or sparse tensors.

    Raises:
        ValueError: if no component has rows.
    """
    rows = static_rows(batch)
    return _largest([_rows(leaf) for leaf in _batched(batch)], batch) if rows is None else tf.constant(rows)


def take_share(batch: Any, pieces: int, piece: int) -> tuple[Any, Any]:
    """Cuts the rows of one replica out of a (nested) batch; components without rows are kept whole.

    A replica for which no row is left gets a copy of the first one, which counts with weight 0: with an empty batch,
    models and metrics may return NaN or fail. Shapes stay static where the number of rows is static and divides.

    Components may have different numbers of rows, such as labelled and unlabelled rows. Each is then cut by its own
    number. As a replica has one weight for all of them, each number has to be a multiple of `pieces`, or 1: every
    replica gets such a single row.

    Returns:
        `(share, rows)`, where `rows` is the number of rows that count: 0 for a stand-in.

    Raises:
        ValueError: if no component has rows, or they cannot be cut so that all weights are equal.
        tf.errors.InvalidArgumentError: for the same reason, in the step, if the numbers are not known while tracing.
    """
    counts = [_known_rows(leaf) for leaf in _batched(batch)]
    checks = _check(counts, pieces) if pieces > 1 else []

    def cut(leaf: Any) -> Any:
        if not is_batched(leaf):
            return leaf
        total = _known_rows(leaf)
        begin, size = share(total, pieces, piece)
        if isinstance(total, int):
            begin, taken = (begin, size) if size else (0, min(1, total))
        else:
            begin, taken = tf.where(size > 0, begin, 0), tf.maximum(size, tf.minimum(1, total))
        return _cut(leaf, begin, taken)

    with tf.control_dependencies(checks):
        total = static_rows(batch)
        total = _largest(counts, batch) if total is None else total
        return tf.nest.map_structure(cut, batch), share(total, pieces, piece)[1]


def rows_if(wanted: Any, batch: Any) -> Any:
    """All rows of a (nested) batch, or none of them unless `wanted`, a bool scalar."""

    def cut(leaf: Any) -> Any:
        has_rows = tf.is_tensor(leaf) and bool(leaf.shape.rank)
        return _cut(leaf, 0, tf.where(wanted, _rows(leaf), 0)) if has_rows else leaf

    return tf.nest.map_structure(cut, batch)


def rows_of_piece(batch: Any, pieces: int, piece: int) -> Any:
    """Cuts one of `pieces` pieces out of every component of a batch that has rows; the piece may be empty."""

    def cut(leaf: Any) -> Any:
        return _cut(leaf, *share(_rows(leaf), pieces, piece)) if is_batched(leaf) else leaf

    return tf.nest.map_structure(cut, batch)


def _cut(leaf: Any, begin: Any, size: Any) -> Any:
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[begin : begin + size]
    start = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(leaf.dense_shape[1:])], 0)
    extent = tf.concat([[tf.cast(size, tf.int64)], leaf.dense_shape[1:]], 0)
    found = tf.sparse.slice(leaf, start, extent)
    # `tf.sparse.slice` loses the static shape, from which models build their weights.
    sizes = [found.dense_shape[i] if n is None or i == 0 else n for i, n in enumerate(leaf.shape)]
    return tf.SparseTensor(found.indices, found.values, tf.stack([tf.cast(n, tf.int64) for n in sizes]))


def _batched(batch: Any) -> list:
    return [leaf for leaf in tf.nest.flatten(batch) if is_batched(leaf)]


def _static_rows(leaf: Any) -> int | None:
    return None if leaf.shape.rank is None else leaf.shape[0]


def _known_rows(leaf: Any) -> Any:
    """The number of rows: an int if it is known while tracing, else a tensor."""
    rows = _static_rows(leaf)
    return _rows(leaf) if rows is None else rows


def _rows(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def _largest(rows: list, batch: Any) -> tf.Tensor:
    if not rows:
        raise ValueError(
            f"A batch without rows cannot be split over replicas. Received: {batch!r}. "
            "Expected at least one component with a batch dimension; call `.batch(n)` on the dataset."
        )
    return rows[0] if len(rows) == 1 else tf.reduce_max(tf.stack(rows))


def _check(rows: list, pieces: int) -> list[tf.Operation]:
    """Refuses components of a batch whose rows cannot be cut so that every replica has the same part of each."""
    message = (
        f"Expected: the same number of rows in all, or multiples of {pieces} (the number of replicas or micro-batches) "
        "or one row: the rows of a replica have one weight. `.batch(n, drop_remainder=True)` leaves out a last batch "
        "that does not divide."
    )
    if all(isinstance(count, int) for count in rows):
        if len(set(rows)) > 1 and any(count % pieces and count != 1 for count in rows):
            raise ValueError(f"Received: a batch whose components have {rows} rows. {message}")
        return []
    if len(rows) < 2:
        return []
    counts = tf.stack(rows)
    same = tf.reduce_all(counts == counts[0])
    divides = tf.reduce_all((counts % pieces == 0) | (counts == 1))
    failed = tf.debugging.Assert(
        same | divides, ["Received: a batch whose components have these numbers of rows:", counts, message], 32
    )
    return [] if failed is None else [failed]
