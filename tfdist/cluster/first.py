"""One process at a time: what is prepared once for all, such as files that are downloaded or converted.

first      lock   [ downloads, converts, writes ]   unlock
the others   wait for the lock ..................   lock [ find it there ] unlock   ... one after another

The kernel releases the lock of a process that dies, so that nothing is left to clear away: the next one begins again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger("tfdist")
_TICK, _SAY_AFTER = 0.1, 10.0
# What this thread prepares: a function that is called again within does not wait for itself.
_inside = threading.local()


class PreparationError(RuntimeError):
    """Another process has failed to prepare what this one has waited for, or is not done within the timeout."""


def on_chief_first(
    name: str | None = None, folder: str | os.PathLike[str] | None = None, timeout: float = 3600.0
) -> Any:
    """Lets one process of a host run a block, or a function, before the others, and these one after another.

    The first one downloads, converts or writes files; the others then find them. It needs no strategy and no launcher:
    whichever process of this host comes first is the first. `tfds.load` and `download_and_prepare`,
    `keras.utils.get_file` (and with it `keras.datasets.*.load_data`) and KerasHub's presets do this by themselves once
    there is a strategy, and from `import tfdist` on under `tfdist run`.

    Args:
        name: What is prepared, the same text on all processes; by default the line that calls this.
        folder: A folder that several hosts share and where the files go, made if need be: one process of *all* hosts is
            then the first, if the file system has locks. By default, one of each host.
        timeout: How many seconds to wait for the others.

    Raises:
        PreparationError: The process that this one has waited for has failed (its error is in the text), or took too
            long. It is a RuntimeError.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "table.csv")
        >>> with on_chief_first():
        ...     if not os.path.exists(path):
        ...         _ = open(path, "w").write("1,2")
        >>> os.path.getsize(path)
        3
    """
    caller = sys._getframe(1)
    return _alone(name or f"{caller.f_code.co_filename}:{caller.f_lineno}", folder, timeout)


@contextlib.contextmanager
def _alone(name: str, folder: str | os.PathLike[str] | None, timeout: float) -> Iterator[None]:
    names = vars(_inside).setdefault("names", [])
    if name in names:
        yield
        return
    with contextlib.ExitStack() as held:
        lock = _locked(name, folder, timeout, held)
        names.append(name)
        held.callback(names.remove, name)
        try:
            yield
        except Exception as error:
            # Those who wait read it; who comes later tries again.
            with contextlib.suppress(OSError):
                os.pwrite(lock, f"!{os.getpid()}: {type(error).__name__}: {error}".encode()[:4000], 0)
            raise


def _locked(name: str, folder: str | os.PathLike[str] | None, timeout: float, held: contextlib.ExitStack) -> int:
    """The descriptor of a file that is locked until `held` is closed; -1 where no file system has locks."""
    mark = hashlib.sha256(name.encode()).hexdigest()[:16]
    places = [os.path.join(tempfile.gettempdir(), f"tfdist-{os.getuid()}-{mark}.lock")]
    if folder is not None and "://" not in os.fspath(folder):
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
        places.insert(0, os.path.join(folder, f".tfdist-{mark}.lock"))
    for path in places:
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            held.callback(os.close, lock)
            if path != places[-1]:
                with contextlib.suppress(OSError):  # it is somebody else's
                    os.fchmod(lock, os.stat(os.path.dirname(path)).st_mode & 0o666)
            _wait(lock, path, name, timeout)
            held.callback(fcntl.flock, lock, fcntl.LOCK_UN)  # a child that is forked meanwhile has it open, too
            return lock
    _log.warning("%s cannot be locked: the processes may prepare %s at the same time.", places[-1], name)
    return -1


def _wait(lock: int, path: str, name: str, timeout: float) -> None:
    began, waits, has_said = time.monotonic(), False, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            waits, waited = True, time.monotonic() - began
        if waited > timeout:
            raise PreparationError(
                f"Another process has prepared {name} for {waited:.0f} s, and is not done. It holds {path}; see what "
                "it does, or pass a longer timeout to tfdist.on_chief_first."
            )
        if waited > _SAY_AFTER and not has_said:
            has_said = True
            _log.warning("Waiting for another process that prepares %s.", name)
        time.sleep(_TICK)
    said = os.pread(lock, 4000, 0).decode(errors="replace")
    if waits and said.startswith("!"):
        raise PreparationError(
            f"Process {said[1:]}\nThat process was the first to prepare {name}; this one has waited."
        )
    os.ftruncate(lock, 0)  # what an earlier one has left
