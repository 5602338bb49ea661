"""A table whose rows are dealt out to several variables: row i is row i // n of variable i % n.

Also saves what an optimizer keeps for each shard of a table (momenta, accumulators, averages) as one table in row
order. Keras stores the variables of an optimizer as a numbered list. For a table in three shards the list has three
times as many entries, and a model with another number of shards cannot load it: Keras warns and starts with zeros. So
the list is stored as if the table were one variable, as it is in `keras.layers.Embedding`.

A layer does not know the optimizers that will train it. So two methods of Keras' base class are replaced
(`tfdist.compat.keras.save_as`); optimizers without such a table take Keras' own path.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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


# Whether the variables that are made now are tables, unless Keras makes them later, from a `TableInitializer`.
is_making_table: contextvars.ContextVar[bool] = contextvars.ContextVar("is_making_table", default=False)


class TableInitializer:
    """The initializer of a variable that is a whole table, whose rows a strategy may deal out to its replicas."""

    def __init__(self, initializer: Callable) -> None:
        self._initializer = initializer

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> Any:
        return self._initializer(shape, dtype=dtype)


@contextlib.contextmanager
def making_table() -> Iterator[None]:
    """While the block runs, variables that are made are tables."""
    token = is_making_table.set(True)
    try:
        yield
    finally:
        is_making_table.reset(token)


_TABLE = "_tfdist_table"


def mark_shards(table: ShardedTable) -> None:
    """Lets optimizers that are built on the variables of `table` save their slots as whole tables."""
    for variable in table.variables:
        setattr(variable, _TABLE, table)


def saved_form(optimizer: keras.optimizers.Optimizer) -> Any:
    """What is saved of an optimizer: itself, or its name and merged slots if it was built on a marked table."""
    if not any(hasattr(variable, _TABLE) for variable in optimizer._trainable_variables):
        return optimizer
    return types.SimpleNamespace(name=optimizer.name, variables=merged_slots(optimizer))


def merged_slots(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable | ShardedTable]:
    """The variables of an optimizer, where the slots of the shards of a table are one `ShardedTable`.

    It takes the place of the first shard's slot, as a table that is one variable would. Slots are recognised by their
    names and shapes, both as `Optimizer.add_variable_from_reference` gives them; others stay as they are.
    """
    shards = [
        (f"{variable.path.replace('/', '_')}_", variable)
        for variable in optimizer._trainable_variables
        if hasattr(variable, _TABLE)
    ]
    seen: collections.Counter[tuple] = collections.Counter()
    slots: dict[tuple[int, str], dict[int, keras.Variable]] = {}
    places: list[tuple[keras.Variable, ShardedTable | None, tuple[int, str] | None]] = []
    for slot in optimizer.variables:
        matches = [(prefix, v) for prefix, v in shards if slot.name.startswith(prefix) and slot.shape == v.shape]
        # Layers of the same name have slots of the same names, in the order of the layers.
        kind = slot.name, tuple(slot.shape)
        number, seen[kind] = seen[kind], seen[kind] + 1
        if number >= len(matches):
            places.append((slot, None, None))
            continue
        prefix, shard = matches[number]
        table = getattr(shard, _TABLE)
        key = id(table), slot.name.removeprefix(prefix)
        index = next(i for i, variable in enumerate(table.variables) if variable is shard)
        slots.setdefault(key, {})[index] = slot
        places.append((slot, table, key))
    merged: list[keras.Variable | ShardedTable] = []
    for slot, table, key in places:
        if table is None or len(slots[key]) < len(table.variables):
            merged.append(slot)
        elif slot is slots[key][0]:
            merged.append(ShardedTable([slots[key][index] for index in range(len(table.variables))]))
    return merged
