"""Memory that all processes of a job on one host see. It has no name in a file system: nothing is left of it."""

from __future__ import annotations

import mmap
import os
import secrets

import numpy as np

# So many bytes of each process are exchanged at a time. With less there are more meetings, with more less is in caches.
SEGMENT = 4 << 20
_ALIGNMENT = 64


class HostMemory:
    """A segment for each process of a host, and one for the sum.

    Memory is taken from the system as it is first written to.

    Args:
        processes: how many there are.
        path: of the memory of the first process, for the others; `None` makes it.

    Attributes:
        path: where the other processes of this host find it, as long as this process lives.

    Raises:
        OSError: if there is no such memory: the other process is in another container, or has ended.
    """

    def __init__(self, processes: int, path: str | None = None) -> None:
        size = (processes + 1) * SEGMENT
        if path is None:
            name = f"tfdist-exchange-{secrets.token_hex(16)}"
            self._descriptor = os.memfd_create(name)
            os.ftruncate(self._descriptor, size)
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}:{name}"
        else:
            self.path = path
            file, _, name = path.rpartition(":")
            # The number of the process, or of the file, may be another's by now.
            if os.readlink(file) != f"/memfd:{name} (deleted)":
                raise FileNotFoundError(f"{file} is not {name}")
            self._descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        self._memory = mmap.mmap(self._descriptor, size)

    def of(self, process: int, dtype: np.dtype) -> np.ndarray:
        """The segment of a process; that of the sum is the last one."""
        begin = process * SEGMENT
        return np.frombuffer(self._memory, dtype, SEGMENT // dtype.itemsize, begin)

    def close(self) -> None:
        """Gives it back, once no array uses it any more."""
        os.close(self._descriptor)


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
