"""What the launcher asks of the Linux kernel and Python has no function for."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def death_pact(parent: int) -> Callable[[], None]:
    """Returns a function by which a child lets the kernel kill it as soon as its parent has ended.

    It is made ready beforehand so that a child can call it between fork and exec. Other systems than Linux offer
    nothing of the kind: there it does nothing.

    Args:
        parent: number of the process that is, or is about to be, the parent of the caller.

    Example:
        >>> promise = death_pact(os.getpid())
        >>> subprocess.Popen(["sleep", "100"], preexec_fn=promise)
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def promise() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(128 + signal.SIGKILL)  # it ended before the kernel was asked to tell us

    return promise


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Makes this process the parent of descendants whose own parent ends meanwhile.

    Only meanwhile: later orphans, helpers that a training script leaves behind, belong to the system's init process,
    since nobody here would ever wait for them.

    Raises:
        OSError: the system cannot do that.
    """
    if sys.platform != "linux":
        raise OSError("adopting orphans: expected Linux, the only system that can do that")
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
