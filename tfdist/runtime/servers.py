"""One process drives, the others serve: the chief runs the program on the devices of all, by TensorFlow's servers.

A process that serves does not end before its chief, and then whatever its threads still do.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import keras
import tensorflow as tf

from tfdist.cluster import preflight, sockets
from tfdist.cluster.config import ClusterConfig, Task
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import whole_number
from tfdist.cluster.meeting import meet, members, named
from tfdist.cluster.server import BarrierTimeoutError, JobUnderWayError, is_a_servers
from tfdist.cluster.sockets import UnreachedError, keep_trying
from tfdist.compat.upstream import config_pb2
from tfdist.runtime import job
from tfdist.runtime.job import keep_freed_pages, say

_LONG_WAIT = 10.0
_TICK = 1.0

# Set by `tfdist run` in a worker that it has started in the place of another one.
_REPLACEMENT = "TFDIST_REPLACEMENT"
# Inter-op threads: a step holds one until it is done, and what it waits for needs others: with one it waits for ever.
_LEAST_THREADS = 4
_CONNECT_SECONDS = 5.0
# Refused: nobody listens there any more. Anything else may be the network's fault for a while.
_UNREACHABLE_SECONDS = 10.0

_connected: tuple[ClusterConfig, list[str]] | None = None
_awaited: ClusterConfig | None = None


def serve(cluster: ClusterConfig, start_timeout: float) -> NoReturn:
    """Lends this process' devices to the chief and ends the process, with exit code 0, when the chief's has ended.

    In a cluster with parameter servers a worker may come back while the job runs: it serves again at once. Should the
    chief end before `start_timeout` is over then, it may have been that of a former job, and the worker waits for the
    next one; not if `tfdist run` has started it, which knows. Signals that ask for an end are not obeyed: in a
    preemption every process of a job gets one, and the chief needs the servers until it has saved.

    Args:
        cluster: the cluster; this process is not its chief.
        start_timeout: how long to wait until all processes are there, in seconds.

    Raises:
        ClusterError: if the cluster description is wrong or a process does not come.

    Example (on every worker but the first):
        >>> serve(tfdist.discover(), start_timeout=300.0)  # doctest: +SKIP
    """
    deadline = time.monotonic() + start_timeout
    own, chief = _name(cluster, (cluster.task_type, cluster.task_index)), _name(cluster, cluster.compute_tasks[0])
    preflight.require(cluster)
    with_ps, server = "ps" in cluster.jobs, None
    tasks = members(cluster, servers=with_ps)
    while True:
        rejoined = False
        try:
            # What a parameter server held is lost with it: it begins again, together with all others.
            may_rejoin = with_ps and cluster.task_type != "ps"
            _meet(cluster, deadline - time.monotonic(), servers=with_ps, rejoin=may_rejoin)
        except JobUnderWayError:
            rejoined = True  # this worker has come back
        except BarrierTimeoutError:
            if server is None:
                raise
            break
        ignore_signals(f"{own} serves until {chief} has ended")
        # It serves as long as it is referred to.
        server = server or tf.distribute.Server(
            _spec(cluster, tasks), cluster.task_type, cluster.task_index, protocol="grpc", config=_config(cluster, own)
        )
        watch = ServerWatch(cluster.chief_address or "")
        # If it was there a moment ago and is gone now, it has ended.
        if not watch.reach(_LONG_WAIT if rejoined else deadline - time.monotonic()) and not rejoined:
            raise BarrierTimeoutError(
                f"{chief} came to the barrier but has no TensorFlow server within start_timeout={start_timeout:g} s; "
                "look into its output for why not, and start all tasks again"
            )
        say(f"{own} serves {chief}{' again' if rejoined else ''}, as process {os.getpid()}")
        life = threading.Thread(target=watch.wait, name="tfdist-watch-chief", daemon=True)
        life.start()
        while life.is_alive():
            life.join(_TICK)  # a signal does not wake the main thread if the system gives it to another one
        # A worker that is started together with its job can find the chief of a former one, which is about to end.
        if not rejoined or os.environ.get(_REPLACEMENT) or time.monotonic() >= deadline:
            break
        heed_signals()
        say(f"{chief} has ended, soon after {own} had come back; {own} waits for another job until its start_timeout")
    say(f"{chief} has ended, and {own} ends as well")
    del server
    end()


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
        >>> connect(tfdist.discover(), start_timeout=300.0)  # doctest: +SKIP
        ['/job:worker/replica:0/task:0/device:CPU:0', '/job:worker/replica:0/task:1/device:CPU:0']
    """
    global _connected
    if cluster.num_workers == 1:
        return [_device(tf.config.list_logical_devices(), "/job:localhost/replica:0/task:0")]
    tasks = cluster.compute_tasks

    def tell(name: str, index: int) -> None:
        rank = tasks.index((name, index))
        say(gone(_name(cluster, (name, index)), role(rank) if role else "", log_of(name, index)))

    _check_joined(cluster, other_use=_awaited is not None)
    if _connected is None:
        _await(cluster, tasks, start_timeout, tell)
        tf.config.experimental_connect_to_cluster(
            _spec(cluster, tasks), job_name=cluster.task_type, task_index=cluster.task_index, protocol="grpc"
        )
        devices = tf.config.list_logical_devices()
        _connected = cluster, [_device(devices, f"/job:{name}/replica:0/task:{index}") for name, index in tasks]
    return list(_connected[1])


def await_servers(
    cluster: ClusterConfig,
    start_timeout: float,
    on_gone: Callable[[str, int], object],
    on_back: Callable[[str, int], object] | None = None,
) -> None:
    """Waits in the chief until all workers and parameter servers serve, and watches them from then on.

    Connecting TensorFlow is left to the caller. A second call, for the same cluster, does nothing: its callbacks are
    never called.

    Args:
        cluster: the cluster; this process is its chief.
        start_timeout: how long to wait until all processes are there, in seconds.
        on_gone: is called with job and index, in a thread of its own, when the process of a task is gone.
        on_back: the same when another process serves in its place, which is watched as well.

    Raises:
        ClusterError: if the cluster description is wrong, a process does not come, or this process belongs to another
            cluster already.

    Example (on the chief):
        >>> await_servers(tfdist.discover(), 300.0, on_gone=lambda *task: print(*task, "is gone"))  # doctest: +SKIP
    """
    global _awaited
    _check_joined(cluster, other_use=_connected is not None)
    if _awaited is None:
        _await(cluster, members(cluster, servers=True), start_timeout, on_gone, on_back)
        _awaited = cluster


def _check_joined(cluster: ClusterConfig, other_use: bool) -> None:
    joined = job.joined()
    before = joined or (_connected[0] if _connected else _awaited)
    if before is not None and (joined or other_use or before != cluster):
        raise ClusterError(
            f"Received: {cluster}. Expected: {before}, which this process has joined already. TensorFlow's "
            "server cannot be restarted: use one cluster and one kind of strategy in a process, or start another one."
        )


def _await(
    cluster: ClusterConfig,
    tasks: tuple[Task, ...],
    start_timeout: float,
    on_gone: Callable[[str, int], object],
    on_back: Callable[[str, int], object] | None = None,
) -> None:
    deadline = time.monotonic() + start_timeout
    preflight.require(cluster)
    _meet(cluster, start_timeout, servers=tasks != cluster.compute_tasks)
    watches = {task: ServerWatch(cluster.jobs[task[0]][task[1]]) for task in tasks[1:]}
    # TensorFlow would wait for ever, in silence, for a server that does not come.
    if late := [task for task, watch in watches.items() if not _reach(watch, _name(cluster, task), deadline)]:
        raise BarrierTimeoutError(
            f"no TensorFlow server within start_timeout={start_timeout:g} s: "
            f"{', '.join(_name(cluster, task) for task in late)}; look into their output for why not"
        )
    for task, watch in watches.items():
        name = "tfdist-watch-{}-{}".format(*task)
        threading.Thread(target=_follow, args=(watch, task, on_gone, on_back), name=name, daemon=True).start()


def _follow(
    watch: ServerWatch,
    task: Task,
    on_gone: Callable[[str, int], object],
    on_back: Callable[[str, int], object] | None,
) -> None:
    """Watches the processes that serve as a task, one after the other."""
    while True:
        watch.wait()
        on_gone(*task)
        watch.reach(math.inf)
        if on_back is not None:
            on_back(*task)


def gone(name: str, role: str, log: str) -> str:
    """What is said when a server's process is gone.

    Example:
        >>> gone("worker 1 (b:1)", "stage 1", "")[:45]
        'worker 1 (b:1), which holds stage 1, is gone;'
    """
    return (
        f"{name}{f', which holds {role},' if role else ''} is gone; {log or 'its output'} may tell why. With "
        "tfdist.callbacks.BackupAndRestore a run goes on from its last backup when it is started again, which "
        "`tfdist run` does by itself (--max-restarts)"
    )


def _meet(cluster: ClusterConfig, timeout: float, servers: bool, rejoin: bool = False) -> None:
    info = {"same.tensorflow": tf.__version__, "same.keras": keras.__version__}
    meet(cluster, timeout, info, servers=servers, rejoin=rejoin)
    keep_freed_pages()


def _reach(watch: ServerWatch, name: str, deadline: float) -> bool:
    if watch.reach(min(_LONG_WAIT, deadline - time.monotonic())):
        return True
    say(f"waiting for the TensorFlow server of {name}")
    return watch.reach(deadline - time.monotonic())


def _config(cluster: ClusterConfig, own: str) -> config_pb2.ConfigProto | None:
    if "ps" not in cluster.jobs:
        return None
    configured = tf.config.threading.get_inter_op_parallelism_threads()
    given = configured or whole_number(os.environ.get("TF_NUM_INTEROP_THREADS", "")) or 0
    if 0 < given < _LEAST_THREADS:
        say(
            f"{own} uses {_LEAST_THREADS} inter-op threads instead of {given}, with which steps beside parameter "
            "servers can wait for each other for ever"
        )
    steps = len(cluster.jobs["worker"]) if cluster.task_type == "ps" else 1
    threads = max(given or len(os.sched_getaffinity(0)), _LEAST_THREADS - 1 + steps)
    return config_pb2.ConfigProto(inter_op_parallelism_threads=threads)


def _spec(cluster: ClusterConfig, tasks: tuple[Task, ...]) -> tf.train.ClusterSpec:
    return tf.train.ClusterSpec({name: dict(cluster.jobs[name]) for name, _ in tasks})


def _name(cluster: ClusterConfig, task: Task) -> str:
    return named(cluster, [task])[0]


def log_of(name: str, index: int) -> str:
    folder = os.environ.get("TFDIST_LOG_DIR")
    return os.path.join(folder, f"{name}-{index}.log") if folder else ""


def _device(devices: list[tf.config.LogicalDevice], task: str) -> str:
    gpu = f"{task}/device:GPU:0"
    return gpu if any(device.name == gpu for device in devices) else f"{task}/device:CPU:0"


class ServerWatch:
    """Holds a connection to a TensorFlow server. The kernel closes it when the process ends, however it ends.

    gRPC hangs up on a connection that says nothing (after a minute); then another one is made, which only works as long
    as the process is there. A stopped process (SIGSTOP) still exists.

    Args:
        place: `host:port` of the server.

    Example:
        >>> watch = ServerWatch("127.0.0.1:3000")  # doctest: +SKIP
        >>> if watch.reach(within=60.0):  # doctest: +SKIP
        ...     watch.wait()  # returns once the process is gone
    """

    def __init__(self, place: str) -> None:
        self._place = sockets.split_address(place)
        self._connection: socket.socket | None = None

    def reach(self, within: float, was_there: bool = False) -> bool:
        """Waits until the server listens; returns whether it does.

        Args:
            within: for how many seconds to try.
            was_there: whether it has listened: nobody is there any more if the host says so.
        """

        def attempt(seconds: float) -> socket.socket | None:
            try:
                return self._connect()
            except ConnectionRefusedError:
                if was_there:
                    return None
                raise

        with contextlib.suppress(UnreachedError):
            self._connection = keep_trying({"": attempt}, time.monotonic() + within, {})
        return self._connection is not None

    def wait(self) -> None:
        """Returns when the process that was reached is gone."""
        while self._connection is not None:
            was_a_server = self._listen(self._connection)
            sockets.close_without_trace(self._connection)
            self._connection = None
            if was_a_server:
                self.reach(_UNREACHABLE_SECONDS, was_there=True)

    def _listen(self, connection: socket.socket) -> bool:
        """Reads until the connection ends; returns whether a TensorFlow server was at its other end."""
        first = True
        with contextlib.suppress(OSError):
            while data := connection.recv(4096):
                if first and not is_a_servers(data):
                    return False  # the next job's chief, at the same address
                first = False
        return True

    def _connect(self) -> socket.socket:
        connection = sockets.connect(self._place, _CONNECT_SECONDS)
        sockets.notice_end(connection, probes=3)
        connection.settimeout(None)
        return connection


# For what the program has registered to be done at its exit: a server must not outlive its job because of it.
_EXIT_SECONDS = 1.5


def ignore_signals(reason: str) -> None:
    """Answers signals that ask for an end with a line on standard error only.

    Args:
        reason: why, for that line.

    Example:
        >>> ignore_signals("worker 1 serves until worker 0 has ended")  # doctest: +SKIP
    """
    if threading.current_thread() is not threading.main_thread():
        return  # Python lets no other thread change that

    def refuse(number: int, frame: FrameType | None) -> None:
        say(f"{signal.Signals(number).name} received: {reason}")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # Schedulers announce a preemption by the latter ones; what the program does with them is its own affair.
        if number in (signal.SIGTERM, signal.SIGINT) or signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, refuse)


def heed_signals() -> None:
    """Obeys the signals that ask for an end again.

    Example:
        >>> heed_signals()  # doctest: +SKIP
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end(code: int = 0) -> NoReturn:
    """Ends the process as if the program had come to its end; the threads of TensorFlow's server do not count.

    Args:
        code: its exit code.

    Example:
        >>> end()  # doctest: +SKIP
    """
    guard = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
    guard.daemon = True
    guard.start()
    atexit._run_exitfuncs()  # ends processes of multiprocessing, too
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
