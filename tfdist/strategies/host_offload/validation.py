"""Refuses, with the reason and the remedy, what cannot be trained with its weights on the host."""

from __future__ import annotations

import warnings

import keras
import tensorflow as tf

from tfdist.compat.upstream import device_util
from tfdist.inspection.model_parts import optimizers_of, parts_of
from tfdist.steps.validation import check_steps
from tfdist.strategies.validation import find_device, known_devices


def check_devices(device: str, host: str) -> tuple[str, str]:
    """The full names of two devices.

    Args:
        device: what computes.
        host: where variables are.

    Raises:
        ValueError: if one of them does not exist, or they are the same.
    """
    names = []
    for argument, given in (("device", device), ("host", host)):
        name = find_device(given)
        if name is None:
            raise ValueError(
                f"Received: {argument}={given!r}. Expected: one of {', '.join(known_devices())}. Without a GPU, "
                f"{_stand_in()}."
            )
        names.append(device_util.canonicalize(name))
    if names[0] == names[1]:
        raise ValueError(
            f"Received: device={device!r} and host={host!r}, which are the same: nothing would be elsewhere. Expected: "
            "an accelerator, and the host: device='GPU:0', host='CPU:0'."
        )
    return names[0], names[1]


def _stand_in() -> str:
    """How to try the strategy on a machine without a GPU."""
    if len(tf.config.list_logical_devices("CPU")) > 1:
        return "a logical CPU device can stand in to try it: device='CPU:1', host='CPU:0'"
    return (
        "logical CPU devices can stand in to try it: call tf.config.set_logical_device_configuration before anything "
        "else, and then HostOffloadStrategy(device='CPU:1')"
    )


def check(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Checks a model, before it is built or after.

    Args:
        strategy: the strategy in whose scope it was created.
        model: the model.

    Raises:
        ValueError: if it cannot be trained under this strategy.
    """
    if model.run_eagerly:
        raise ValueError(
            "Received: run_eagerly=True under HostOffloadStrategy. What is fetched when, and what waits for it, is in "
            "the graph of a step; without one, the device would hold what Python has not let go yet. Expected: "
            "run_eagerly=False."
        )
    if model.jit_compile is True:
        raise ValueError(
            "Received: compile(jit_compile=True) under HostOffloadStrategy. XLA compiles a step for one device, with "
            "all weights there. Expected: jit_compile=False or 'auto' (the default)."
        )
    check_steps(model)
    for optimizer in optimizers_of(model):
        if optimizer._distribution_strategy is not strategy:
            raise ValueError(
                f"Received: optimizer '{optimizer.name}', created outside of this strategy's scope. Its slots would "
                "not be on the host. Expected: an optimizer created in the scope, `with strategy.scope(): optimizer = "
                "...`, or its name, `compile('adam', ...)`."
            )
    for variable in model.variables:
        if getattr(variable.value, "_distribute_strategy", None) is not strategy:
            raise ValueError(
                f"Received: variable '{variable.path}', created outside of this strategy's scope, and perhaps not on "
                "the host. Expected: the model is created in the scope: `with strategy.scope(): model = ...`, around "
                "load_model, too."
            )


def warn(model: keras.Model) -> bool:
    """Warns of optimizers that need all gradients at once, which makes streaming pointless; returns whether it has.

    Args:
        model: a model that `check` has not refused.
    """
    found = False
    for optimizer in optimizers_of(model):
        for part in [optimizer, *parts_of(optimizer)]:
            dynamic = isinstance(part, keras.optimizers.LossScaleOptimizer)
            if dynamic or getattr(part, "global_clipnorm", None) is not None:
                found = True
                what = "a LossScaleOptimizer" if dynamic else f"global_clipnorm={part.global_clipnorm}"
                warnings.warn(
                    f"Received: {what} under HostOffloadStrategy. It looks at all gradients before the first weight "
                    "changes: they wait on the host for the last one, and updates no longer happen during the backward "
                    "pass. Expected: clipnorm or clipvalue, which look at one gradient at a time, unless it is meant.",
                    stacklevel=2,
                )
    return found
