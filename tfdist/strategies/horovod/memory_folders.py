"""The folders in memory in which the processes of elastic jobs keep copies of their state. Needs no TensorFlow.

A folder's name says which process it belongs to: `tfdist-elastic-NAMESPACE-PID-START-...`. The start time tells
processes apart that had the same id, and the namespace those of containers that share /dev/shm.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path

_MEMORY = "/dev/shm"
_NAME = re.compile(r"tfdist-elastic-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<start>\d+)-.*")


def memory_folder(owner: object) -> str:
    """A new folder in memory, where the system has such (it is on disk otherwise), for as long as `owner` lives.

    Removes those whose process is gone, too.
    """
    remove_abandoned()
    own = os.getpid()
    folder = tempfile.mkdtemp(prefix=f"tfdist-elastic-{_namespace()}-{own}-{_start_of(own)}-", dir=_base())
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder


def remove_abandoned() -> None:
    """Removes this user's folders whose process is gone: a process that is killed cannot do it."""
    with contextlib.suppress(OSError):
        for path in Path(_base()).iterdir():
            match = _NAME.fullmatch(path.name)
            if match is None or int(match["namespace"]) != _namespace():
                continue
            with contextlib.suppress(OSError):
                if path.lstat().st_uid == os.getuid() and _start_of(int(match["pid"])) != int(match["start"]):
                    shutil.rmtree(path, ignore_errors=True)


def _base() -> str:
    return _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()


def _namespace() -> int:
    """The system's number for the set of processes among which this one's number is unique."""
    return os.stat("/proc/self/ns/pid").st_ino


def _start_of(pid: int) -> int | None:
    """When a process was started, in ticks since the system's start; `None` if it is gone."""
    try:
        status = Path("/proc", str(pid), "stat").read_bytes()
    except OSError:
        return None
    # Behind the command's name, which is in brackets and may contain anything.
    state, *rest = status[status.rindex(b")") + 1 :].split()
    return None if state in (b"Z", b"X") else int(rest[18])
