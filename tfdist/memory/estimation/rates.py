"""How fast a device computes, and its link to the host."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfdist.layer_graph.costs import seconds_of

_SIDE = 1024  # of the matrices
_BYTES = 1 << 25


class Rates(NamedTuple):
    """What a device does in a second.

    Attributes:
        flops: operations in single precision.
        link: bytes from or to the host.
    """

    flops: float
    link: float


def measured_rates(device: str, host: str) -> Rates:
    """Measures both, in some tenths of a second.

    Args:
        device: the device.
        host: what takes what does not stay there.

    Example:
        >>> measured_rates("CPU:0", "CPU:0").flops > 1e8
        True
    """
    with tf.device(device):
        matrix = tf.random.stateless_uniform([_SIDE, _SIDE], [0, 0])
        block = tf.zeros([_BYTES // 4])

    def multiply() -> tf.Tensor:
        with tf.device(device):
            return tf.matmul(matrix, matrix)

    def copy() -> tf.Tensor:
        with tf.device(host):
            return block + 0.0

    return Rates(2.0 * _SIDE**3 / seconds_of(multiply), _BYTES / seconds_of(copy))
