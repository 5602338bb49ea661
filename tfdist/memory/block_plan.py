"""A policy applied to one model: its blocks, and what is kept of each."""

from __future__ import annotations

import dataclasses
import fnmatch
import weakref
from collections import Counter
from collections.abc import Sequence

import keras

from tfdist.compat.upstream import Functional
from tfdist.layer_graph.chunk import Chunk, make_chunks
from tfdist.layer_graph.graph import LayerGraph, flatten
from tfdist.memory.policy import MemoryPolicy
from tfdist.memory.segmentation import automatic_cuts, remaining_layers, repeated, select_layers, spans, stream_cuts

_SHOWN = 8
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


def plan_graph(functional: Functional, policy: MemoryPolicy) -> GraphPlan:
    """The blocks of a Functional or Sequential model.

    Raises:
        ValueError: if the policy names blocks that there are not, or that are no blocks.
    """
    graph = flatten(functional)
    if policy.blocks == "auto":
        cuts = stream_cuts(graph) if policy.streams else _automatic_cuts(functional, graph)
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
    seen: Counter[str] = Counter()
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


def plan_layers(model: keras.Model, policy: MemoryPolicy) -> LayerPlan:
    """The blocks of a model that is written as a class.

    Raises:
        ValueError: if the policy names blocks that there are not, or does not name any and none is found.
    """
    layers = model._flatten_layers(include_self=False)
    names = _numbered([layer.name for layer in layers])
    every = dict(zip(names, layers, strict=True))
    chosen = repeated(every) if policy.blocks == "auto" else select_layers(every, policy.blocks)
    blocks, names = list(chosen.values()), list(chosen)
    if policy.streams:
        rest = remaining_layers(model, blocks)
        blocks, names = [*blocks, *rest], [*names, *(layer.name for layer in rest)]
    _check_patterns(policy, names)
    return LayerPlan(blocks, names, [policy.mode_of(name) for name in names])
