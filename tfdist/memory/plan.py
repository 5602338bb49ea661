"""The blocks of a model under a policy: cuts in its graph of layers, or layers that are blocks by themselves.

plan_graph   cuts that are worth it (`automatic_cuts`), that a stream needs (`stream_cuts`), or that are given (`spans`)
plan_layers  of a model without a graph of layers: those that are named, or the kind that repeats most
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import fnmatch
import inspect
import itertools
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras

from tfdist.compat.upstream import Functional
from tfdist.inspection.model_state import is_table
from tfdist.layer_graph.chunk import Chunk, make_chunks, uncuttable
from tfdist.layer_graph.costs import costs_of, crossing, kept_bytes
from tfdist.layer_graph.graph import Call, LayerGraph, flatten
from tfdist.memory.policy import MemoryPolicy

_SHOWN = 8
# What a block may make is tried from nearly all down to a sixtieth: then, mostly inputs of blocks are kept.
_LIMITS, _NEXT_LIMIT = 60, 0.93
_ROWS = 16
# More blocks have to keep this much less: each end of a block keeps TensorFlow from merging operations.
_WORTH = 0.99
# A block may need this many times what the largest layer needs, so that small layers can join a large one.
_SLACK = 1.5
_cuts: weakref.WeakKeyDictionary[Functional, tuple[int, ...]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class GraphPlan:
    """Blocks of a Functional or Sequential model.

    Attributes:
        functional: its graph of layers.
        graph: the same as a list of calls.
        chunks: the blocks, which are all calls, in their order.
        names: of the blocks.
        modes: of the blocks.
    """

    functional: Functional
    graph: LayerGraph
    chunks: Sequence[Chunk]
    names: Sequence[str]
    modes: Sequence[str]


def plan_graph(functional: Functional, policy: MemoryPolicy) -> GraphPlan:
    """The blocks of a Functional or Sequential model.

    Raises:
        ValueError: if the policy names blocks that there are not, or that are no blocks.
    """
    graph = flatten(functional)
    if policy.blocks == "auto":
        cuts = stream_cuts(graph) if policy.streams else _automatic_cuts(functional, graph)
        if policy.streams and not policy.gathers and not cuts:
            raise ValueError(
                "Received: a model that is one block: the device would hold all of it. Expected: a model of several "
                "layers that are large enough to be parted, or blocks=[...] with names or classes of layers."
            )
        names = [f"block_{index}" for index in range(len(cuts) + 1)]
    else:
        chosen = spans(graph, policy.blocks)
        cuts = tuple(sorted({bound for span in chosen.values() for bound in span} - {0, len(graph.calls)}))
        known = {begin: name for name, (begin, _) in chosen.items()}
        names = [known.get(begin, "") for begin in (0, *cuts)]
    _check_patterns(policy, [name for name in names if name])
    modes = [policy.mode_of(name) if name or policy.streams else "none" for name in names]
    return GraphPlan(functional, graph, make_chunks(graph, cuts), names, modes)


def _check_patterns(policy: MemoryPolicy, names: Sequence[str]) -> None:
    for pattern in () if isinstance(policy.mode, str) else policy.mode:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            more = ", ..." if len(policy.mode) > 1 else ""
            remedy = "; for layers by their names, blocks=[...]" if policy.blocks == "auto" else ""
            raise ValueError(
                f"Received: mode={{{pattern!r}: {policy.mode[pattern]!r}{more}}}, with a pattern that fits no block. "
                f"Expected: names of blocks, or patterns, such as {', '.join(map(repr, names[:_SHOWN]))}{remedy}."
            )


def _numbered(names: Sequence[str]) -> list[str]:
    """Adds numbers to names that repeat: all layers of a class may be called "block"."""
    seen: collections.Counter[str] = collections.Counter()
    found = []
    for name in names:
        found.append(f"{name}_{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def _automatic_cuts(functional: Functional, graph: LayerGraph) -> tuple[int, ...]:
    """Remembers `automatic_cuts`, which takes seconds for deep models and is the same for every policy."""
    if functional not in _cuts:
        _cuts[functional] = automatic_cuts(graph)
    return _cuts[functional]


def automatic_cuts(graph: LayerGraph) -> tuple[int, ...]:
    """Cuts with which the least is kept, if each block keeps its inputs and is run again.

    What is kept at a time are the inputs of all blocks, and all that is made inside of one block. With n layers that
    cost the same this is least with about the square root of n blocks (Chen et al., arXiv 1604.06174).

    Returns the position of the first call of each block but the first.

    Example:
        >>> import keras
        >>> from tfdist.layer_graph.graph import flatten
        >>> layers = [keras.Input((9,)), *(keras.layers.Dense(9) for _ in range(9))]
        >>> automatic_cuts(flatten(keras.Sequential(layers)._functional))
        (3, 6)
    """
    made = kept_bytes(graph, _ROWS)
    best, least = (), float(sum(made))
    for number in range(1, _LIMITS):
        cuts, sent = _within(graph, made, sum(made) * _NEXT_LIMIT**number)
        kept = sent + max(sum(made[a:b]) for a, b in itertools.pairwise((0, *cuts, len(made))))
        if kept < _WORTH * least:
            best, least = cuts, kept
    return best


def stream_cuts(graph: LayerGraph) -> tuple[int, ...]:
    """Cuts with which no block needs much more than the largest layer does anyway, however many layers there are.

    Among such cuts, these send the least to the host. There are none if the calls cannot be parted.

    Example:
        >>> import keras
        >>> from tfdist.layer_graph.graph import flatten
        >>> layers = [keras.Input((9,)), *(keras.layers.Dense(9) for _ in range(4))]
        >>> stream_cuts(flatten(keras.Sequential(layers)._functional))
        (1, 2, 3)
    """
    counted = zip(graph.calls, costs_of(graph, _ROWS), kept_bytes(graph, _ROWS), strict=True)
    # A table is never gathered.
    needs = [kept + (0 if _has_table(call) else cost.parameter_bytes) for call, cost, kept in counted]
    cuts, _ = _within(graph, needs, _SLACK * max(needs))
    return cuts


def _has_table(call: Call) -> bool:
    return any(map(is_table, getattr(call.operation, "variables", ())))


def _within(graph: LayerGraph, needs: Sequence[float], limit: float) -> tuple[tuple[int, ...], float]:
    """The cuts into blocks within a limit, if they can be parted, that send the least, and how many bytes they send."""
    total = [0.0, *itertools.accumulate(needs)]
    forbidden = uncuttable(graph)
    bounds = [place for place in range(len(needs) + 1) if place not in forbidden]
    # The 1.0 is a price for each cut: of cuts that send equally many bytes, fewer are better.
    sent = [_ROWS * bytes_of_a_row + 1.0 for bytes_of_a_row in crossing(graph)]
    # Dynamic programming. For each bound: the least that is sent before it, and where the block begins that ends there.
    # The beginning is negated, so that the minimum takes the latest one of those that send equally many.
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    for number, end in enumerate(bounds[1:], 1):
        begins = [begin for begin in bounds[:number] if total[end] - total[begin] <= limit] or [bounds[number - 1]]
        best[end] = min((best[begin][0] + (sent[begin] if begin else 0.0), -begin) for begin in begins)
    cuts = []
    place = -best[bounds[-1]][1]
    while place:
        cuts.append(place)
        place = -best[place][1]
    return tuple(reversed(cuts)), best[bounds[-1]][0]


def spans(graph: LayerGraph, wanted: Sequence[str | type]) -> dict[str, tuple[int, int]]:
    """Where the calls of chosen layers begin and end; a layer in another one that is chosen, too, is left out.

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


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Layers that are blocks, in a model whose calls are not known.

    Attributes:
        layers: the layers.
        names: their names.
        modes: of the blocks.
    """

    layers: Sequence[keras.layers.Layer]
    names: Sequence[str]
    modes: Sequence[str]


def plan_layers(model: keras.Model, policy: MemoryPolicy) -> LayerPlan:
    """The blocks of a model that is written as a class.

    Raises:
        ValueError: if the policy names blocks that there are not, or does not name any and none is found.
    """
    layers = model._flatten_layers(include_self=False)
    names = _numbered([layer.name for layer in layers])
    every = dict(zip(names, layers, strict=True))
    chosen = repeated(every) if policy.blocks == "auto" else select_layers(every, policy.blocks)
    if not (chosen or policy.gathers):
        raise ValueError(
            "Received: blocks='auto' for a model that is written as a class, without layers of its own kind that "
            "repeat. Expected: a Functional or Sequential model; or blocks=[...] with names or classes of layers."
        )
    blocks, names = list(chosen.values()), list(chosen)
    if policy.streams:
        rest = remaining_layers(model, blocks)
        blocks, names = [*blocks, *rest], [*names, *(layer.name for layer in rest)]
    _check_patterns(policy, names)
    return LayerPlan(blocks, names, [policy.mode_of(name) for name in names])


def select_layers(layers: Mapping[str, Any], wanted: Sequence[str | type]) -> dict[str, Any]:
    """The layers with these names, or of these classes.

    `layers` are all layers by their names, or by their paths in nested models; `wanted` are names, ends of paths, and
    classes. The layers that are found keep their order.

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
            names = []
        if not names:
            near = difflib.get_close_matches(str(item), layers, _SHOWN, 0.4) or list(layers)[:_SHOWN]
            raise ValueError(
                f"Received: block {item!r}. Expected: the name of a layer, such as {', '.join(map(repr, near))}, or a "
                "class of layers of the model."
            )
        found.update({name: layers[name] for name in names})
    return {name: layer for name, layer in layers.items() if name in found}


def repeated(layers: Mapping[str, keras.layers.Layer]) -> dict[str, keras.layers.Layer]:
    """The layers of the class that repeats most among those that are made of other layers; none if no class does."""
    kinds: dict[type, dict[str, keras.layers.Layer]] = collections.defaultdict(dict)
    for name, layer in layers.items():
        if layer._layers and layer.variables:
            kinds[type(layer)][name] = layer
    chosen = max(kinds.values(), key=len, default={})
    return chosen if len(chosen) > 1 else {}


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
