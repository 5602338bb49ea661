"""The device that a process of Horovod's uses."""

from __future__ import annotations

import tensorflow as tf


def own_device(local_rank: int) -> str:
    """Its GPU: of those that it sees, the one with its number among the ranks of its host. Without GPUs its CPU.

    To be called before TensorFlow is initialized: it then takes memory on this one only.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "CPU:0"
    own = local_rank % len(gpus)
    try:
        tf.config.set_visible_devices(gpus[own], "GPU")
    except RuntimeError:  # the program has used TensorFlow already
        return f"GPU:{own}"
    return "GPU:0"
