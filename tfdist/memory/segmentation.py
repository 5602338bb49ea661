"""Where a graph of layers is cut into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.layer_graph.chunk import uncuttable
from tfdist.layer_graph.costs import costs_of, crossing
from tfdist.layer_graph.graph import LayerGraph
from tfdist.layer_graph.partition import balance
from tfdist.memory.choice import choose

# More blocks than this keep hardly less: the inputs of the blocks are most of it by then.
_MOST = 64
_ROWS = 16


def automatic_cuts(graph: LayerGraph) -> tuple[int, ...]:
    """Cuts with which the least is kept, if each block keeps its inputs and is run again.

    What is kept at a time are the inputs of all blocks, and all that is made inside of one block. With n layers that
    cost the same this is least with about the square root of n blocks (Chen et al., arXiv 1604.06174).

    Args:
        graph: the calls.

    Returns:
        The position of the first call of each block but the first.

    Example:
        >>> import keras
        >>> from tfdist.layer_graph.graph import flatten
        >>> layers = [keras.Input((9,)), *(keras.layers.Dense(9) for _ in range(9))]
        >>> automatic_cuts(flatten(keras.Sequential(layers)._functional))
        (3, 6)
    """
    made = [cost.output_bytes for cost in costs_of(graph, _ROWS)]
    sent = [_ROWS * bytes_of_a_row for bytes_of_a_row in crossing(graph)]
    forbidden = uncuttable(graph)
    best, least = (), float(sum(made))
    for blocks in range(2, min(len(made), _MOST) + 1):
        try:
            cuts = balance(made, blocks, forbidden=forbidden)
        except ValueError:  # there are no more places
            break
        kept = sum(sent[cut] for cut in cuts) + _largest(made, cuts)
        if kept < least:
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
        ValueError: as `tfdist.memory.choice.choose`; or if other layers are called between the calls of one.
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
    for name in sorted(choose(layers, wanted), key=lambda name: (places[name][0], len(name))):
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
