"""Stages that the author of a model names while building it: `with tfdist.stage(1):`."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from numbers import Integral
from typing import Any

from keras.src.ops.node import Node

from tfdist.layer_graph.graph import Call, LayerGraph

_NOTE = "_tfdist_stage"
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
    _note_calls(1)
    try:
        yield
    finally:
        _note_calls(-1)
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
    noted = [_noted(call) for call in graph.calls]
    if all(note is None for note in noted):
        return None
    stages: list[int] = []
    maker: dict[int, tuple[int, str]] = {}
    backwards = []
    for call, note in zip(graph.calls, noted, strict=True):
        latest, source = max((maker[key] for key in call.inputs.values() if key in maker), default=(0, ""))
        own = latest if note is None else note
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


def _noted(call: Call) -> int | None:
    """The stage of a call: where it is nested in models, that of the outermost one that has any."""
    notes = (getattr(node, _NOTE, None) for node in (*call.enclosing, call.node))
    return next((note for note in notes if note is not None), None)


def _note_calls(scopes: int) -> None:
    """Opens or closes a scope. Keras has no place to ask who made a call: while any is open, its nodes are noted."""
    global _open_scopes, _plain_init
    with _lock:
        if _open_scopes == 0:
            _plain_init = Node.__init__
            Node.__init__ = _noting(_plain_init)
        _open_scopes += scopes
        if _open_scopes == 0:
            Node.__init__ = _plain_init


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    def noting_init(node: Node, *args: Any, **kwargs: Any) -> None:
        init(node, *args, **kwargs)
        index = _current.get()
        if index is not None:
            setattr(node, _NOTE, index)

    return noting_init
