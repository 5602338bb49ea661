"""Files that are replaced in one piece: a reader finds the previous content or the new one, never a part."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path


def write_atomically(
    path: str | os.PathLike[str], content: bytes | str, mode: int = 0o666, durable: bool = False
) -> None:
    """Writes a file beside the old one and renames it once it is complete. The folder has to exist.

    A process that is killed meanwhile may leave `.NAME.RANDOM` behind.

    Args:
        path: the file; one of this name is replaced.
        content: the whole content.
        mode: permissions of the file, of which the process's umask takes some away.
        durable: whether to wait until the disk has the file. Without it, the file may be empty after a power cut.

    Raises:
        OSError: it cannot be written; what was there before is still there.

    Example:
        >>> import json, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> write_atomically(f"{folder}/state.json", json.dumps({"step": 3}))
        >>> os.listdir(folder)
        ['state.json']
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: str | os.PathLike[str]) -> None:
    """Waits until the disk has a file's content, or a folder's list of entries.

    Raises:
        OSError: if that fails, such as with no space left.
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
