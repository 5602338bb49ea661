"""A table whose rows are dealt out to several variables: row i is row i // n of variable i % n."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np


def rows_of_shard(rows: int, shards: int, shard: int) -> int:
    """Number of rows that shard number `shard` holds of a table of `rows` rows."""
    return len(range(shard, rows, shards))


class ShardedTable:
    """The variables of one table, read and written as if they were one variable in row order.

    It has what Keras needs of a variable to save and load it: `shape`, `numpy` and `assign`.
    """

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        self.variables = list(variables)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole table."""
        return (sum(variable.shape[0] for variable in self.variables), *self.variables[0].shape[1:])

    def numpy(self) -> np.ndarray:
        """A copy of the whole table."""
        shards = len(self.variables)
        first = self.variables[0].numpy()
        whole = np.empty(self.shape, first.dtype)
        whole[::shards] = first
        for shard, variable in enumerate(self.variables[1:], 1):
            whole[shard::shards] = variable.numpy()
        return whole

    def assign(self, value: np.ndarray) -> None:
        """Sets every row.

        Raises:
            ValueError: if `value` has another shape than the table.
        """
        if tuple(value.shape) != self.shape:
            raise ValueError(
                f"Received: a table of shape {tuple(value.shape)} for '{self.variables[0].path}' and its other shards. "
                f"Expected: {self.shape}. Load what was saved of an embedding with the same input_dim and output_dim."
            )
        for shard, variable in enumerate(self.variables):
            variable.assign(value[shard :: len(self.variables)])
