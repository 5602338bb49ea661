"""How many bytes of gradients should travel together between hosts, from what a sum takes there.

A bucket that takes long on the wire makes what comes after it wait, and the network idle until it is full. A small one
costs as much latency as a large one. So each should take some hundredths of a second, and several latencies:

seconds of a sum     = latency + bytes / rate       measured with little, and with a megabyte
bytes of a bucket    = rate * max(0.02 s, 20 latencies), from 1 to 25 MB
"""

from __future__ import annotations

import time

import numpy as np

from tfdist.runtime.direct.exchange import Exchange

_SECONDS = 0.02
_LATENCIES = 20
_LEAST, _MOST = 1 << 20, 25 << 20
_LITTLE, _MUCH = 1 << 10, 1 << 20
# The first sums fill TCP's windows.
_REPETITIONS = 5


def bucket_bytes_of(latency: float, rate: float) -> int:
    """Bytes of a bucket, for a sum's latency in seconds and a rate in bytes a second.

    Example:
        >>> [round(bucket_bytes_of(1e-4, rate) / 2**20, 1) for rate in (2.5e7, 1.25e8, 1.25e9)]
        [1.0, 2.4, 23.8]
        >>> round(bucket_bytes_of(0.02, 2.5e7) / 2**20, 1)
        9.5
    """
    return int(min(max(_LEAST, rate * max(_SECONDS, _LATENCIES * latency)), _MOST))


def measured_bucket_bytes(exchange: Exchange) -> int:
    """The same number on all processes, which all make this call at the same point; tenths of a second.

    Raises:
        ExchangeError: if a process is gone, or does not come.
    """
    little, much = (_seconds(exchange, size) for size in (_LITTLE, _MUCH))
    # Every process adds up the same sums of what all have measured.
    latency, slower = exchange.all_reduce([np.array([little, max(much - little, 1e-6)])])
    count = exchange.all_reduce([np.ones(1)])[0]
    return bucket_bytes_of(latency / count, (_MUCH - _LITTLE) * count / slower)


def _seconds(exchange: Exchange, size: int) -> float:
    values = np.zeros(size // 4, np.float32)
    taken = []
    for _ in range(_REPETITIONS):
        began = time.perf_counter()
        exchange.all_reduce([values])
        taken.append(time.perf_counter() - began)
    return min(taken)
