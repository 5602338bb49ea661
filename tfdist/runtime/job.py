"""The multi-worker job that this process belongs to: joined once, shared by all strategies of the process."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import os
import random
import socket
import sys

import keras
import tensorflow as tf

from tfdist.cluster import gpus, preflight, sockets
from tfdist.cluster.barrier import meet
from tfdist.cluster.barrier.messages import named
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import own_share
from tfdist.cluster.variables import chosen_transport
from tfdist.compat.upstream import context
from tfdist.compat.upstream import framework_config as config
from tfdist.runtime.chief_io import ChiefIO
from tfdist.runtime.coordination_store import CoordinationStore
from tfdist.runtime.direct.exchange import Exchange
from tfdist.runtime.direct.links import ExchangeError
from tfdist.runtime.direct.mesh import connect
from tfdist.runtime.direct.sentinel import Sentinel
from tfdist.runtime.lost_peers import GONE, name_lost_peers, state_of
from tfdist.runtime.peers import Peers

# Programs of one job end at about the same time.
_LAST_SECONDS = 60.0
# How long a host may take to say that nobody listens at an address of it.
_ANSWER_SECONDS = 2.0


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
        warned_without_scope: whether the program was told that a model does not belong to a strategy.
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
            place = self.cluster.jobs[self.cluster.task_type][self.cluster.task_index]
            host = sockets.split_address(place)[0]
            try:
                self._exchange = connect(self.peers, host, seconds, Sentinel(self.peers.rank).problem)
            except ExchangeError as error:
                self._no_exchange = str(error)
                raise
        return self._exchange

    def leave(self) -> None:
        """Ends this process' part, at the end of the program.

        The chief keeps the messages: it waits for those that have not yet heard of a file that it has saved.
        """
        self.peers.leave()
        if self.chief_io.someone_may_ask and not has_failed():
            self.peers.wait_until_left(_LAST_SECONDS)

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
        tasks = cluster.compute_tasks
        places = [cluster.jobs[job][index] for job, index in tasks]
        peers = Peers(
            named(cluster, tasks),
            cluster.rank,
            peer_timeout,
            CoordinationStore(),
            is_gone=lambda rank: state_of(places[rank], _ANSWER_SECONDS) == GONE,
        )
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


def keep_freed_pages() -> bool:
    """Asks glibc to keep up to 64 MiB of freed memory; returns whether it will.

    Does nothing where the user has decided (`MALLOC_TOP_PAD_`, which `tfdist run` sets), or without glibc.
    """
    if "MALLOC_TOP_PAD_" in os.environ:
        return True
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_TOP_PAD, _KEPT_BYTES))
