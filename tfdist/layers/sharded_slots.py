"""Saves what an optimizer keeps for each shard of a table (momenta, accumulators, averages) as one table in row order.

Keras stores the variables of an optimizer as a numbered list. For a table in three shards the list has three times as
many entries, and a model with another number of shards cannot load it: Keras warns and starts with zeros. So lists
are stored as those of a model whose table is one variable, which is also the one that `keras.layers.Embedding` has.

A layer does not know the optimizers that will train it, hence two methods of Keras' base class are replaced
(`tfdist.compat.keras_sharded_slots`); optimizers without such a table take Keras' own path.
"""

from __future__ import annotations

import collections

import keras

from tfdist.layers.sharded_table import ShardedTable

_TABLE = "_tfdist_table"


def mark_shards(table: ShardedTable) -> None:
    """Lets optimizers that are built on the variables of `table` save their slots as whole tables."""
    for variable in table.variables:
        setattr(variable, _TABLE, table)


def has_shards(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer was built on the variables of a marked table."""
    return any(hasattr(variable, _TABLE) for variable in optimizer._trainable_variables)


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
