"""Memory for results, used again and again: new memory costs more than a sum, since the system clears each page."""

from __future__ import annotations

import sys

import numpy as np

_ALIGNMENT = 64
# How many arrays of one size, which TensorFlow gives back a little after it has used them; and how many sizes.
_KEPT, _SIZES = 4, 32
# Smaller results come from memory that was freed a moment ago.
_SMALLEST = 1 << 16


class ResultMemory:
    """Arrays that nobody else writes to, at addresses that TensorFlow takes over without a copy.

    Example:
        >>> memory = ResultMemory()
        >>> first, second = (memory.take(1 << 20, np.dtype("float32")) for _ in range(2))
        >>> address = first.ctypes.data
        >>> address == second.ctypes.data
        False
        >>> del first
        >>> memory.take(1 << 20, np.dtype("float32")).ctypes.data == address
        True
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[np.ndarray]] = {}
        # How Python counts differs by its version.
        (self._references_of_nobody,) = _references([np.empty(1)])

    def take(self, length: int, dtype: np.dtype) -> np.ndarray:
        """An array of one dimension, with any content, that is not in use."""
        size = length * dtype.itemsize
        if size < _SMALLEST:
            return _aligned(_new(size), size, dtype)
        if size not in self._kept and len(self._kept) == _SIZES:
            del self._kept[next(iter(self._kept))]
        kept = self._kept.setdefault(size, [])
        for memory, references in zip(kept, _references(kept), strict=True):
            # Whoever uses a part of it, TensorFlow among them, has a reference to the whole.
            if references <= self._references_of_nobody:
                return _aligned(memory, size, dtype)
        memory = _new(size)
        if len(kept) < _KEPT:
            kept.append(memory)
        return _aligned(memory, size, dtype)


def _references(arrays: list[np.ndarray]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


def _new(size: int) -> np.ndarray:
    return np.empty(size + _ALIGNMENT, np.uint8)


def _aligned(memory: np.ndarray, size: int, dtype: np.dtype) -> np.ndarray:
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].view(dtype)
