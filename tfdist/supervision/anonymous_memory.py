"""Memory that processes of one user on one machine share. It has no name in a file system: nothing is left of it."""

from __future__ import annotations

import os
import secrets


def make(kind: str, size: int) -> tuple[int, str]:
    """Makes memory, filled with zeros, and keeps it until its descriptor and all mappings of it are closed.

    Args:
        kind: a word for it, such as "progress".
        size: bytes.

    Returns:
        Its file descriptor, and what other processes `attach` it by, as long as that is open.

    Raises:
        OSError: if there can be none; `ulimit -f` limits it as it does files.

    Example:
        >>> descriptor, place = make("example", 100)
        >>> other = attach(place)
        >>> os.fstat(other).st_size
        100
        >>> os.close(descriptor), os.close(other)
        (None, None)
    """
    # The number of a process may be another's by the time it is looked for, and so may that of a file.
    name = f"tfdist-{kind}-{secrets.token_hex(16)}"
    descriptor = os.memfd_create(name)
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}:{name}"


def attach(place: str) -> int:
    """A file descriptor of memory that another process has made.

    Raises:
        OSError: if it is gone, or in another container.
        ValueError: if something else is there.
    """
    path, _, name = place.rpartition(":")
    # Looked at before it is opened: to open a pipe or a device can have effects, and wait.
    _check_name(path, name)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # And afterwards: the process may have ended in between.
        _check_name(f"/proc/self/fd/{descriptor}", name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_name(path: str, name: str) -> None:
    if not name or os.readlink(path) != f"/memfd:{name} (deleted)":
        raise ValueError(f"Received: {path}, which is not {name}. Expected: the memory of a process that still runs")
