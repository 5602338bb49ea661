"""The multi-worker job that this process belongs to: joined once, shared by all strategies of the process.

Who of it is gone: TensorFlow is asked while one is waited for, and a line below a traceback says it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import os
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster import gpus, preflight, sockets
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import listed
from tfdist.cluster.meeting import meet, named, store_of
from tfdist.cluster.membership import own_share
from tfdist.cluster.variables import CHECK_WEIGHTS, RUN_ID, chosen_transport, text
from tfdist.compat.upstream import context
from tfdist.compat.upstream import framework_config as config
from tfdist.runtime.chief import ChiefIO
from tfdist.runtime.exchange import Exchange, ExchangeError, connect
from tfdist.runtime.peers import Peers

# Programs of one job end at about the same time. Who still asks for a file waits for it; what was told is read at once,
# but on a busy host.
_LAST_SECONDS, _LAST_READ_SECONDS = 60.0, 5.0


@dataclasses.dataclass
class Job:
    """A multi-worker job, after all its processes have met.

    Attributes:
        cluster: the cluster and this process' place in it; `None` if not tfdist, but Horovod or MPI, keeps it.
        peers: for messages to the other processes, once TensorFlow's servers run.
        chief_io: who writes which file.
        seed: the chief's global seed; every process uses it.
        seed_is_given: whether the chief's program has set it; otherwise each job has another one.
        shares_gpus: whether two of its devices, of this process or others, are the same GPU.
        warned_without_scope: whether a warning has said that a model does not belong to a strategy.
    """

    cluster: ClusterConfig | None
    peers: Peers
    chief_io: ChiefIO
    seed: int
    seed_is_given: bool
    shares_gpus: bool = False
    warned_without_scope: bool = False
    _exchange: Exchange | None = None
    _no_exchange: str = ""
    _turn: Any = dataclasses.field(default_factory=threading.RLock)
    _running: str = ""

    @contextlib.contextmanager
    def alone(self, call: str) -> Iterator[None]:
        """A context for one thread at a time, which may be nested: others would exchange values in any order.

        Args:
            call: what the thread does.

        Raises:
            RuntimeError: in another thread.
        """
        call = f"{call} in thread '{threading.current_thread().name}'"
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(
                f"Received: {call}, while another one is running: {self._running}. Expected: one after the other, "
                "since all processes of a job exchange values in the same order, which threads do not keep. Make the "
                "calls in one thread, on every process the same; or train the models in one process, with "
                "tfdist.MirroredStrategy, or in a job for each."
            )
        before, self._running = self._running, call
        try:
            yield
        finally:
            self._running = before
            self._turn.release()

    def exchange(self, seconds: float) -> Exchange:
        """Sums over the processes that need no TensorFlow server; all processes ask for it at the same point.

        Args:
            seconds: how long connecting them may take.

        Raises:
            ExchangeError: if a process cannot be reached.
        """
        if self._no_exchange:
            raise ExchangeError(self._no_exchange)
        if self._exchange is None:
            host = sockets.split_address(self.cluster.address)[0]
            try:
                self._exchange = connect(self.peers, host, seconds, Sentinel(self.peers.rank).problem)
            except ExchangeError as error:
                self._no_exchange = str(error)
                raise
        return self._exchange

    def leave(self) -> None:
        """Ends this process' part, at the end of the program.

        The chief keeps the messages: it waits for those that have not yet read the last ones, or not yet heard of a
        file that it has saved.
        """
        self.peers.leave()
        if self.peers.rank == 0 and not has_failed():
            self.peers.wait_until_left(_LAST_SECONDS if self.chief_io.someone_may_ask else _LAST_READ_SECONDS)

    def __str__(self) -> str:
        return str(self.cluster) if self.cluster else f"a job of {', '.join(self.peers.names)}"


def has_failed() -> bool:
    """Whether an exception has ended the program."""
    return getattr(sys, "last_type", None) is not None


_joined: Job | None = None


def join(cluster: ClusterConfig, start_timeout: float, peer_timeout: float) -> Job:
    """Meets the other processes before TensorFlow would wait for them in silence.

    Args:
        cluster: a cluster of several workers.
        start_timeout: how long to wait until all are there, in seconds.
        peer_timeout: how long `Peers` waits, in seconds.

    Raises:
        ClusterError: if the cluster description is wrong, a process does not come, or this process belongs to another
            job already.
    """
    global _joined
    if _joined is None:
        preflight.require(cluster)
        use_own_gpus(cluster)
        everyone = meet(cluster, timeout=start_timeout, info={**introduction(), **_own_devices()})
        chief = everyone[0]
        keep_freed_pages()
        peers = Peers(named(cluster, cluster.compute_tasks), cluster.rank, peer_timeout, store_of(cluster))
        shares_gpus = gpus.are_shared([one["GPUs"] for one in everyone.values()])
        _joined = Job(cluster, peers, ChiefIO(peers), chief["seed"], chief["seed is given"], shares_gpus)
        atexit.register(_joined.leave)
        name_lost_peers(cluster)
    elif type(_joined) is not Job or _joined.cluster != cluster:
        raise ClusterError(
            f"Received: {cluster}. Expected: {_joined}, which this process has joined already. TensorFlow's "
            "server cannot be restarted: use one cluster in a process, or start another process."
        )
    _joined.peers.timeout = peer_timeout
    return _joined


def use_own_gpus(cluster: ClusterConfig) -> None:
    """Leaves the GPUs to the other processes of this host that are theirs, before TensorFlow takes memory on all."""
    seen = tf.config.list_physical_devices("GPU")
    if cluster.local_size in (None, 1) or tf.config.get_visible_devices("GPU") != seen:
        return  # the program has chosen
    tf.config.set_visible_devices(own_share(seen, cluster.local_rank, cluster.local_size), "GPU")


def enter(job: Job) -> None:
    """Notes the job that this process has joined by other means than TensorFlow's."""
    global _joined
    _joined = job


def joined() -> Job | None:
    """The job that this process has joined, if it has."""
    return _joined


def _own_devices() -> dict:
    """What this process trains on: collectives of processes with other numbers of devices would wait for ever."""
    kind = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
    parts = [tf.config.get_logical_device_configuration(d) for d in tf.config.get_visible_devices(kind)]
    number = sum(len(part) if part else 1 for part in parts)
    return {f"same.number of {kind} devices to train on": number, "GPUs": own_gpus()}


def own_gpus() -> list[str]:
    """The unique name of the GPU of each logical GPU that this process sees."""
    visible = tf.config.get_visible_devices("GPU")
    names = dict(enumerate(gpus.unique_names(os.environ) if visible else ()))
    found = []
    for device in visible:
        number = int(device.name.rpartition(":")[2])
        # Without nvidia-smi, no other process is taken to have it.
        name = names.get(number) or f"{socket.gethostname()} {os.getpid()} {number}"
        found += [name] * len(tf.config.get_logical_device_configuration(device) or [None])
    return found


def introduction() -> dict:
    """What a process tells the others when they meet; what `same.` begins with has to be the same for all."""
    seed = context.global_seed()
    return {
        "same.tensorflow": tf.__version__,
        "same.keras": keras.__version__,
        f"same.{CHECK_WEIGHTS}": text(os.environ, CHECK_WEIGHTS),
        "same.transport": chosen_transport(os.environ),
        "same.use of deterministic operations": config.is_op_determinism_enabled(),
        "seed": random.SystemRandom().randrange(2**31) if seed is None else seed,
        "seed is given": seed is not None,
    }


# Keeps glibc from giving the buffers of an all-reduce back to the system after every step.
#
# The flat vector of all gradients is the largest block of a step. glibc returns freed memory at the top of its heaps at
# once, and the next step faults every page in again: 10 ms of an 18 ms all-reduce of 7.5 MB on two CPU processes.

# <malloc.h>: how many bytes to keep at the top of a heap when memory is released.
_M_TOP_PAD = -2
_KEPT_BYTES = 64 * 2**20


def keep_freed_pages() -> None:
    """Asks glibc to keep up to 64 MiB of freed memory.

    Does nothing where the user has decided (`MALLOC_TOP_PAD_`, which `tfdist run` sets), or without glibc.
    """
    if "MALLOC_TOP_PAD_" not in os.environ:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_M_TOP_PAD, _KEPT_BYTES)


GONE, SILENT, THERE = "gone", "silent", "there"

_ERRORS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)
_ABOUT_PEERS = ("ollective", "remote target", "recvmsg", "Socket closed", "failed to connect", "oordination")
_CONNECT_SECONDS = 2.0
# The system closes the connections of a process that dies one after the other.
_DYING_SECONDS, _PAUSE = 2.0, 0.2
# The other survivors ask, too: who ends before they have is gone for them.
_HOLD_SECONDS = 2.0
_SHOWN = 8
# Beyond those of all strategies.
_FIRST_GROUP_KEY = 500_000_000
# What TensorFlow says of every error.
_ADDED = re.compile(r"\{\{.*?\}\} |\[Op:.*?\]|The error could be from a previous operation\..*$", re.MULTILINE)
_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


def name_lost_peers(cluster: ClusterConfig) -> None:
    """From now on a program that ends by an exception about peers says which of them are gone, below the traceback.

    Nothing is done before that, and nothing at all under `tfdist run`.

    Args:
        cluster: the cluster of this process.

    Example:
        >>> name_lost_peers(tfdist.discover())  # doctest: +SKIP
    """
    if RUN_ID not in os.environ:  # set by `tfdist run`, which names the process that failed itself
        sys.excepthook = functools.partial(_show, cluster, sys.excepthook)


def is_about_peers(error: BaseException | None) -> bool:
    """Whether an exception, or one that has led to it, may come from the loss of another process.

    Example:
        >>> is_about_peers(tf.errors.AbortedError(None, None, "Collective ops is aborted by: ..."))
        True
        >>> is_about_peers(ValueError("Collective"))
        False
    """
    for _ in range(_SHOWN):
        if error is None:
            return False
        if isinstance(error, _ERRORS) and any(word in str(error) for word in _ABOUT_PEERS):
            return True
        error = error.__cause__ or error.__context__
    return False


def state_of(place: str, within: float) -> str:
    """Whether a process listens at an address.

    Args:
        place: `host:port`.
        within: for how many seconds to wait for an answer.

    Returns:
        `GONE` if the host says that nobody does, `SILENT` if it says nothing, `THERE` if a process does, be it one that
        hangs.

    Example:
        >>> state_of("127.0.0.1:1", within=1.0)
        'gone'
    """
    try:
        connection = sockets.connect(sockets.split_address(place), within)
    except (ConnectionRefusedError, ConnectionResetError):
        return GONE
    except OSError:
        return SILENT
    sockets.close_without_trace(connection)
    return THERE


def lost(states: Mapping[str, str]) -> str:
    """What is said about those that are not there; empty if all are.

    Args:
        states: `GONE`, `SILENT` or `THERE` by name.

    Example:
        >>> lost({"worker 1 (b:1)": GONE, "worker 2 (c:1)": THERE})[:32]
        'worker 1 (b:1) is gone; what it '
    """
    gone, silent = ([name for name, state in states.items() if state == wanted] for wanted in (GONE, SILENT))
    parts = [f"{listed(gone, shown=_SHOWN)} {'is' if len(gone) == 1 else 'are'} gone"] if gone else []
    if silent:
        do = "does" if len(silent) == 1 else "do"
        parts.append(f"{listed(silent, shown=_SHOWN)} {do} not answer: a host that is down, hangs or is cut off")
    if not parts:
        return ""
    # Some processes notice a loss only when another one, which has noticed it, ends.
    several = len(gone) + len(silent) > 1
    theirs = "the first of them to end is the cause; what they have printed" if several else "what it has printed"
    return (
        f"{', and '.join(parts)}; {theirs}, and the log of the system that has started the job, may tell why "
        "(killed for memory, a time limit, a preemption). Start the job again, all of its tasks: with "
        "tfdist.callbacks.BackupAndRestore it goes on from its last backup"
    )


def _show(
    cluster: ClusterConfig, before: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """In place of `sys.excepthook`."""
    text = _ask(cluster) if is_about_peers(error) else ""
    before(kind, error, trace)
    if text:
        sys.stderr.flush()
        say(text)
        time.sleep(_HOLD_SECONDS)


def _ask(cluster: ClusterConfig) -> str:
    others = [task for task in cluster.compute_tasks if task != (cluster.task_type, cluster.task_index)]
    places = [cluster.jobs[job][index] for job, index in others]
    deadline = time.monotonic() + _DYING_SECONDS
    with ThreadPoolExecutor(max_workers=64) as pool:
        while True:
            found = pool.map(functools.partial(state_of, within=_CONNECT_SECONDS), places)
            text = lost(dict(zip(named(cluster, others), found, strict=True)))
            if text or time.monotonic() > deadline:
                return text
            time.sleep(_PAUSE)


class Sentinel:
    """Asks TensorFlow whether it knows of a lost process, at once and without a message to any other one.

    TensorFlow's coordination service hears from each process every few seconds, also from one that waits, and not from
    one that is stopped or cut off. Then it lets all collectives fail, and that is how it is asked: by one of a single
    member, which needs nobody else. (Its own calls would wait for a first process that is stopped, and hold Python's
    lock.)

    Args:
        rank: of this process. The service must run; the first process is asked for once.
    """

    def __init__(self, rank: int) -> None:
        self._key = _FIRST_GROUP_KEY + rank
        self._ask()

    def problem(self) -> str:
        """What TensorFlow says of lost processes; empty if nothing."""
        try:
            self._ask()
        except tf.errors.OpError as error:
            return " ".join(_ADDED.sub("", error.message).split())
        return ""

    def _ask(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            tf.raw_ops.CollectiveReduceV2(
                input=[0.0],
                group_size=1,
                group_key=self._key,
                instance_key=1,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
            )


def say(text: str) -> None:
    """Writes a line to standard error, past Python's own buffers; nothing happens when nobody reads it.

    Example:
        >>> say("worker 1 serves worker 0")
    """
    with contextlib.suppress(OSError):
        os.write(2, f"tfdist: {text}\n".encode())
