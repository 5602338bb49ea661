"""How many files this process may open: each connection is one, and the usual limit is 1024."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

# For what else is opened at the same time: logs, libraries, TensorFlow's own connections come later.
_SPARE = 32
_OPEN = Path("/proc/self/fd")


def make_room(count: int) -> int:
    """Raises the soft limit, up to the hard one, so that so many more files can be opened.

    Args:
        count: How many more.

    Returns:
        How many more can be: fewer if the hard limit does not allow them.

    Example:
        >>> make_room(3) >= 3
        True
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = _in_use(soft) + _SPARE
    if soft != resource.RLIM_INFINITY and soft < used + count:
        wanted = used + count if hard == resource.RLIM_INFINITY else min(used + count, hard)
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return count if soft == resource.RLIM_INFINITY else soft - used


def _in_use(soft: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(_OPEN))
    # Another system, or a container that hides /proc: the lowest number that is free, below which all are taken.
    try:
        lowest = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return soft
    os.close(lowest)
    return lowest


def hard_limit() -> int:
    """What the soft limit cannot be raised above."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]
