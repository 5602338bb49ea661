"""Applies a memory policy to a model, and takes it back."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.hooks import hooks_of
from tfdist.memory.automatic import METHODS, Automatic
from tfdist.memory.calls import UndecidedCall
from tfdist.memory.modes import automatic_of, follow, plan_of, remove_modes, shadow_call
from tfdist.memory.policy import MemoryPolicy, policy_of


def check_model(model: Any) -> None:
    """Checks that something is a model.

    Raises:
        ValueError: if it is not.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(f"Received: model={model!r}. Expected: a keras.Model, as the first argument.")


def check_applicable(model: keras.Model, policy: MemoryPolicy) -> None:
    """Checks what a policy needs to know of a model, and how the model is trained.

    Raises:
        ValueError: if the model is not built, has a policy of its strategy's, or is trained without graphs that the
            policy needs.
    """
    if not model.built:
        raise ValueError(
            f"Received: model '{model.name}', which is not built, so that its layers are not known. Expected: a model "
            "with a keras.Input, or one on which `model.build(input_shape)` was called, or which was called once."
        )
    if hooks_of(model.distribute_strategy).streams_weights and not policy.streams:
        raise ValueError(
            f"Received: a memory policy for model '{model.name}' under HostOffloadStrategy, which has one of its own: "
            "nothing of a block stays on the device. Nothing was applied. Expected: HostOffloadStrategy(blocks=..., "
            "prefetch=...) and no policy, or the policy and another strategy."
        )
    if model.compiled and model.run_eagerly and (policy.is_automatic or "swap" in policy.modes):
        why = "is chosen from the graph of a step" if policy.is_automatic else "changes the graph of a step"
        raise ValueError(
            f"Received: mode {'auto' if policy.is_automatic else 'swap'!r}, which {why}, for model '{model.name}', "
            "which was compiled with run_eagerly=True. Expected: run_eagerly=False; or mode 'recompute' or "
            "'recompute+swap'."
        )


def check_host(policy: MemoryPolicy) -> None:
    """Checks the device that takes what does not stay.

    Raises:
        ValueError: if there is no such device here.
    """
    specs = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices()]
    known = sorted({f"{spec.device_type}:{spec.device_index}" for spec in specs})
    try:
        spec = tf.DeviceSpec.from_string(policy.host)
    except (AttributeError, TypeError, ValueError):
        spec = tf.DeviceSpec()
    # A device of another process (it names a job) is known to that process only.
    if spec.job is None and f"{spec.device_type}:{spec.device_index}" not in known:
        raise ValueError(f"Received: host={policy.host!r}. Expected: a device of this process: {', '.join(known)}.")


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
    # Mistakes are reported before anything is changed, also those that would show in a fit only.
    plan = plan_of(model, policy.with_modes("none") if policy.is_automatic else policy)
    check_host(policy)
    remove(model)
    if policy.is_automatic:
        automatic = Automatic(model, policy)
        for name in METHODS:
            object.__setattr__(model, name, getattr(automatic, name))
        shadow_call(model, model, UndecidedCall(model, policy))
    else:
        follow(model, plan, policy)
    return model


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
    remove_modes(model)
    return model
