"""Processes that have imported TensorFlow, from which `run_local` and the tests fork theirs."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from tfdist.launcher.warm.preloaded import changed_for_import
from tfdist.launcher.warm.zygote import ForkedProcess, Zygote, ZygoteError
from tfdist.supervision import events, progress

# For imports that are under way. New ones would not be quicker.
_PATIENCE = 60.0
# What the interpreter, the dynamic linker and the C library read when a process starts.
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_")

_OF_RUN = ("TFDIST_LOG_DIR", events.VARIABLE, progress.VARIABLE)
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "4", "TF_CPP_MIN_LOG_LEVEL": "2"}

_servers: list[ForkServer] = []
_lock = threading.Lock()


def own_environment() -> dict[str, str]:
    """The environment of every process of `run_local`, without its cluster."""
    # Where a run around this process writes its events and its progress is not for processes of another one.
    around = {name: value for name, value in os.environ.items() if name not in _OF_RUN}
    return {**_THREADS, **around, "PYTHONUNBUFFERED": "1"}


class ForkServer:
    """A process that imports TensorFlow in the background and then waits to be forked.

    Args:
        env: environment that TensorFlow is imported in.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = dict(env)
        self._zygote = Zygote([sys.executable, "-u"], env, idle=False)

    def start(
        self, words: Sequence[str], env: Mapping[str, str], output: int, folder: str | None = None
    ) -> ForkedProcess | None:
        """Starts `python -u WORDS`, or returns None if that has to be done without this server.

        Args:
            words: a script or -m and a module, and its arguments.
            env: the process' whole environment.
            output: file descriptor for its standard output and error.
            folder: to work in; None = this process' own.
        """
        deadline = time.monotonic() + _PATIENCE
        while self._zygote.is_importing() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._zygote.is_ready() or not self._suits(env):
            return None
        try:
            return self._zygote.spawn(env, sorted(os.sched_getaffinity(0)), output, words, folder or os.getcwd())
        except ZygoteError:
            return None

    def _suits(self, env: Mapping[str, str]) -> bool:
        """Whether a fresh process would find, when it starts and imports TensorFlow, what the server has found."""
        # What importing TensorFlow sets is there if this process has imported it, too.
        imported = {name: value for name, value in self.set_by_import.items() if env.get(name) == value}
        return not changed_for_import({**self._env, **imported}, env) and _read_at_start(self._env) == _read_at_start(
            env
        )

    @property
    def set_by_import(self) -> dict[str, str]:
        """Environment variables that importing TensorFlow has set."""
        return self._zygote.set_by_import

    @property
    def pid(self) -> int:
        """Its process."""
        return self._zygote.group

    def close(self) -> None:
        """Ends the server; processes forked from it live on."""
        self._zygote.close()


def preload(servers: int = 2) -> None:
    """Imports TensorFlow now, in the background, so that each later `run_local` starts some seconds sooner.

    The processes of `run_local` are then forked from a process that has imported TensorFlow and has not used it. They
    get the environment, working directory and cores of fresh ones. A process whose environment differs in what the
    interpreter or the import of TensorFlow reads (`TF_ENABLE_ONEDNN_OPTS`, `PYTHONHASHSEED`, ...) is started afresh.
    What differs: `/proc/PID/environ` shows the environment of the process that it was forked from.

    Calling it again does nothing. The servers end with this process. On other systems than Linux it does nothing.

    Args:
        servers: how many processes import TensorFlow. Rank `r` is forked from number `r % servers`. Processes of one
            server share the seed of Python's string hashes, so that with one only, no test would notice an order of
            sets that differs between ranks.

    Example:
        >>> from tfdist.testing import preload, run_local
        >>> preload()  # in conftest.py, say  # doctest: +SKIP
        >>> run_local(lambda: __import__("tensorflow").add(1, 1).numpy())  # doctest: +SKIP
        [2, 2]
    """
    with _lock:
        if _servers or sys.platform != "linux":
            return

        _servers.extend(ForkServer(own_environment()) for _ in range(servers))
        atexit.register(close)


def fork(
    rank: int, words: Sequence[str], env: Mapping[str, str], output: int, folder: str | None = None
) -> ForkedProcess | None:
    """Starts a process from the server of its rank, as `ForkServer.start` does; None if there is no server."""
    with _lock:
        return _servers[rank % len(_servers)].start(words, env, output, folder) if _servers else None


def running() -> list[ForkServer]:
    """The servers that `preload` has started."""
    return list(_servers)


def close() -> None:
    """Ends the servers: later processes are started afresh."""
    with _lock:
        while _servers:
            _servers.pop().close()


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    # Everything that is forked has the -u of its server.
    return {
        name: value for name, value in env.items() if name.startswith(_READ_AT_START) and name != "PYTHONUNBUFFERED"
    }
