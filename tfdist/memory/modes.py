"""Puts the modes of a policy into effect on a model: for good, or for as long as a step of it is estimated.

A mode works by replacing the `call` of the model, or of the layers that are its blocks (`tfdist.memory.calls`). With
mode "auto", `tfdist.memory.automatic` chooses the modes first, and then calls `apply_modes`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.layer_graph.graph import functional_of
from tfdist.memory.block_plan import GraphPlan, LayerPlan, plan_graph, plan_layers
from tfdist.memory.calls import GraphCall, LayerCall, UndecidedCall
from tfdist.memory.policy import MemoryPolicy

_log = logging.getLogger("tfdist")
# Attribute of a model whose `supports_jit` this module has changed: what its `jit_compile` was.
_WITHOUT_XLA = "_tfdist_without_xla"
_ON_HOST = ("recompute+swap", "swap")


def applied(model: keras.Model) -> MemoryPolicy | None:
    """The policy that is applied to a model, or to a part of it; `None` if there is none.

    Args:
        model: any model.
    """
    automatic = automatic_of(model)
    return modes_of(model) if automatic is None else automatic.policy


def automatic_of(model: keras.Model) -> Any | None:
    """What chooses for a model; `None` if its policy says what is kept, or it has none.

    Args:
        model: any model.
    """
    return getattr(vars(model).get("make_train_function"), "__self__", None)


def apply_modes(model: keras.Model, policy: MemoryPolicy) -> None:
    """Applies a policy whose modes are known, instead of those that are applied."""
    plan = plan_of(model, policy)
    remove_modes(model)
    follow(model, plan, policy)


def follow(model: keras.Model, plan: GraphPlan | LayerPlan, policy: MemoryPolicy) -> None:
    """Replaces the calls of a model, or of its layers, so that each block is run in its mode."""
    if isinstance(plan, GraphPlan):
        shadow_call(model, model, GraphCall(model, plan, policy))
    else:
        for layer, name, mode in zip(plan.layers, plan.names, plan.modes, strict=True):
            shadow_call(model, layer, LayerCall(layer, name, mode, model, policy))
    if set(policy.modes) & set(_ON_HOST):
        _do_without_xla(model)
        if len(tf.config.list_logical_devices()) == 1:
            _log.warning(
                "Mode %s for model '%s' on a machine whose only device is the host: nothing can be kept elsewhere. "
                "Mode 'recompute' saves memory here.",
                " and ".join(repr(mode) for mode in _ON_HOST if mode in policy.modes),
                model.name,
            )


@contextlib.contextmanager
def under(model: keras.Model, policy: MemoryPolicy | None) -> Iterator[None]:
    """Applies a policy whose modes are known, for as long as the block runs.

    Args:
        model: a model that is built.
        policy: what is kept; `None` for everything, with blocks as they are found if the model has any.
    """
    function, compiled, supports = model.train_function, model.jit_compile, model.supports_jit
    calls = {id(layer): (layer, vars(layer)["call"]) for layer in model._flatten_layers() if _has_call(layer)}
    without_xla = vars(model).get(_WITHOUT_XLA)
    try:
        try:
            apply_modes(model, policy or MemoryPolicy("none"))
        except ValueError:
            if policy is not None:
                raise
        yield
    finally:
        remove_modes(model)
        for layer, call in calls.values():
            object.__setattr__(layer, "call", call)
        if without_xla is not None:
            object.__setattr__(model, _WITHOUT_XLA, without_xla)
        model.supports_jit, model.jit_compile, model.train_function = supports, compiled, function


def contents_of(model: keras.Model, policy: MemoryPolicy) -> dict[str, str]:
    """The first and the last layer of each block, by the block's name; nothing where blocks are layers.

    Args:
        model: a model that is built.
        policy: what is kept.
    """
    functional = functional_of(model)
    if functional is None or policy.blocks != "auto":
        return {}
    plan = plan_graph(functional, policy)
    ends = [list(dict.fromkeys((chunk.calls[0].name, chunk.calls[-1].name))) for chunk in plan.chunks]
    return {name: " to ".join(of_block) for name, of_block in zip(plan.names, ends, strict=True)}


def plan_of(model: keras.Model, policy: MemoryPolicy) -> GraphPlan | LayerPlan:
    """The blocks of a model, and the mode of each.

    Raises:
        ValueError: if the policy names blocks that there are not, or no blocks are found.
    """
    functional = functional_of(model)
    return plan_layers(model, policy) if functional is None else plan_graph(functional, policy)


def modes_of(model: keras.Model) -> MemoryPolicy | None:
    """The policy whose modes are applied."""
    return next((vars(layer)["call"].policy for layer in model._flatten_layers() if _has_call(layer)), None)


def _has_call(layer: keras.layers.Layer) -> bool:
    return isinstance(vars(layer).get("call"), (GraphCall, LayerCall, UndecidedCall))


def remove_modes(model: keras.Model) -> None:
    """Gives a model and its layers their calls back."""
    for layer in model._flatten_layers():
        if _has_call(layer):
            object.__delattr__(layer, "call")
            model.train_function = None
    compiled = vars(model).pop(_WITHOUT_XLA, None)
    if compiled is not None:
        model.supports_jit = True
        model.jit_compile = model.jit_compile or compiled


def shadow_call(model: keras.Model, layer: keras.layers.Layer, call: Callable) -> None:
    """Replaces the call of a layer of a model, or of the model."""
    # Around Keras' attribute tracking, which would count the replacement as a part of the layer.
    object.__setattr__(layer, "call", call)
    # The train function was traced with the old call: Keras makes a new one.
    model.train_function = None


def _do_without_xla(model: keras.Model) -> None:
    """Trains a model without XLA, which has one device, and orders operations itself: it would send nothing in time."""
    if not model.supports_jit:
        return
    # For a later `compile`: with this, Keras turns jit_compile="auto" into False, and True too, with a warning.
    model.supports_jit = False
    object.__setattr__(model, _WITHOUT_XLA, bool(model.compiled and model.jit_compile))
    if model.compiled and model.jit_compile:
        _log.warning(
            "Model '%s' was compiled with XLA, which cannot send activations to the host; it is trained without "
            "(jit_compile=False).",
            model.name,
        )
        model.jit_compile = False
