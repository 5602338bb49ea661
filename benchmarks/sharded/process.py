"""What a process of either framework measures of itself, and of the loopback device."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

from benchmarks.network.links import sent_bytes
from benchmarks.process_files import peak, reset_peak, resident

STEPS = 2
_REST = 0.5


def sent(train: Callable[[int], None]) -> float:
    """Bytes that one of two processes sends in a step. All that is sent goes over the loopback device.

    Args:
        train: makes so many steps. What it sends besides, at its beginning and end, does not count.
    """
    marks = [sent_bytes("lo")]
    for steps in (STEPS, 2 * STEPS):
        train(steps)
        marks.append(sent_bytes("lo"))
    return (marks[2] - 2 * marks[1] + marks[0]) / 2 / STEPS


def memory(train: Callable[[], None], held: Callable[[], int]) -> dict[str, int]:
    """Bytes of this process between steps and at their peak, and those of the variables that the framework has.

    Args:
        train: makes `STEPS` steps.
        held: returns what weights, slots and gradients take between steps.
    """
    time.sleep(_REST)
    # What glibc keeps of what was freed, in small pieces, is not held.
    ctypes.CDLL(None).malloc_trim(0)
    between = resident(os.getpid())
    reset_peak(os.getpid())
    train()
    return {"between": between, "peak": peak(os.getpid()), "held": held()}
