"""Applies a memory policy to a model, and takes it back."""

from __future__ import annotations

import logging

import keras
import tensorflow as tf

from tfdist.layer_graph.graph import functional_of
from tfdist.memory.graph_call import GraphCall
from tfdist.memory.layer_call import LayerCall
from tfdist.memory.plan import plan_graph, plan_layers
from tfdist.memory.policy import MemoryPolicy, policy_of

_log = logging.getLogger("tfdist")
# Notes on the model that it is this file that has changed its `supports_jit`.
_WITHOUT_XLA = "_tfdist_without_xla"


def apply(model: keras.Model, policy: MemoryPolicy | str) -> keras.Model:
    """Lets a model keep less for its backward pass; what it computes stays the same, bit for bit.

    The model's layers, weights, files and configuration do not change; `fit`, `train_on_batch`, custom train steps and
    loops with a `tf.GradientTape` take part. It works before `compile` and after it, under any strategy that runs the
    model's own `call`: `PipelineStrategy` does not, and has `recompute=` of its own.

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
    policy = policy_of(policy)
    remove(model)
    if not model.built:
        raise ValueError(
            f"Received: model '{model.name}', which is not built, so that its layers are not known. Expected: a model "
            "with a keras.Input, or one on which `model.build(input_shape)` was called, or which was called once."
        )
    functional = functional_of(model)
    if functional is not None:
        _shadow_call(model, model, GraphCall(model, plan_graph(functional, policy), policy))
    else:
        plan = plan_layers(model, policy)
        for layer, mode in zip(plan.layers, plan.modes, strict=True):
            _shadow_call(model, layer, LayerCall(layer, mode, model, policy))
    if set(policy.modes) & {"park", "swap"}:
        _do_without_xla(model)
        if len(tf.config.list_logical_devices()) == 1:
            _log.warning(
                "Mode 'park' or 'swap' for model '%s' on a machine whose only device is the host: nothing can be kept "
                "elsewhere. Mode 'recompute' saves memory here.",
                model.name,
            )
    return model


def is_applied(model: keras.Model) -> bool:
    """Whether a policy is applied to a model.

    Args:
        model: any model.
    """
    return any(isinstance(vars(layer).get("call"), (GraphCall, LayerCall)) for layer in model._flatten_layers())


def remove(model: keras.Model) -> keras.Model:
    """Lets a model keep everything again.

    Args:
        model: any model.

    Returns:
        The model.
    """
    for layer in model._flatten_layers():
        if isinstance(vars(layer).get("call"), (GraphCall, LayerCall)):
            object.__delattr__(layer, "call")
            model.train_function = None
    if vars(model).pop(_WITHOUT_XLA, False):
        model.supports_jit = True
    return model


def _shadow_call(model: keras.Model, layer: keras.layers.Layer, call: GraphCall | LayerCall) -> None:
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
    object.__setattr__(model, _WITHOUT_XLA, True)
    if model.compiled and model.jit_compile:
        _log.warning(
            "Model '%s' was compiled with XLA, which cannot send activations to the host; it is trained without "
            "(jit_compile=False).",
            model.name,
        )
        model.jit_compile = False
