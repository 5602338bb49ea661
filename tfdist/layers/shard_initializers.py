"""Initial values of the shards of a table.

An initializer called once per shard would be wrong twice: a Keras initializer with a seed returns the same numbers
each time, so that the first rows of all shards were equal, and those that scale by the shape (`"glorot_uniform"`)
would see the shape of a shard.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Of a whole table that is drawn at once, in bytes. Larger ones are drawn shard by shard where that is possible.
WHOLE_TABLE_LIMIT = 2**30

# Their values do not depend on the shape.
_SHAPELESS = (keras.initializers.RandomUniform, keras.initializers.RandomNormal, keras.initializers.TruncatedNormal)


def shard_initializers(initializer: Callable, rows: int, width: int, shards: int) -> list[Callable]:
    """Returns an initializer for each shard of a table of shape (rows, width).

    Put together, the shards have the values that `initializer` gives to the whole table. A table of more than
    `WHOLE_TABLE_LIMIT` bytes (float32) is not drawn as a whole if the initializer is a random uniform, normal or
    truncated normal one: then each shard has a seed of its own, and the values depend on the number of shards.
    """
    if shards == 1:
        return [initializer]
    if 4 * rows * width > WHOLE_TABLE_LIMIT and type(initializer) in _SHAPELESS:
        return [_reseeded(initializer, shard) for shard in range(shards)]
    whole = _Whole(initializer, rows, shards)
    return [functools.partial(whole.draw, shard) for shard in range(shards)]


def _reseeded(initializer: Any, shard: int) -> Callable:
    if not isinstance(initializer.seed, int):
        return initializer  # A SeedGenerator moves on from call to call.
    seed = random.Random(f"{initializer.seed}/{shard}").getrandbits(31)
    return type(initializer)(**{**initializer.get_config(), "seed": seed})


class _Whole:
    """Draws the table when the first shard is made and forgets it after the last."""

    def __init__(self, initializer: Callable, rows: int, shards: int) -> None:
        self._initializer, self._rows, self._shards = initializer, rows, shards
        self._table: np.ndarray | None = None
        self._missing: set[int] = set()

    def draw(self, shard: int, shape: tuple[int, ...], dtype: str | None = None) -> Any:
        """The rows of one shard. Called by Keras with the shape of the shard."""
        if self._table is None or shard not in self._missing:
            # A model without an Input is built while Keras traces it.
            with tf.init_scope():
                table = self._initializer((self._rows, *shape[1:]), dtype=dtype)
            self._table = keras.ops.convert_to_numpy(table)
            self._missing = set(range(self._shards))
        part = self._table[shard :: self._shards]
        self._missing.discard(shard)
        if not self._missing:
            self._table = None
        return keras.ops.convert_to_tensor(part, dtype=dtype)
