"""Applies a memory policy to a model, and takes it back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdist.layer_graph.graph import functional_of
from tfdist.memory.application_checks import check_applicable, check_host, check_model
from tfdist.memory.automatic import METHODS, Automatic
from tfdist.memory.graph_call import GraphCall
from tfdist.memory.layer_call import LayerCall
from tfdist.memory.plan import GraphPlan, LayerPlan, contents, plan_graph, plan_layers
from tfdist.memory.policy import MemoryPolicy, policy_of
from tfdist.memory.undecided_call import UndecidedCall

_log = logging.getLogger("tfdist")
# Notes on the model that it is this file that has changed its `supports_jit`, and what its `jit_compile` was.
_WITHOUT_XLA = "_tfdist_without_xla"
_ON_HOST = ("park", "swap")


def apply(model: keras.Model, policy: MemoryPolicy | str) -> keras.Model:
    """Lets a model keep less for its backward pass; what it computes stays the same, bit for bit.

    The model's layers, weights, files and configuration do not change; `fit`, `train_on_batch`, custom train steps and
    loops with a `tf.GradientTape` take part. It works before `compile` and after it, under any strategy that runs the
    model's own `call`: `PipelineStrategy` does not, and has `memory=` of its own. Mode "auto" chooses in `fit` and
    `train_on_batch`, which know how large batches are; until then everything is kept.

    Args:
        model: a model that is built: by `keras.Input`, by `build`, or by being called once.
        policy: what is kept; a mode stands for a policy with this mode and nothing else.

    Returns:
        The model.

    Raises:
        ValueError: if the model is not built, the policy names blocks that there are not, or no blocks are found.

    Example:
        >>> import keras, tfdist
        >>> model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8, "relu") for _ in range(9))])
        >>> model.compile("sgd", "mse")
        >>> model = tfdist.memory.apply(model, "recompute")
    """
    check_model(model)
    policy = policy_of(policy)
    if policy is None:
        raise ValueError("Received: policy=None. Expected: a mode, or a MemoryPolicy; `remove` takes a policy back.")
    check_applicable(model, policy)
    # What is wrong should be told before anything is changed, and not wait for a fit.
    plan = _plan(model, policy.with_modes("none") if policy.is_automatic else policy)
    check_host(policy)
    remove(model)
    if policy.is_automatic:
        automatic = Automatic(model, policy)
        for name in METHODS:
            object.__setattr__(model, name, getattr(automatic, name))
        _shadow_call(model, model, UndecidedCall(model, policy))
    else:
        _follow(model, plan, policy)
    return model


def applied(model: keras.Model) -> MemoryPolicy | None:
    """The policy that is applied to a model, or to a part of it; `None` if there is none.

    Args:
        model: any model.
    """
    automatic = automatic_of(model)
    return _modes(model) if automatic is None else automatic.policy


def automatic_of(model: keras.Model) -> Automatic | None:
    """What chooses for a model; `None` if its policy says what is kept, or it has none.

    Args:
        model: any model.
    """
    return getattr(vars(model).get("make_train_function"), "__self__", None)


def remove(model: keras.Model) -> keras.Model:
    """Lets a model keep everything again.

    Args:
        model: any model.

    Returns:
        The model.

    Raises:
        ValueError: if it is no model.
    """
    check_model(model)
    if automatic_of(model) is not None:
        for name in METHODS:
            object.__delattr__(model, name)
    _remove_modes(model)
    return model


def apply_modes(model: keras.Model, policy: MemoryPolicy) -> None:
    """Applies a policy whose modes are known, instead of those that are applied."""
    plan = _plan(model, policy)
    _remove_modes(model)
    _follow(model, plan, policy)


def _follow(model: keras.Model, plan: GraphPlan | LayerPlan, policy: MemoryPolicy) -> None:
    if isinstance(plan, GraphPlan):
        _shadow_call(model, model, GraphCall(model, plan, policy))
    else:
        for layer, name, mode in zip(plan.layers, plan.names, plan.modes, strict=True):
            _shadow_call(model, layer, LayerCall(layer, name, mode, model, policy))
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
    noted = vars(model).get(_WITHOUT_XLA)
    try:
        try:
            apply_modes(model, policy or MemoryPolicy("none"))
        except ValueError:
            if policy is not None:
                raise
        yield
    finally:
        _remove_modes(model)
        for layer, call in calls.values():
            object.__setattr__(layer, "call", call)
        if noted is not None:
            object.__setattr__(model, _WITHOUT_XLA, noted)
        model.supports_jit, model.jit_compile, model.train_function = supports, compiled, function


def contents_of(model: keras.Model, policy: MemoryPolicy) -> dict[str, str]:
    """The first and the last layer of each block, by the block's name; nothing where blocks are layers.

    Args:
        model: a model that is built.
        policy: what is kept.
    """
    functional = functional_of(model)
    return contents(plan_graph(functional, policy)) if functional is not None and policy.blocks == "auto" else {}


def _plan(model: keras.Model, policy: MemoryPolicy) -> GraphPlan | LayerPlan:
    functional = functional_of(model)
    return plan_layers(model, policy) if functional is None else plan_graph(functional, policy)


def _modes(model: keras.Model) -> MemoryPolicy | None:
    """The policy whose modes are applied."""
    return next((vars(layer)["call"].policy for layer in model._flatten_layers() if _has_call(layer)), None)


def _has_call(layer: keras.layers.Layer) -> bool:
    return isinstance(vars(layer).get("call"), (GraphCall, LayerCall, UndecidedCall))


def _remove_modes(model: keras.Model) -> None:
    for layer in model._flatten_layers():
        if _has_call(layer):
            object.__delattr__(layer, "call")
            model.train_function = None
    compiled = vars(model).pop(_WITHOUT_XLA, None)
    if compiled is not None:
        model.supports_jit = True
        model.jit_compile = model.jit_compile or compiled


def _shadow_call(model: keras.Model, layer: keras.layers.Layer, call: Callable) -> None:
    # Past Keras' attribute tracking.
    object.__setattr__(layer, "call", call)
    # What was traced keeps everything.
    model.train_function = None


def _do_without_xla(model: keras.Model) -> None:
    """XLA has one device, and orders what it compiles as it likes: nothing would be sent to the host, or late."""
    if not model.supports_jit:
        return
    # Keras heeds it in compile: "auto" becomes False, and True does, with a warning.
    model.supports_jit = False
    object.__setattr__(model, _WITHOUT_XLA, bool(model.compiled and model.jit_compile))
    if model.compiled and model.jit_compile:
        _log.warning(
            "Model '%s' was compiled with XLA, which cannot send activations to the host; it is trained without "
            "(jit_compile=False).",
            model.name,
        )
        model.jit_compile = False
