"""Cuts that are given by the names of the layers after which to cut."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from tfdist.layer_graph.graph import LayerGraph

_SHOWN = 5


def cuts_from_names(graph: LayerGraph, names: Sequence[str]) -> tuple[int, ...]:
    """Where to cut a model after named layers.

    Args:
        graph: the calls of the model.
        names: layers after whose last call to cut, in order. A layer in a nested model is named by its path,
            "encoder/dense_1", or by the end of its path if there is no other layer with it; "encoder" is the end of
            the nested model.

    Returns:
        The position of the first call of each stage but the first.

    Raises:
        ValueError: if a name is unknown or ambiguous, the last of all layers, or not behind the name before it.

    Example:
        >>> import keras
        >>> from tfdist.layer_graph.graph import flatten
        >>> layers = [keras.Input((2,)), *(keras.layers.Dense(1, name=name) for name in "abc")]
        >>> cuts_from_names(flatten(keras.Sequential(layers)._functional), ["a", "b"])
        (1, 2)
    """
    if isinstance(names, str):
        raise ValueError(f"cuts is the text {names!r}, but must be a list of names of layers: pass [{names!r}].")
    ends = _ends(graph)
    cuts: list[int] = []
    for index, name in enumerate(names):
        path = _path(name, ends)
        if ends[path] == len(graph.calls):
            raise ValueError(
                f"cuts names the layer '{path}', after which no layer follows, so that the last stage would be empty. "
                "Expected: a layer before the last one. Leave this name out, or name an earlier layer."
            )
        if cuts and ends[path] <= cuts[-1]:
            raise ValueError(
                f"cuts must name layers in the order in which they are called. Received: {names[index - 1]!r}, then "
                f"{name!r}, which ends before or at the same place. Expected: names from the first layers to the last. "
                "Swap them, or leave one out."
            )
        cuts.append(ends[path])
    return tuple(cuts)


def _ends(graph: LayerGraph) -> dict[str, int]:
    """For the path of each layer, and of each model that is nested, the position behind its last call."""
    ends = {}
    for position, call in enumerate(graph.calls):
        parts = call.name.split("/")
        for depth in range(1, len(parts) + 1):
            ends["/".join(parts[:depth])] = position + 1
    return ends


def _path(name: str, ends: dict[str, int]) -> str:
    """The path that a name stands for."""
    if name in ends:
        return name
    matches = [path for path in ends if path.endswith(f"/{name}")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ValueError(
            f"cuts names '{name}', but several layers have that name: {_listed(matches)}. "
            "Expected: a name that only one layer has. Give its whole path."
        )
    # Who mistypes a name leaves out the models around it, too.
    known = {path.rsplit("/", 1)[-1]: path for path in ends} | {path: path for path in ends}
    near = list(dict.fromkeys(known[match] for match in difflib.get_close_matches(str(name), known, n=_SHOWN)))
    hint = f"Did you mean {_listed(near)}?" if near else f"The model's layers are {_listed(list(ends))}."
    raise ValueError(
        f"cuts names {name!r}, but the model has no such layer. Expected: the name of a layer, or its path, such as "
        f"'{next(iter(ends), '')}'; the cut comes after it. {hint}"
    )


def _listed(paths: Sequence[str]) -> str:
    more = [f"and {len(paths) - _SHOWN} more"] if len(paths) > _SHOWN else []
    return ", ".join([*(f"'{path}'" for path in paths[:_SHOWN]), *more])
