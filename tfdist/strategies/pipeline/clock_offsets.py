"""By how much the clocks of other machines are ahead of this one's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

# The quickest of them counts: the others were delayed, and nobody knows on which way.
_READINGS = 16
# Of seconds since 1970 in 64 bits, in seconds, with a margin.
_RESOLUTION = 1e-6


class Reading(NamedTuple):
    """Times of a question and its answer, in seconds.

    Example:
        >>> Reading(sent=10.0, there=15.1, received=10.2).there
        15.1
    """

    sent: float
    there: float
    received: float


def offset_of(readings: Sequence[Reading]) -> float:
    """By how much another clock is ahead of ours, in seconds, as NTP estimates it (RFC 5905).

    Returns:
        0 where the readings allow it: two processes on one machine have one clock.

    Example:
        >>> round(offset_of([Reading(10.0, 15.1, 10.2), Reading(11.0, 16.9, 11.9)]), 6)
        5.0
        >>> offset_of([Reading(10.0, 10.15, 10.2)])
        0.0
    """
    sent, there, received = min(readings, key=lambda reading: reading.received - reading.sent)
    offset = there - (sent + received) / 2
    return offset if abs(offset) > (received - sent) / 2 + _RESOLUTION else 0.0


def clock_offsets(devices: Sequence[str]) -> list[float]:
    """By how much the clock of each device's machine is ahead of this one's, in seconds.

    Example:
        >>> clock_offsets(["/job:localhost/replica:0/task:0/device:CPU:0"])
        [0.0]
    """
    hosts = [tf.DeviceSpec.from_string(d).replace(device_type="CPU", device_index=0).to_string() for d in devices]
    offsets = {host: offset_of(_ask(host)) for host in dict.fromkeys(hosts)}
    return [offsets[host] for host in hosts]


def _ask(host: str) -> list[Reading]:
    @tf.function(autograph=False)
    def read() -> tf.Tensor:
        with tf.device("/CPU:0"):
            sent = tf.timestamp()
        with tf.control_dependencies([sent]), tf.device(host):
            there = tf.timestamp()
        with tf.control_dependencies([there]), tf.device("/CPU:0"):
            received = tf.timestamp()
            return tf.stack([sent, there, received])

    return [Reading(*read().numpy().tolist()) for _ in range(_READINGS)]
