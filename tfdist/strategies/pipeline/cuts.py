"""Where the author of a model wants it cut: `with tfdist.stage(1):` around layers, or names of layers."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from numbers import Integral
from typing import Any

from tfdist.compat.upstream import Node
from tfdist.layer_graph.graph import Call, LayerGraph

# Attribute of a Keras node (one call of a layer): the number of its stage.
_STAGE = "_tfdist_stage"
_SHOWN = 5
_current: ContextVar[int | None] = ContextVar("tfdist_stage", default=None)
_lock = threading.Lock()
_open_scopes = 0
_plain_init: Callable[..., None] = Node.__init__


@contextlib.contextmanager
def stage(index: int) -> Iterator[None]:
    """Puts the layers that are called within into one stage of a pipeline.

    It is for building Functional models: the calls of layers and of `keras.ops` on symbolic tensors count. A call
    outside of any scope belongs to the last stage that one of its inputs comes from. Where scopes are nested, the
    inner one counts; where a model is called in a scope, all its layers are in that stage. A model that was loaded
    from a file or cloned has no stages, nor has one whose inputs are what layers made: Keras copies its calls.

    Args:
        index: number of the stage, from 0.

    Raises:
        ValueError: if `index` is no whole number of at least 0.

    Example:
        >>> import keras
        >>> inputs = keras.Input((4,))
        >>> with stage(0):
        ...     x = keras.layers.Dense(8)(inputs)
        >>> with stage(1):
        ...     outputs = keras.layers.Dense(1)(x)
        >>> model = keras.Model(inputs, outputs)
    """
    if isinstance(index, bool) or not isinstance(index, Integral) or index < 0:
        raise ValueError(f"The stage is {index!r}, but must be a whole number of at least 0: the first stage is 0.")
    token = _current.set(int(index))
    _count_scopes(1)
    try:
        yield
    finally:
        _count_scopes(-1)
        _current.reset(token)


def stages_of(graph: LayerGraph) -> tuple[LayerGraph, tuple[int, ...]] | None:
    """The stages that the author of a model has named.

    Returns:
        None if there are none. Otherwise the calls, sorted by stage, and the position of the first call of each stage
        but the first.

    Raises:
        ValueError: if a call takes what a later stage makes, or a stage between others has no calls.

    Example:
        >>> import keras
        >>> from tfdist.layer_graph.graph import flatten
        >>> inputs = keras.Input((4,))
        >>> with stage(0):
        ...     x = keras.layers.Dense(8)(inputs)
        >>> with stage(1):
        ...     x = keras.layers.Dense(1)(x)
        >>> stages_of(flatten(keras.Model(inputs, x)))[1]
        (1,)
    """
    wanted = [_stage_of(call) for call in graph.calls]
    if all(number is None for number in wanted):
        return None
    stages: list[int] = []
    maker: dict[int, tuple[int, str]] = {}
    backwards = []
    for call, number in zip(graph.calls, wanted, strict=True):
        latest, source = max((maker[key] for key in call.inputs.values() if key in maker), default=(0, ""))
        own = latest if number is None else number
        if own < latest:
            backwards.append(f"'{call.name}' in stage {own} takes what '{source}' in stage {latest} makes")
        maker.update((key, (own, call.name)) for key in call.outputs)
        stages.append(own)
    if backwards:
        more = [f"and {len(backwards) - _SHOWN} more"] if len(backwards) > _SHOWN else []
        raise ValueError(
            f"Stages must not depend on later ones. Received: {'; '.join([*backwards[:_SHOWN], *more])}. "
            "Expected: each layer takes what its own or an earlier stage makes. Move the layers that are named first "
            "to the later stage, or those that they depend on to the earlier one."
        )
    used = sorted(set(stages))
    if used != list(range(len(used))):
        missing = next(number for number in range(used[-1]) if number not in used)
        raise ValueError(
            f"Stages must be numbered without gaps. Received: layers in the stages {used}, none in stage {missing}. "
            f"Expected: layers in each stage from 0 to {used[-1]}. Number the scopes anew, from tfdist.stage(0)."
        )
    order = sorted(range(len(stages)), key=stages.__getitem__)
    sorted_stages = sorted(stages)
    calls = tuple(graph.calls[i] for i in order)
    return dataclasses.replace(graph, calls=calls), tuple(sorted_stages.index(number) for number in used[1:])


def _stage_of(call: Call) -> int | None:
    """The stage of a call; for a call in nested models that of the outermost call that has one."""
    numbers = (getattr(node, _STAGE, None) for node in (*call.enclosing, call.node))
    return next((number for number in numbers if number is not None), None)


def _count_scopes(change: int) -> None:
    """Counts the open scopes of all threads.

    Keras has no hook that is called for each call of a layer. So while any scope is open, the constructor of its nodes
    is replaced by one that writes the stage on each new node.
    """
    global _open_scopes, _plain_init
    with _lock:
        if _open_scopes == 0:
            _plain_init = Node.__init__
            Node.__init__ = _with_stage(_plain_init)
        _open_scopes += change
        if _open_scopes == 0:
            Node.__init__ = _plain_init


def _with_stage(init: Callable[..., None]) -> Callable[..., None]:
    def init_with_stage(node: Node, *args: Any, **kwargs: Any) -> None:
        init(node, *args, **kwargs)
        index = _current.get()
        if index is not None:
            setattr(node, _STAGE, index)

    return init_with_stage


def cuts_from_names(graph: LayerGraph, names: Sequence[str]) -> tuple[int, ...]:
    """The positions at which a model is cut, after named layers.

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
    # Close matches are looked for among whole paths and among last parts: a mistyped name often lacks the path.
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
