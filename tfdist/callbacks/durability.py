"""Durability: what was written to a local file system survives the end of the process and of the machine."""

from __future__ import annotations

import errno
import os


def sync(path: str) -> None:
    """Waits until a file's content, or a folder's list of entries, is on the disk.

    Raises:
        OSError: If that fails, such as with no space left.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync folders.
        if not (os.path.isdir(path) and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: str, content: bytes) -> None:
    """Writes a file that has either its previous content or the whole new one, whenever the process is killed.

    A killed process may leave `<path>.tmp` behind.

    Raises:
        OSError: If it cannot be written.
    """
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(os.path.dirname(path))
