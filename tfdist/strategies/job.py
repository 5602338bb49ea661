"""The multi-worker job that this process belongs to: joined once, shared by all strategies of the process."""

from __future__ import annotations

import atexit
import dataclasses
import random

import keras
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import config

from tfdist.cluster import preflight
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.devices import own_share
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.roll_call import meet
from tfdist.cluster.roll_call_message import named
from tfdist.strategies.chief_files import ChiefFiles
from tfdist.strategies.coordination_store import CoordinationStore
from tfdist.strategies.heap import keep_freed_pages
from tfdist.strategies.lost_peers import name_lost_peers
from tfdist.strategies.peers import Peers


@dataclasses.dataclass
class Job:
    """A multi-worker job, after all its processes have met.

    Attributes:
        cluster: the cluster and this process' place in it; `None` if not tfdist, but Horovod or MPI, keeps it.
        peers: for messages to the other processes, once TensorFlow's servers run.
        files: who writes which file.
        seed: the chief's global seed; every process uses it.
        seed_is_given: whether the chief's program has set it; otherwise each job has another one.
        warned_without_scope: whether the program was told that a model does not belong to a strategy.
    """

    cluster: ClusterConfig | None
    peers: Peers
    files: ChiefFiles
    seed: int
    seed_is_given: bool
    warned_without_scope: bool = False

    def leave(self) -> None:
        """Ends this process' part, at the end of the program."""
        self.peers.leave()

    def __str__(self) -> str:
        return str(self.cluster) if self.cluster else f"a job of {', '.join(self.peers.names)}"


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
        chief = meet(cluster, timeout=start_timeout, info={**introduction(), **_own_devices()})[0]
        keep_freed_pages()
        peers = Peers(named(cluster, cluster.compute_tasks), cluster.rank, peer_timeout, CoordinationStore())
        _joined = Job(cluster, peers, ChiefFiles(peers), chief["seed"], chief["seed is given"])
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
    gpus = tf.config.list_physical_devices("GPU")
    if cluster.local_size in (None, 1) or tf.config.get_visible_devices("GPU") != gpus:
        return  # the program has chosen
    tf.config.set_visible_devices(own_share(gpus, cluster.local_rank, cluster.local_size), "GPU")


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
    return {f"same.number of {kind} devices to train on": sum(len(part) if part else 1 for part in parts)}


def introduction() -> dict:
    """What a process tells the others when they meet; what `same.` begins with has to be the same for all."""
    seed = context.global_seed()
    return {
        "same.tensorflow": tf.__version__,
        "same.keras": keras.__version__,
        "same.use of deterministic operations": config.is_op_determinism_enabled(),
        "seed": random.SystemRandom().randrange(2**31) if seed is None else seed,
        "seed is given": seed is not None,
    }
