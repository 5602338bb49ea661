"""What the zygote runs, by its path: `python -u zygote_program.py DESCRIPTOR TARGET…`.

It imports TensorFlow once, then forks a worker for each request of the launcher.
"""

from __future__ import annotations

import contextvars
import ctypes
import gc
import importlib
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":
    # The worker's own settings of the interpreter and its own module path apply: it may import another tfdist than the
    # launcher's, or none. What is needed here comes from the launcher's, and is forgotten again in `_main`.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of this file
    sys.path.insert(0, str(Path(os.path.abspath(__file__)).parents[3]))

from tfdist.launcher.operating_system import die_with_parent
from tfdist.launcher.warm.preloaded import PACKAGES, PreloadedModules, first_path, run_as_main

_LOWEST_NICE = 19
_ADOPTION_DEADLINE = 5.0
_THREAD_END_DEADLINE = 5.0
_NOT_A_WORKER = 70
# It belongs to pyarrow, which pandas imports; jemalloc itself puts it in order in a forked process.
_THREADS_SAFE_TO_FORK = {"jemalloc_bg_thd"}
_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def serve(descriptor: int, command: Sequence[str], idle: bool = False) -> tuple[str, ...]:
    """Forks workers until the launcher closes the connection. Returns in the workers only, once they may begin.

    Args:
        descriptor: the zygote's end of its connection with the launcher.
        command: the argument vector that a worker stands for.
        idle: whether to import TensorFlow only while nobody else wants the processor.

    Returns:
        The worker's whole argument vector: the command, and what the request adds to it.
    """
    launcher = os.getppid()
    connection = socket.socket(fileno=descriptor)
    set_by_import = _in_idle_thread(_import_packages) if idle else _import_packages()
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
    # Read by hand: psutil knows no names of threads.
    tasks = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
    names = {Path("/proc/self/task", task, "comm").read_text().strip() for task in tasks}
    if unknown := sorted(names - _THREADS_SAFE_TO_FORK):
        raise RuntimeError(f"importing TensorFlow has started threads that do not survive a fork: {', '.join(unknown)}")


def _in_idle_thread(function: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Calls a function in a thread that gets only what time nobody else on this machine wants.

    Only a privileged process can raise its priority again, and forked processes inherit it. So a thread of its own has
    the low priority, and this one, from which the workers are forked, keeps the normal one.
    """
    results: list[dict[str, str]] = []
    thread_locals: list[tuple[threading.local, dict]] = []
    context = contextvars.Context()

    def work() -> None:
        # A policy and a nice value are those of a thread on Linux, not of the whole process.
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except OSError:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_NICE)
        results.append(context.run(function))
        # Its type is asked, not the object: that may stand for a module that is imported on the first access.
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), threading.local)]
        thread_locals.extend((local, dict(vars(local))) for local in found)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if not results:
        raise RuntimeError("the imports failed in their thread")
    # As if this thread had done it.
    for local, values in thread_locals:
        vars(local).update(values)
    for variable, value in context.items():
        variable.set(value)
    # Python calls a thread ended a moment before the kernel does.
    deadline = time.monotonic() + _THREAD_END_DEADLINE
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < deadline:
        time.sleep(0.001)
    return results[0]


def _become_worker(
    control: socket.socket, output: int, launcher: int, command: Sequence[str], set_by_import: dict[str, str]
) -> tuple[str, ...]:
    with control, control.makefile("rb") as stream:
        os.setsid()
        request = json.loads(stream.readline())
        whole = (*command, *request["arguments"])
        _wait_for_adoption(launcher)
        die_with_parent(launcher)()
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
    """Seeds Python and NumPy anew, since all workers would draw the same numbers; TensorFlow has drawn none yet."""
    random.seed()
    sys.modules["numpy"].random.seed()


def _start_over(command: Sequence[str], env: dict[str, str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), env)


def wanted_threads(env: Mapping[str, str], cores: int) -> int:
    """How many threads OpenBLAS uses in a process with this environment and so many usable cores.

    Example:
        >>> wanted_threads({"OMP_NUM_THREADS": "3"}, cores=8), wanted_threads({}, cores=8)
        (3, 8)
    """
    text = env.get("OMP_NUM_THREADS", "")
    return min(int(text), cores) if text.isdigit() and int(text) > 0 else cores


def set_threads(count: int) -> None:
    """Sets the number of threads that OpenBLAS would have chosen if it had been loaded now.

    Raises:
        RuntimeError: there is none, NumPy was built with another library.
    """
    told = False
    for path in _loaded():
        library = ctypes.CDLL(path)
        for name in _SETTERS:
            if setter := getattr(library, name, None):
                setter(ctypes.c_int(count))
                told = True
    if not told:
        raise RuntimeError(
            f"NumPy's BLAS cannot be told to use {count} threads: expected OpenBLAS. "
            "Start a new process with OMP_NUM_THREADS set."
        )


def _loaded() -> set[str]:
    # Read by hand: the script need not have psutil, and must not find it imported already.
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    # NumPy's and SciPy's are two.
    return {path for path in paths if "openblas" in Path(path).name and ".so" in path}


def _main(descriptor: int, idle: bool, words: list[str]) -> None:
    del sys.path[0]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tfdist"]:
        del sys.modules[name]

    def put_first(words: Sequence[str]) -> None:
        if not getattr(sys.flags, "safe_path", False):
            sys.path.insert(0, first_path(words))

    if words:
        put_first(words)
    # Returns in each worker, never in the zygote.
    command = serve(descriptor, (sys.executable, "-u", *words), idle)
    if not words:
        put_first(command[2:])
    run_as_main(command[2:], command, hidden_files=[__file__])


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2] == "idle", sys.argv[3:])
