"""Finds the blocks of a model: cuts in its graph of layers, or layers that are blocks by themselves."""

from __future__ import annotations

import collections
import difflib
import inspect
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras

from tfdist.layer_graph.chunk import uncuttable
from tfdist.layer_graph.costs import costs_of, crossing, kept_bytes
from tfdist.layer_graph.graph import LayerGraph
from tfdist.layer_graph.partition import balance

_SHOWN = 5
# With more blocks hardly less is kept: by then it is mostly the inputs of the blocks.
_MOST = 64
_ROWS = 16
# More blocks have to keep this much less: each end of a block keeps TensorFlow from merging operations.
_WORTH = 0.99
# A block may need this many times what the largest layer needs, so that small layers can join a large one.
_SLACK = 1.5


def select_layers(layers: Mapping[str, Any], wanted: Sequence[str | type]) -> dict[str, Any]:
    """The layers with these names, or of these classes.

    Args:
        layers: all layers by their names, or by their paths in nested models: "encoder/dense_1".
        wanted: names, or ends of paths; and classes.

    Returns:
        The layers by their names, in the order of `layers`.

    Raises:
        ValueError: if there is no such layer, or a name fits several.

    Example:
        >>> list(select_layers({"encoder/dense": object(), "encoder/dropout": object()}, ["dense"]))
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


def remaining_layers(model: keras.layers.Layer, blocks: Collection[keras.layers.Layer]) -> list[keras.layers.Layer]:
    """The largest layers with variables that neither contain a block nor are part of one.

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


def automatic_cuts(graph: LayerGraph) -> tuple[int, ...]:
    """Cuts with which the least is kept, if each block keeps its inputs and is run again.

    What is kept at a time are the inputs of all blocks, and all that is made inside of one block. With n layers that
    cost the same this is least with about the square root of n blocks (Chen et al., arXiv 1604.06174).

    Returns:
        The position of the first call of each block but the first.

    Example:
        >>> import keras
        >>> from tfdist.layer_graph.graph import flatten
        >>> layers = [keras.Input((9,)), *(keras.layers.Dense(9) for _ in range(9))]
        >>> automatic_cuts(flatten(keras.Sequential(layers)._functional))
        (3, 6)
    """
    made = kept_bytes(graph, _ROWS)
    sent = [_ROWS * bytes_of_a_row for bytes_of_a_row in crossing(graph)]
    forbidden = uncuttable(graph)
    best, least = (), float(sum(made))
    for blocks in range(2, min(len(made), _MOST) + 1):
        try:
            cuts = balance(made, blocks, forbidden=forbidden)
        except ValueError:  # there are no more places
            break
        kept = sum(sent[cut] for cut in cuts) + _largest(made, cuts)
        if kept < _WORTH * least:
            best, least = cuts, kept
    return best


def spans(graph: LayerGraph, wanted: Sequence[str | type]) -> dict[str, tuple[int, int]]:
    """Where the calls of chosen layers begin and end.

    Args:
        graph: the calls.
        wanted: names or classes of layers, also of models that are nested.

    Returns:
        Begin and end by name, in the order of the calls; a layer in another one that is chosen, too, is left out.

    Raises:
        ValueError: as `select_layers`; or if other layers are called between the calls of one.
    """
    layers: dict[str, Any] = {}
    places: dict[str, list[int]] = {}
    for position, call in enumerate(graph.calls):
        parts = call.name.split("/")
        operations = [*(node.operation for node in call.enclosing), call.operation]
        for depth, operation in enumerate(operations, 1):
            path = "/".join(parts[:depth])
            layers.setdefault(path, operation)
            places.setdefault(path, []).append(position)
    found: dict[str, tuple[int, int]] = {}
    end = 0
    for name in sorted(select_layers(layers, wanted), key=lambda name: (places[name][0], len(name))):
        first, last = places[name][0], places[name][-1]
        if last - first + 1 != len(places[name]) or len(set(uncuttable(graph)) & {first, last + 1}):
            raise ValueError(
                f"Received: block {name!r}, whose layers have a state and are called in several places. Expected: a "
                "layer that is called once, or as many names as calls."
            )
        if first >= end:
            found[name] = first, last + 1
            end = last + 1
    return found


def _largest(made: Sequence[float], cuts: Sequence[int]) -> float:
    return max(sum(made[a:b]) for a, b in zip((0, *cuts), (*cuts, len(made)), strict=True))


def stream_cuts(graph: LayerGraph) -> tuple[int, ...]:
    """Cuts with which no block needs much more than the largest layer does anyway, however many layers there are.

    Of all such cuts these are the ones at which the least has to spend its time on the host.

    Returns:
        The position of the first call of each block but the first.

    Raises:
        ValueError: if the calls cannot be parted.

    Example:
        >>> import keras
        >>> from tfdist.layer_graph.graph import flatten
        >>> layers = [keras.Input((9,)), *(keras.layers.Dense(9) for _ in range(4))]
        >>> stream_cuts(flatten(keras.Sequential(layers)._functional))
        (1, 2, 3)
    """
    counted = zip(costs_of(graph, _ROWS), kept_bytes(graph, _ROWS), strict=True)
    needs = [cost.parameter_bytes + kept for cost, kept in counted]
    total = [0.0, *itertools.accumulate(needs)]
    forbidden = uncuttable(graph)
    bounds = [place for place in range(len(needs) + 1) if place not in forbidden]
    limit = _SLACK * max((total[b] - total[a] for a, b in itertools.pairwise(bounds)), default=0.0)
    # The 1.0 is a price for each cut: of cuts that keep equally many bytes, fewer are better.
    kept = [_ROWS * bytes_of_a_row + 1.0 for bytes_of_a_row in crossing(graph)]
    # Dynamic programming. For each bound: the least that is kept before it, and the beginning of the block that ends
    # there. The beginning is negated, so that the minimum takes the latest one of those that keep equally many.
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    for number, end in enumerate(bounds[1:], 1):
        best[end] = math.inf, 0
        for begin in reversed(bounds[:number]):
            if total[end] - total[begin] > limit:
                break
            cost = best[begin][0] + (kept[begin] if begin else 0.0)
            best[end] = min(best[end], (cost, -begin))
    cuts = []
    place = -best[bounds[-1]][1]
    while place:
        cuts.append(place)
        place = -best[place][1]
    if not cuts:
        raise ValueError(
            "Received: a model that is one block: the device would hold all of it. Expected: a model of several layers "
            "that can be parted, or blocks=[...] with names or classes of layers."
        )
    return tuple(reversed(cuts))
