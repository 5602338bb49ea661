"""Variables of one dtype laid end to end in one matrix, whose rows are dealt out to the replicas in equal shards.

Every variable begins at a row of its own, and a row is as long as TensorFlow aligns memory (see
`tfdist.steps.gradients`): cutting rows out of the matrix copies nothing.

two variables over two replicas:    a a a b | b b . .    the last rows are padding
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.steps.gradients import ALIGNMENT, pack, unpack


@dataclasses.dataclass(frozen=True)
class FlatBucket:
    """Where the variables of a bucket are; shapes only, no values.

    Attributes:
        dtype: that of all its variables.
        shapes: the shapes of the variables.
        shards: number of shards, one for each replica.
    """

    dtype: tf.DType
    shapes: tuple[tf.TensorShape, ...]
    shards: int

    @property
    def width(self) -> int:
        """Elements of a row."""
        return ALIGNMENT // self.dtype.size

    @property
    def begins(self) -> tuple[int, ...]:
        """The row at which each variable begins, and the one after the last variable."""
        begins = [0]
        for shape in self.shapes:
            begins.append(begins[-1] + -(-shape.num_elements() // self.width))
        return tuple(begins)

    @property
    def shard_rows(self) -> int:
        """Rows of a shard."""
        return -(-self.begins[-1] // self.shards)

    def within(self, shard: int) -> list[tuple[int, int, int]]:
        """The variables that have rows in a shard.

        Args:
            shard: its index.

        Returns:
            Tuples `(variable, begin, end)`: its index, and its rows in the shard, counted from the shard's first one.

        Example:
            >>> FlatBucket(tf.float32, (tf.TensorShape([48]), tf.TensorShape([48])), shards=2).within(1)
            [(1, 0, 3)]
        """
        first, begins = shard * self.shard_rows, self.begins
        found = []
        for i, (begin, end) in enumerate(itertools.pairwise(begins)):
            low, high = max(begin - first, 0), min(end - first, self.shard_rows)
            if low < high:
                found.append((i, low, high))
        return found

    def cut(self, shard: int, value_of: Callable[[int], tf.Tensor]) -> tf.Tensor:
        """One shard of a bucket.

        Args:
            shard: its index.
            value_of: gives the value of a variable by its index; called for those that have rows in the shard.

        Returns:
            A matrix of `shard_rows` rows.
        """
        parts = self.within(shard)
        if not parts:
            return tf.zeros([self.shard_rows, self.width], self.dtype)
        packed = pack([value_of(i) for i, _, _ in parts])
        # The first variable may begin in an earlier shard, the last one may end in a later one.
        skipped = max(shard * self.shard_rows - self.begins[parts[0][0]], 0)
        rows = packed[skipped : skipped + parts[-1][2]]
        padding = self.shard_rows - parts[-1][2]
        return tf.pad(rows, [[0, padding], [0, 0]]) if padding else rows

    def values(self, whole: tf.Tensor) -> list[tf.Tensor]:
        """The values of all variables.

        Args:
            whole: all shards, one below the other.
        """
        rows = self.begins[-1]
        return unpack(whole if whole.shape[0] == rows else whole[:rows], [_Like(shape) for shape in self.shapes])


@dataclasses.dataclass(frozen=True)
class _Like:
    """Stands for a tensor of which `unpack` reads the shape only."""

    shape: tf.TensorShape


def in_buckets(
    variables: Sequence[Any], shards: int, kind_of: Callable[[Any], Hashable]
) -> list[tuple[FlatBucket, list[int]]]:
    """Sorts variables into as few buckets as possible.

    Args:
        variables: Keras variables.
        shards: number of shards of each bucket.
        kind_of: the kind of a variable; a bucket has variables of one kind and one dtype.

    Returns:
        The buckets, each with the indices of its variables.
    """
    groups: dict[tuple, list[int]] = {}
    for i, variable in enumerate(variables):
        groups.setdefault((tf.as_dtype(variable.dtype), kind_of(variable)), []).append(i)
    return [
        (FlatBucket(dtype, tuple(tf.TensorShape(variables[i].shape) for i in indices), shards), indices)
        for (dtype, _), indices in groups.items()
    ]
