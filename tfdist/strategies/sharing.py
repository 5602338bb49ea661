"""Which rows of a global batch belong to which replica: the arithmetic, for ints and tensors alike.

rows of a global batch of 10 over 4 replicas:   0 1 2 | 3 4 5 | 6 7 | 8 9
rows of a last batch of 3 over 4 replicas:      0 | 1 | 2 | (none: row 0 stands in, with weight 0)
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


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
    """Whether a component of a batch has rows (scalars, `None` and optionals have not)."""
    shape = getattr(leaf, "shape", None)
    return shape is not None and not isinstance(leaf, tf.experimental.Optional) and shape.rank != 0


def static_rows(batch: Any) -> int | None:
    """Number of rows of a (nested) batch where it is known while tracing, else `None`."""
    for leaf in tf.nest.flatten(batch):
        if is_batched(leaf):
            return None if leaf.shape.rank is None else leaf.shape[0]
    return None


def count_rows(batch: Any) -> tf.Tensor:
    """Number of rows of a (nested) batch of dense, ragged or sparse tensors, as an int32 scalar.

    Raises:
        ValueError: if no component has rows.
    """
    for leaf in tf.nest.flatten(batch):
        if not is_batched(leaf):
            continue
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.int32)
        if isinstance(leaf, tf.SparseTensor):
            return tf.cast(leaf.dense_shape[0], tf.int32)
        return tf.shape(leaf)[0]
    raise ValueError(
        f"A batch without rows cannot be split over replicas. Received: {batch!r}. "
        "Expected at least one component with a batch dimension; call `.batch(n)` on the dataset."
    )


def take_share(batch: Any, pieces: int, piece: int) -> tuple[Any, Any]:
    """Cuts the rows of one replica out of a (nested) batch; components without rows are kept whole.

    A replica for which no row is left gets a copy of the first one, to be counted with weight 0: models and metrics
    make anything (NaN, errors) of no rows at all. Shapes stay static where the number of rows is static and divides.

    Returns:
        `(share, rows)`, where `rows` is the number of rows that count: 0 for a stand-in.
    """
    rows = static_rows(batch)
    total = count_rows(batch) if rows is None else rows
    begin, size = share(total, pieces, piece)
    if isinstance(total, int):
        begin, taken = (begin, size) if size else (0, min(1, total))
    else:
        begin, taken = tf.where(size > 0, begin, 0), tf.maximum(size, tf.minimum(1, total))
    return cut_rows(batch, begin, taken), size


def cut_rows(batch: Any, begin: Any, size: Any) -> Any:
    """`batch[begin : begin + size]` for every component of a (nested) batch that has rows."""

    def cut(leaf: Any) -> Any:
        if not is_batched(leaf):
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            start = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(leaf.dense_shape[1:])], 0)
            extent = tf.concat([[tf.cast(size, tf.int64)], leaf.dense_shape[1:]], 0)
            return tf.sparse.slice(leaf, start, extent)
        return leaf[begin : begin + size]

    return tf.nest.map_structure(cut, batch)
