"""What a training step needs, as TensorFlow's allocator counts it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import tree

from tfdist.memory.estimation.traced_graph import short_device
from tfdist.strategies.model_parts import optimizers_of, seed_generators_of

_STEPS = 3
# Some allocators of CPUs count what is large only.
_SOME = 1024


def measure(model: keras.Model, batch: Any) -> dict[str, int]:
    """Runs a few steps on zeros, and measures all but the first; weights, slots and metrics are put back.

    Args:
        model: a compiled and built model.
        batch: specifications of `(x, y)` or `(x, y, sample_weight)`, of all replicas together.

    Returns:
        For each device whose memory TensorFlow counts ("GPU:0"), bytes at the peak of a step, besides what is in use
        before it; the median of the steps.

    Raises:
        RuntimeError: if TensorFlow counts the memory of no device, or of none for itself.
    """
    devices = _counted()
    variables = [*model.variables, *model.metrics_variables, *(g.state for g in seed_generators_of(model))]
    variables += [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]
    saved = [np.array(variable) for variable in variables]
    before = model.train_function
    peaks: dict[str, list[int]] = {device: [] for device in devices}
    try:
        # The class's own: nothing is to be chosen now.
        type(model).make_train_function(model, force=True)
        data = tf.data.Dataset.from_tensors(tree.map_structure(_zeros, batch))
        iterator = iter(model.distribute_strategy.experimental_distribute_dataset(data.repeat()))
        for _ in range(1 + _STEPS):
            held = {}
            for device in devices:
                tf.config.experimental.reset_memory_stats(device)
                held[device] = tf.config.experimental.get_memory_info(device)["current"]
            logs = model.train_function(iterator)
            tree.map_structure(np.asarray, logs)  # waits for the end
            for device in devices:
                peaks[device].append(tf.config.experimental.get_memory_info(device)["peak"] - held[device])
    finally:
        model.train_function = before
        for variable, value in zip(variables, saved, strict=True):
            variable.assign(value)
    return {device: sorted(found[1:])[_STEPS // 2] for device, found in peaks.items()}


def _zeros(spec: tf.TensorSpec | None) -> tf.Tensor | None:
    return None if spec is None else tf.zeros(spec.shape, spec.dtype)


def _counted() -> list[str]:
    """The devices whose memory TensorFlow counts: GPUs, and a CPU with a certain allocator."""
    # In a cluster TensorFlow lists the devices of all tasks; by their short names it takes its own.
    found = list(dict.fromkeys(short_device(device.name) for device in tf.config.list_logical_devices()))
    counted = [device for device in found if device.startswith(("GPU", "CPU")) and _is_counted(device)]
    shared = sum(device.startswith("CPU") for device in counted or found) > 1
    if not counted or shared:
        reasons = ["whose memory TensorFlow does not count"] if not counted else []
        reasons += ["which share one allocator"] if shared else []
        raise RuntimeError(
            f"Received: measured=True with {', '.join(counted or found)}, {' and '.join(reasons)}. Expected: a GPU; "
            "or, on a CPU, a single logical device, and TF_CPU_ALLOCATOR_USE_BFC=1 in the environment before "
            "TensorFlow is imported."
        )
    return counted


def _is_counted(device: str) -> bool:
    try:
        before = tf.config.experimental.get_memory_info(device)["current"]
        with tf.device(device):
            some = tf.zeros([_SOME], tf.uint8)
        return tf.config.experimental.get_memory_info(device)["current"] >= before + some.shape[0]
    except (ValueError, tf.errors.OpError):
        return False
