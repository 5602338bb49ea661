"""Memory that all processes of a job on one host see."""

from __future__ import annotations

import mmap
import os

import numpy as np

from tfdist.supervision import anonymous_memory

# So many bytes of each process are exchanged at a time. With less there are more meetings, with more less is in caches.
SEGMENT = 4 << 20
_ALIGNMENT = 64


class HostMemory:
    """A segment for each process of a host, and one for the sum.

    The system provides memory as it is first written to, and takes it back when all processes have ended.

    Args:
        processes: how many there are.
        place: of the memory that the first process has made, for the others; `None` makes it.

    Attributes:
        place: by which the other processes of this host find it, until `hide`.

    Raises:
        OSError: if there can be none, or the other process is in another container, or has ended.
        ValueError: if something else is at that place.
    """

    def __init__(self, processes: int, place: str | None = None) -> None:
        size = (processes + 1) * SEGMENT
        if place is None:
            self._descriptor, self.place = anonymous_memory.make("exchange", size)
        else:
            self._descriptor, self.place = anonymous_memory.attach(place), place
        try:
            self._memory = mmap.mmap(self._descriptor, size)
        except BaseException:
            self.hide()
            raise

    def of(self, process: int, dtype: np.dtype) -> np.ndarray:
        """The segment of a process; that of the sum is the last one."""
        return np.frombuffer(self._memory, dtype, SEGMENT // dtype.itemsize, process * SEGMENT)

    def hide(self) -> None:
        """Lets no further process find it. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def bounds_of(length: int, parts: int, itemsize: int) -> list[slice]:
    """Cuts an array into parts of about one length that begin at multiples of 64 bytes.

    Example:
        >>> bounds_of(100, 2, 4)
        [slice(0, 64, None), slice(64, 100, None)]
    """
    step = -(-length // parts)
    unit = max(1, _ALIGNMENT // itemsize)
    step = -(-step // unit) * unit
    return [slice(min(i * step, length), min((i + 1) * step, length)) for i in range(parts)]
