"""Values on their way from a worker to the coordinator."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist.strategies.parameter_server.extended import COORDINATOR


def fetch(tensor: tf.Tensor) -> np.ndarray:
    """The value of a tensor that may be on another process.

    `tensor.numpy()`, and making a tensor while another process' device is entered, keep Python's lock until the other
    process answers: one that stands still would hold up all threads. An operation does not.

    Example:
        >>> fetch(tf.constant([1, 2])).tolist()
        [1, 2]
    """
    with tf.device(COORDINATOR):
        return tf.identity(tensor).numpy()


def local_constant(value: np.ndarray) -> tf.Tensor:
    """A tensor of the coordinator, whatever device is entered.

    Example:
        >>> int(local_constant(np.int32(3)))
        3
    """
    with tf.device(COORDINATOR):
        return tf.constant(value)
