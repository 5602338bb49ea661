"""Processes that have imported TensorFlow, from which `run_local` and the tests fork theirs.

Importing it takes longer than all the rest of a short test. `multiprocessing.forkserver` would not do: its processes
are children of the server, so that their exit codes are lost with it, and they run a function instead of a program.

this process -- words, environment, output --> server -- forks twice, ends the parent --> process
      ^----------------------- adopts it, hears its number -------------------------------'
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.launcher.operating_system import adopting_orphans, die_with_parent, spawn
from tfdist.supervision import events, progress

_PROGRAM = str(Path(__file__).with_name("fork_program.py"))
# Seconds for imports that are under way, and for a fork.
_PATIENCE = 300.0
# What the interpreter, the dynamic linker, the C library, and the imports of TensorFlow, Keras and NumPy read.
_READ_AT_START = (
    "PYTHON", "LD_", "MALLOC_", "GLIBC_", "TF_", "TF2_", "XLA_", "KERAS_", "ONEDNN_", "DNNL_", "CUDA_", "NVIDIA_",
    "NCCL_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "NPY_", "GRPC_", "PROTOCOL_BUFFERS_",
)  # fmt: skip
# Of these: read when TensorFlow sets up its devices or later; and every process that is forked has the server's -u.
_READ_LATER = {
    "TF_CONFIG", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS",
    "TF_CPP_MIN_LOG_LEVEL", "TF_FORCE_GPU_ALLOW_GROWTH", "PYTHONUNBUFFERED",
}  # fmt: skip

_servers: list[ForkServer] = []
_lock = threading.Lock()


def own_environment() -> dict[str, str]:
    """The environment of every process of `run_local`, without its cluster."""
    # Where a run around this process writes its events and its progress is not for processes of another one.
    of_run = ("TFDIST_LOG_DIR", events.VARIABLE, progress.VARIABLE)
    around = {name: value for name, value in os.environ.items() if name not in of_run}
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "4", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return {**threads, **around, "PYTHONUNBUFFERED": "1"}


@dataclass
class ForkedProcess:
    """A process that a server has forked, and a child of this one.

    Attributes:
        pid: its number.
        returncode: how it ended, as `subprocess` says it; `None` as long as it is not known to have ended.
    """

    pid: int
    returncode: int | None = None

    def wait(self) -> int:
        """Waits for its end and returns its returncode."""
        return self.poll(0)

    def poll(self, options: int = os.WNOHANG) -> int | None:
        """Returns how it ended, or `None` if it still runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """A process that imports TensorFlow in the background and then waits to be forked.

    Args:
        env: environment that TensorFlow is imported in.

    Attributes:
        process: that which imports.
        set_by_import: environment variables that importing TensorFlow has set, once it is ready.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = dict(env)
        self.set_by_import: dict[str, str] | None = None
        # Each message is one packet.
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(_PATIENCE)
        with theirs:
            self.process = spawn(
                [sys.executable, "-u", _PROGRAM, str(theirs.fileno())],
                subprocess.DEVNULL,
                env,
                pass_fds=[theirs.fileno()],
                before_exec=die_with_parent(os.getpid()),
            )

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        output: int,
        folder: str | None = None,
        cpus: Sequence[int] = (),
    ) -> ForkedProcess | None:
        """Starts `python -u WORDS`, or returns `None` if that has to be done without this server.

        Args:
            words: a script or -m and a module, and its arguments.
            env: the process' whole environment.
            output: file descriptor for its standard output and error.
            folder: to work in; `None` = this process' own.
            cpus: cores to pin it to; empty = this process' own.
        """
        try:
            if self.set_by_import is None:
                self.set_by_import = json.loads(self._connection.recv(2**16))
            if not self._suits(env):
                return None
            request = {
                "words": list(words),
                "env": {**env, **self.set_by_import},
                "folder": folder or os.getcwd(),
                "cpus": list(cpus) or sorted(os.sched_getaffinity(0)),
            }
            with adopting_orphans():
                socket.send_fds(self._connection, [json.dumps(request).encode()], [output])
                return ForkedProcess(int(self._connection.recv(32)))
        except (OSError, ValueError):
            return None  # the server has ended

    def _suits(self, env: Mapping[str, str]) -> bool:
        """Whether a fresh process would find, when it starts and imports TensorFlow, what the server has found."""
        # What importing TensorFlow sets is there if this process has imported it, too.
        imported = {name: value for name, value in self.set_by_import.items() if env.get(name) == value}
        return _read_at_start({**self._env, **imported}) == _read_at_start(env)

    def close(self) -> None:
        """Ends the server; processes forked from it live on."""
        self._connection.close()
        self.process.kill()
        self.process.wait()


def preload(servers: int = 2) -> None:
    """Imports TensorFlow now, in the background, so that each later `run_local` starts some seconds sooner.

    The processes of `run_local` are then forked from a process that has imported TensorFlow and has not used it. They
    get the environment and working directory of fresh ones. A process whose environment differs in what the interpreter
    or the import of TensorFlow reads (`TF_ENABLE_ONEDNN_OPTS`, `PYTHONHASHSEED`, ...) is started afresh. Give
    such variables to `run_local` as `env`: what the function sets comes too late.
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
    """Starts a process from the server of its rank, as `ForkServer.start` does; `None` if there is no server."""
    with _lock:
        return _servers[rank % len(_servers)].start(words, env, output, folder) if _servers else None


def close() -> None:
    """Ends the servers: later processes are started afresh."""
    with _lock:
        while _servers:
            _servers.pop().close()


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in env if name.startswith(_READ_AT_START) and name not in _READ_LATER}
