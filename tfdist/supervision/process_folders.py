"""Folders that belong to a process, and go with it: one that was killed is missed by the next one, which removes its.

A folder's name says which process it belongs to: `tfdist-KIND-BOOT-NAMESPACE-PID-START-...`. The start time tells
processes apart that had the same id; the namespace those of containers that share a folder, and what the kernel has
drawn when it started, those of hosts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tfdist.supervision.identity import Identity, own_place

_NAME = re.compile(r"tfdist-[a-z]+-(?P<place>[0-9a-f]{32}-\d+)-(?P<pid>\d+)-(?P<start>\d+)-.*")


@contextlib.contextmanager
def process_folder(kind: str) -> Iterator[Path]:
    """A new folder in that for temporary files, which only this user can read, as long as the block lasts.

    Args:
        kind: a word for it.

    Raises:
        OSError: it cannot be made.

    Example:
        >>> with process_folder("example") as folder:
        ...     _ = (folder / "file").write_text("content")
        >>> folder.exists()
        False
    """
    base, own = tempfile.gettempdir(), Identity.of(os.getpid())
    _remove_abandoned(base)
    folder = tempfile.mkdtemp(prefix=f"tfdist-{kind}-{own_place()}-{own.pid}-{own.start}-", dir=base)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(base: str) -> None:
    """Removes this user's folders whose process is gone: killed, it cannot do it."""
    with contextlib.suppress(OSError):
        for path in Path(base).iterdir():
            match = _NAME.fullmatch(path.name)
            if match is None or match["place"] != own_place():
                continue
            owner = Identity(int(match["pid"]), int(match["start"]), own_place())
            with contextlib.suppress(OSError):
                if path.lstat().st_uid == os.getuid() and not owner.is_alive:
                    shutil.rmtree(path, ignore_errors=True)
