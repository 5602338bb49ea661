"""Where variables are that are laid end to end in one matrix, whose rows are dealt out to the replicas.

Every variable begins at a row of its own, and a row is as long as TensorFlow aligns memory (see
`tfdist.steps.gradients`): cutting rows out of the matrix copies nothing.

two variables over two replicas:    a a a b | b b . .    the last rows are padding
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
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
        return tuple(itertools.accumulate((-(-s.num_elements() // self.width) for s in self.shapes), initial=0))

    @property
    def shard_rows(self) -> int:
        """Rows of a shard."""
        return -(-self.begins[-1] // self.shards)

    def within(self, shard: int) -> list[tuple[int, int, int]]:
        """The variables that have rows in a shard: `(index, begin, end)`, counted from the shard's first row.

        Example:
            >>> FlatBucket(tf.float32, (tf.TensorShape([48]), tf.TensorShape([48])), shards=2).within(1)
            [(1, 0, 3)]
        """
        first, of_variables = shard * self.shard_rows, itertools.pairwise(self.begins)
        found = [(i, max(a - first, 0), min(b - first, self.shard_rows)) for i, (a, b) in enumerate(of_variables)]
        return [(i, low, high) for i, low, high in found if low < high]

    def cut(self, shard: int, value_of: Callable[[int], tf.Tensor]) -> tf.Tensor:
        """One shard of a bucket, `shard_rows` rows; `value_of` gives the value of a variable by its index."""
        parts = self.within(shard)
        if not parts:
            return tf.zeros([self.shard_rows, self.width], self.dtype)
        packed = pack([value_of(i) for i, _, _ in parts])
        # The first variable may begin in an earlier shard, the last one may end in a later one.
        skipped = max(shard * self.shard_rows - self.begins[parts[0][0]], 0)
        rows = packed[skipped : skipped + parts[-1][2]]
        padding = self.shard_rows - parts[-1][2]
        return tf.pad(rows, [[0, padding], [0, 0]]) if padding else rows

    def whole(self, value_of: Callable[[int], tf.Tensor]) -> tf.Tensor:
        """All shards, one below the other; `value_of` as in `cut`."""
        values = [value_of(i) for i in range(len(self.shapes))]
        padding = self.shards * self.shard_rows - self.begins[-1]
        return pack([*values, tf.zeros([padding, self.width], self.dtype)] if padding else values)

    def dense(self, grads: Mapping[int, Any]) -> Callable[[int], tf.Tensor]:
        """A function for `cut` and `whole`: the gradient of a variable, tensor or slices, or zeros."""

        def value(place: int) -> tf.Tensor:
            if place not in grads:
                return tf.zeros(self.shapes[place], self.dtype)
            return tf.reshape(tf.cast(tf.convert_to_tensor(grads[place]), self.dtype), self.shapes[place])

        return value

    def split(self, shard: int, rows: tf.Tensor) -> list[tf.Tensor]:
        """What a shard has of each variable, `[its rows, width]`; `join` is the other way."""
        found = [rows[:0]] * len(self.shapes)
        for i, begin, end in self.within(shard):
            found[i] = rows[begin:end]
        return found

    def join(self, shard: int, parts: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """One shard, of what it has of some variables, by their indices; zeros for the others."""
        end, rows = 0, []
        for i, begin, end in self.within(shard):
            # Loss scaling may have widened it.
            part = tf.cast(parts[i], self.dtype) if i in parts else tf.zeros([end - begin, self.width], self.dtype)
            rows.append(part)
        return tf.concat([*rows, tf.zeros([self.shard_rows - end, self.width], self.dtype)], 0)

    def values(self, whole: tf.Tensor) -> list[tf.Tensor]:
        """The values of all variables, from all shards, one below the other."""
        padded = whole.shape[0] != self.begins[-1]
        return unpack(whole[: self.begins[-1]] if padded else whole, [tf.TensorSpec(shape) for shape in self.shapes])


@dataclasses.dataclass(frozen=True)
class RowLayout(FlatBucket):
    """Where a table is, (rows, columns), whose rows are dealt out whole: a replica can look them up in its shard."""

    @property
    def width(self) -> int:
        return self.shapes[0][1]

    def cut(self, shard: int, value_of: Callable[[int], tf.Tensor]) -> tf.Tensor:
        rows = value_of(0)[shard * self.shard_rows : (shard + 1) * self.shard_rows]
        return tf.pad(rows, [[0, self.shard_rows - rows.shape[0]], [0, 0]])

    def whole(self, value_of: Callable[[int], tf.Tensor]) -> tf.Tensor:
        return tf.pad(value_of(0), [[0, self.shards * self.shard_rows - self.begins[-1]], [0, 0]])

    def values(self, whole: tf.Tensor) -> list[tf.Tensor]:
        return [whole[: self.begins[-1]]]
