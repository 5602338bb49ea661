"""One process drives, the others serve: the chief runs the program on the devices of all, by TensorFlow's servers."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import keras
import tensorflow as tf

from tfdist.cluster import preflight
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.roll_call import RollCallTimeout, meet
from tfdist.strategies import job
from tfdist.strategies.heap import keep_freed_pages
from tfdist.strategies.server_watch import ServerWatch

# For what the program has registered to be done at its exit: a server must not outlive its job because of it.
_EXIT_SECONDS = 1.5
_LONG_WAIT = 10.0
_TICK = 1.0

_connected: tuple[ClusterConfig, list[str]] | None = None


def serve(cluster: ClusterConfig, start_timeout: float) -> NoReturn:
    """Lends this process' devices to the chief and ends the process, with exit code 0, when the chief's has ended.

    Signals that ask for an end are not obeyed: in a preemption every process of a job gets one, and the chief needs
    the servers until it has saved.

    Args:
        cluster: the cluster; this process is not its chief.
        start_timeout: how long to wait until all processes are there, in seconds.

    Raises:
        ClusterError: if the cluster description is wrong or a process does not come.

    Example (on every worker but the first):
        >>> serve(tfdist.discover(), start_timeout=300.0)
    """
    deadline = time.monotonic() + start_timeout
    _meet(cluster, start_timeout)
    own, chief = _name(cluster, cluster.rank or 0), _name(cluster, 0)
    _ignore_signals(f"{own} serves until {chief} has ended")
    # It serves as long as it is referred to.
    server = tf.distribute.Server(_spec(cluster), cluster.task_type, cluster.task_index, protocol="grpc")
    watch = ServerWatch(cluster.chief_address or "")
    if not watch.reach(deadline - time.monotonic()):
        raise RollCallTimeout(
            f"{chief} came to the roll call but has no TensorFlow server within start_timeout={start_timeout:g} s; "
            "look into its output for why not, and start all tasks again"
        )
    _say(f"{own} serves {chief}")
    life = threading.Thread(target=watch.wait, name="tfdist-watch-0", daemon=True)
    life.start()
    while life.is_alive():
        life.join(_TICK)  # a signal does not wake the main thread if the system gives it to another one
    _say(f"{chief} has ended, and {own} ends as well")
    del server
    _end()


def connect(cluster: ClusterConfig, start_timeout: float, role: Callable[[int], str] | None = None) -> list[str]:
    """Makes this process, the chief, drive the devices of all tasks.

    From then on a line on standard error tells at once when one of the other processes is gone.

    Args:
        cluster: the cluster; this process is its chief. With a single task there is nobody to connect to.
        start_timeout: how long to wait until all processes are there, in seconds.
        role: what a task, by its rank, holds, for that line: "stage 1".

    Returns:
        One device a task, by rank: its first GPU, or its CPU.

    Raises:
        ClusterError: if the cluster description is wrong, a process does not come, or this process belongs to another
            cluster already.

    Example (on the first worker):
        >>> connect(tfdist.discover(), start_timeout=300.0)
        ['/job:worker/replica:0/task:0/device:CPU:0', '/job:worker/replica:0/task:1/device:CPU:0']
    """
    global _connected
    if cluster.num_workers == 1:
        return [_device(tf.config.list_logical_devices(), "/job:localhost/replica:0/task:0")]
    joined = job.joined()
    before = joined.cluster if joined else _connected[0] if _connected else None
    if before is not None and (joined or before != cluster):
        raise ClusterError(
            f"Received: {cluster}. Expected: {before}, which this process has joined already. TensorFlow's "
            "server cannot be restarted: use one cluster and one kind of strategy in a process, or start another one."
        )
    if _connected is None:
        _connected = cluster, _connect(cluster, start_timeout, role)
    return list(_connected[1])


def _connect(cluster: ClusterConfig, start_timeout: float, role: Callable[[int], str] | None) -> list[str]:
    deadline = time.monotonic() + start_timeout
    _meet(cluster, start_timeout)
    watches = {rank: ServerWatch(cluster.jobs[name][i]) for rank, (name, i) in enumerate(cluster.compute_tasks) if rank}
    # TensorFlow would wait for ever, in silence, for a server that does not come.
    late = [rank for rank, watch in watches.items() if not _reach(watch, _name(cluster, rank), deadline)]
    if late:
        raise RollCallTimeout(
            f"no TensorFlow server within start_timeout={start_timeout:g} s: "
            f"{', '.join(_name(cluster, rank) for rank in late)}; look into their output for why not"
        )
    for rank, watch in watches.items():
        text = gone(_name(cluster, rank), role(rank) if role else "", _log_of(cluster, rank))
        threading.Thread(target=_tell_when_gone, args=(watch, text), name=f"tfdist-watch-{rank}", daemon=True).start()
    tf.config.experimental_connect_to_cluster(
        _spec(cluster), job_name=cluster.task_type, task_index=cluster.task_index, protocol="grpc"
    )
    devices = tf.config.list_logical_devices()
    return [_device(devices, f"/job:{name}/replica:0/task:{index}") for name, index in cluster.compute_tasks]


def gone(name: str, role: str, log: str) -> str:
    """What is said when a server's process is gone.

    Example:
        >>> gone("worker 1 (b:1)", "stage 1", "")[:45]
        'worker 1 (b:1), which holds stage 1, is gone;'
    """
    return (
        f"{name}{f', which holds {role},' if role else ''} is gone; "
        f"{log or 'its output'} may tell why. To go on from the last backup after such a loss, train with "
        "tfdist.callbacks.BackupAndRestore and start with `tfdist run --max-restarts 3`"
    )


def _meet(cluster: ClusterConfig, start_timeout: float) -> None:
    preflight.require(cluster)
    meet(cluster, timeout=start_timeout, info={"same.tensorflow": tf.__version__, "same.keras": keras.__version__})
    keep_freed_pages()


def _reach(watch: ServerWatch, name: str, deadline: float) -> bool:
    if watch.reach(min(_LONG_WAIT, deadline - time.monotonic())):
        return True
    _say(f"waiting for the TensorFlow server of {name}")
    return watch.reach(deadline - time.monotonic())


def _tell_when_gone(watch: ServerWatch, text: str) -> None:
    watch.wait()
    _say(text)


def _spec(cluster: ClusterConfig) -> tf.train.ClusterSpec:
    return tf.train.ClusterSpec({name: dict(cluster.jobs[name]) for name, _ in cluster.compute_tasks})


def _name(cluster: ClusterConfig, rank: int) -> str:
    name, index = cluster.compute_tasks[rank]
    return f"{name} {index} ({cluster.jobs[name][index]})"


def _log_of(cluster: ClusterConfig, rank: int) -> str:
    name, index = cluster.compute_tasks[rank]
    folder = os.environ.get("TFDIST_LOG_DIR")
    return os.path.join(folder, f"{name}-{index}.log") if folder else ""


def _device(devices: list[tf.config.LogicalDevice], task: str) -> str:
    gpu = f"{task}/device:GPU:0"
    return gpu if any(device.name == gpu for device in devices) else f"{task}/device:CPU:0"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, f"tfdist: {text}\n".encode())


def _ignore_signals(reason: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # Python lets no other thread change that

    def refuse(number: int, frame: FrameType | None) -> None:
        _say(f"{signal.Signals(number).name} received: {reason}")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # Schedulers announce a preemption by the latter ones; what the program does with them is its own affair.
        if number in (signal.SIGTERM, signal.SIGINT) or signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, refuse)


def _end() -> NoReturn:
    """Ends the process as if the program had come to its end; the threads of TensorFlow's server do not count."""
    guard = threading.Timer(_EXIT_SECONDS, os._exit, (0,))
    guard.daemon = True
    guard.start()
    atexit._run_exitfuncs()  # ends processes of multiprocessing, too
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(0)
