"""The layers of a model that are in no block."""

from __future__ import annotations

from collections.abc import Collection

import keras


def remaining_layers(model: keras.layers.Layer, blocks: Collection[keras.layers.Layer]) -> list[keras.layers.Layer]:
    """The largest layers with variables that neither contain a block nor are part of one.

    Args:
        model: the model, or a layer.
        blocks: layers inside of it.

    Example:
        >>> first, second = keras.layers.Dense(2), keras.layers.Dense(3)
        >>> model = keras.Sequential([keras.Input((4,)), first, second])
        >>> remaining_layers(model, [first]) == [second]
        True
    """
    taken = {id(part) for block in blocks for part in block._flatten_layers()}
    found: list[keras.layers.Layer] = []
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if id(layer) in taken:
            continue
        if any(id(part) in taken for part in layer._flatten_layers()):
            found += remaining_layers(layer, blocks)
        elif layer.variables:
            found.append(layer)
    return found
