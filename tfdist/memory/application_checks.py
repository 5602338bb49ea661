"""Refuses, with the reason and the remedy, what no memory policy can be applied to."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.memory.policy import MemoryPolicy
from tfdist.memory.stream_policy import StreamPolicy


def check_model(model: Any) -> None:
    """Checks that something is a model.

    Raises:
        ValueError: if it is not.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(f"Received: model={model!r}. Expected: a keras.Model, as the first argument.")


def check_applicable(model: keras.Model, policy: MemoryPolicy) -> None:
    """Checks what a policy needs to know of a model, and how the model is trained.

    Args:
        model: any model.
        policy: to be applied.

    Raises:
        ValueError: if the model is not built, has a policy of its strategy's, or is trained without graphs that the
            policy needs.
    """
    if not model.built:
        raise ValueError(
            f"Received: model '{model.name}', which is not built, so that its layers are not known. Expected: a model "
            "with a keras.Input, or one on which `model.build(input_shape)` was called, or which was called once."
        )
    if isinstance(getattr(model.distribute_strategy, "policy", None), StreamPolicy) and not policy.streams:
        raise ValueError(
            f"Received: a memory policy for model '{model.name}' under HostOffloadStrategy, which has one of its own: "
            "nothing of a block stays on the device. Nothing was applied. Expected: HostOffloadStrategy(blocks=..., "
            "prefetch=...) and no policy, or the policy and another strategy."
        )
    if model.compiled and model.run_eagerly and (policy.is_automatic or "swap" in policy.modes):
        why = "is chosen from the graph of a step" if policy.is_automatic else "changes the graph of a step"
        raise ValueError(
            f"Received: mode {'auto' if policy.is_automatic else 'swap'!r}, which {why}, for model '{model.name}', "
            "which was compiled with run_eagerly=True. Expected: run_eagerly=False; or mode 'recompute' or 'park'."
        )


def check_host(policy: MemoryPolicy) -> None:
    """Checks the device that takes what does not stay.

    Args:
        policy: to be applied.

    Raises:
        ValueError: if there is no such device here.
    """
    specs = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices()]
    known = sorted({f"{spec.device_type}:{spec.device_index}" for spec in specs})
    try:
        spec = tf.DeviceSpec.from_string(policy.host)
    except (AttributeError, TypeError, ValueError):
        spec = tf.DeviceSpec()
    # Of another process' devices only that process knows.
    if spec.job is None and f"{spec.device_type}:{spec.device_index}" not in known:
        raise ValueError(f"Received: host={policy.host!r}. Expected: a device of this process: {', '.join(known)}.")
