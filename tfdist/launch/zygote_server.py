"""The zygote's main loop: imports TensorFlow once, then forks a worker for each request of the launcher."""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tfdist.launch.blas_threads import set_threads, wanted_threads
from tfdist.launch.kernel import death_pact
from tfdist.launch.preloaded import PACKAGES, PreloadedModules

_NICE = 5
_ADOPTION_DEADLINE = 5.0
_NOT_A_WORKER = 70
# It belongs to pyarrow, which pandas imports; jemalloc itself puts it in order in a forked process.
_THREADS_SAFE_TO_FORK = {"jemalloc_bg_thd"}


def serve(descriptor: int, command: Sequence[str]) -> tuple[str, ...]:
    """Forks workers until the launcher closes the connection. Returns in the workers only, once they may begin.

    Args:
        descriptor: the zygote's end of its connection with the launcher.
        command: the argument vector that a worker stands for.

    Returns:
        The worker's whole argument vector: the command, and what the request adds to it.
    """
    launcher = os.getppid()
    connection = socket.socket(fileno=descriptor)
    with _low_priority():
        set_by_import = _import_packages()
        _check_that_forking_is_safe()
    # Nothing of this becomes garbage: uncollected, its memory pages stay shared with the workers.
    gc.collect()
    gc.freeze()
    connection.send(json.dumps(set_by_import).encode())
    while True:
        word, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
        if not word:
            os._exit(0)
        # Forked twice: the worker's parent ends at once and the launcher, which adopts orphans meanwhile, gets it.
        if (between := os.fork()) == 0:
            if os.fork() != 0:
                os._exit(0)
            break
        for received in descriptors:
            os.close(received)
        os.waitpid(between, 0)
    try:
        connection.close()
        control, output = descriptors
        return _become_worker(socket.socket(fileno=control), output, launcher, command, set_by_import)
    except BaseException:
        os._exit(_NOT_A_WORKER)  # the launcher hears nothing more and starts the worker without us


def _import_packages() -> dict[str, str]:
    """Imports the packages and returns the environment variables that this has set."""
    before = dict(os.environ)
    for name in PACKAGES:
        importlib.import_module(name)
    if sys.modules["keras"].backend.backend() != "tensorflow":
        raise RuntimeError("the Keras backend is not TensorFlow, and others may start threads when they are imported")
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def _check_that_forking_is_safe() -> None:
    # OpenBLAS ends its threads before each fork and starts them anew later: only after a first fork is anything
    # else that runs here to be seen. It would be missing, perhaps with a lock held, in every worker.
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    tasks = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
    names = {Path("/proc/self/task", task, "comm").read_text().strip() for task in tasks}
    if unknown := sorted(names - _THREADS_SAFE_TO_FORK):
        raise RuntimeError(f"importing TensorFlow has started threads that do not survive a fork: {', '.join(unknown)}")


@contextmanager
def _low_priority() -> Iterator[None]:
    """Leaves the processor to the training where that can be undone, which takes a privilege."""
    if (child := os.fork()) == 0:
        try:
            os.nice(1)
            os.nice(-1)
        except OSError:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    step = _NICE if status == 0 else 0
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, before + step)
    yield
    os.setpriority(os.PRIO_PROCESS, 0, before)


def _become_worker(
    control: socket.socket, output: int, launcher: int, command: Sequence[str], set_by_import: dict[str, str]
) -> tuple[str, ...]:
    with control, control.makefile("rb") as stream:
        os.setsid()
        request = json.loads(stream.readline())
        whole = (*command, *request["arguments"])
        _wait_for_adoption(launcher)
        death_pact(launcher)()
        if request["cpus"]:
            os.sched_setaffinity(0, request["cpus"])
        _set_threads(request["env"])
        if request["folder"]:
            os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update({**request["env"], **set_by_import})
        _forget_randomness()
        for stream_number in (1, 2):
            os.dup2(output, stream_number)
        os.close(output)
        importlib.invalidate_caches()
        PreloadedModules(lambda: _start_over(whole, request["env"])).hide()
        control.sendall(b"%d\n" % os.getpid())
        if stream.readline() != b"go\n":
            os._exit(_NOT_A_WORKER)  # the launcher has given up
        return whole


def _wait_for_adoption(launcher: int) -> None:
    deadline = time.monotonic() + _ADOPTION_DEADLINE
    while os.getppid() != launcher:
        if time.monotonic() > deadline:
            os._exit(_NOT_A_WORKER)
        time.sleep(0.001)


def _set_threads(env: dict[str, str]) -> None:
    if env.get("OMP_NUM_THREADS") != os.environ.get("OMP_NUM_THREADS"):
        set_threads(wanted_threads(env, len(os.sched_getaffinity(0))))


def _forget_randomness() -> None:
    """All workers would draw the same numbers; TensorFlow has drawn none yet."""
    random.seed()
    sys.modules["numpy"].random.seed()


def _start_over(command: Sequence[str], env: dict[str, str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), env)
