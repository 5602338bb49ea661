"""Chooses the layers that a policy means."""

from __future__ import annotations

import collections
import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras

_SHOWN = 5


def choose(layers: Mapping[str, Any], wanted: Sequence[str | type]) -> dict[str, Any]:
    """The layers with these names, or of these classes.

    Args:
        layers: all layers by their names, or by their paths in nested models: "encoder/dense_1".
        wanted: names, or ends of paths; and classes.

    Returns:
        The layers by their names, in the order of `layers`.

    Raises:
        ValueError: if there is no such layer, or a name fits several.

    Example:
        >>> list(choose({"encoder/dense": object(), "encoder/dropout": object()}, ["dense"]))
        ['encoder/dense']
    """
    found: dict[str, Any] = {}
    for item in wanted:
        if isinstance(item, str):
            names = [name for name in layers if name == item] or [n for n in layers if n.endswith(f"/{item}")]
            if len(names) > 1:
                raise ValueError(
                    f"Received: block {item!r}, the name of several layers: {', '.join(names[:_SHOWN])}. Expected: one "
                    "of these."
                )
        elif inspect.isclass(item):
            names = [name for name, layer in layers.items() if isinstance(layer, item)]
        else:
            raise ValueError(f"Received: block {item!r}. Expected: the name of a layer, or a class of layers.")
        if not names:
            raise ValueError(f"Received: block {item!r}. Expected: {_alternatives(item, layers)}.")
        found.update({name: layers[name] for name in names})
    return {name: layer for name, layer in layers.items() if name in found}


def repeated(layers: Mapping[str, keras.layers.Layer]) -> dict[str, keras.layers.Layer]:
    """The layers of the class that repeats most among those that are made of other layers.

    Args:
        layers: of a model by their names, those inside of others too.

    Raises:
        ValueError: if no class repeats.
    """
    kinds: dict[type, dict[str, keras.layers.Layer]] = collections.defaultdict(dict)
    for name, layer in layers.items():
        if layer._layers and layer.variables:
            kinds[type(layer)][name] = layer
    chosen = max(kinds.values(), key=len, default={})
    if len(chosen) < 2:
        raise ValueError(
            "Received: blocks='auto' for a model that is written as a class, without layers of its own kind that "
            "repeat. Expected: a Functional or Sequential model; or blocks=[...] with names or classes of layers."
        )
    return chosen


def _alternatives(item: str | type, layers: Mapping[str, Any]) -> str:
    if isinstance(item, str):
        near = difflib.get_close_matches(item, layers, _SHOWN, 0.4) or list(layers)[:_SHOWN]
        return f"the name of a layer, such as {', '.join(map(repr, near))}"
    kinds = sorted({type(layer).__name__ for layer in layers.values()})
    return f"the class of a layer: {', '.join(kinds[:_SHOWN])}"
