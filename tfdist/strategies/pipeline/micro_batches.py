"""Which rows of a batch are in which micro-batch, and how much each counts.

rows of a batch of 10 in 4 micro-batches:   0 1 2 | 3 4 5 | 6 7 | 8 9        weights 0.3 0.3 0.2 0.2
rows of a last batch of 3:                  0 | 1 | 2 | (none: row 0 stands in, with weight 0)
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.strategies.sharing import count_rows, share, static_rows, take_share


class MicroBatches:
    """Cuts the batches of one traced step into a fixed number of micro-batches.

    Args:
        data: the batch, any structure of tensors.
        count: number of micro-batches.
        may_be_fewer: whether there may be fewer rows than that.

    Raises:
        ValueError: if the batch certainly has fewer rows, and may not.
    """

    def __init__(self, data: Any, count: int, may_be_fewer: bool = False):
        self.count = count
        self._static_rows = static_rows(data)
        if self._static_rows is not None and self._static_rows < count and not may_be_fewer:
            raise ValueError(
                f"Received: a batch of {self._static_rows} rows, for {count} micro-batches. Expected: at least one row "
                "a micro-batch. Use a larger batch size, or PipelineStrategy(microbatches=...) with a smaller number."
            )
        self.rows = self._static_rows if self._static_rows is not None else count_rows(data)

    @property
    def may_be_empty(self) -> bool:
        """Whether there may be batches with fewer rows than micro-batches (a last, partial one)."""
        return self._static_rows is None or self._static_rows < self.count

    def size(self, index: int) -> Any:
        """Number of rows of a micro-batch: an int where the batch size is static, else an int32 scalar."""
        return share(self.rows, self.count, index)[1]

    def weight(self, index: int) -> tf.Tensor:
        """The share of a micro-batch in the rows of the batch, a float32 scalar."""
        return tf.cast(self.size(index) / self.rows, tf.float32)

    def cut(self, data: Any) -> list[Any]:
        """The micro-batches of any structure of tensors with as many rows as the batch."""
        return [take_share(data, self.count, i)[0] for i in range(self.count)]

    def cut_gradient(self, gradient: tf.Tensor) -> list[tf.Tensor]:
        """Like `cut`, but zeros for rows that stand in."""
        pieces = self.cut(gradient)
        if not self.may_be_empty:
            return pieces
        return [tf.where(self.size(i) > 0, piece, tf.zeros_like(piece)) for i, piece in enumerate(pieces)]

    def join(self, pieces: list[tf.Tensor]) -> tf.Tensor:
        """The rows of all micro-batches, without those that stand in."""
        joined = tf.concat(pieces, 0)
        return joined[: self.rows] if self.may_be_empty else joined

    def kept(self, index: int, new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
        """`new`, or `old` if the micro-batch has no rows."""
        return tf.where(self.size(index) > 0, new, old) if self.may_be_empty else new
