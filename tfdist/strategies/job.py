"""The multi-worker job that this process belongs to: joined once, shared by all strategies of the process."""

from __future__ import annotations

import dataclasses
import random

import keras
import tensorflow as tf
from tensorflow.python.eager import context

from tfdist.cluster import preflight
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.roll_call import meet
from tfdist.strategies.chief_files import ChiefFiles
from tfdist.strategies.heap import keep_freed_pages
from tfdist.strategies.peers import Peers


@dataclasses.dataclass
class Job:
    """A multi-worker job, after all its processes have met.

    Attributes:
        cluster: the cluster and this process' place in it.
        peers: for messages to the other processes, once TensorFlow's servers run.
        files: who writes which file.
        seed: the chief's global seed; every process uses it.
        seed_is_given: whether the chief's program has set it; otherwise each job has another one.
        warned_without_scope: whether the program was told that a model does not belong to a strategy.
    """

    cluster: ClusterConfig
    peers: Peers
    files: ChiefFiles
    seed: int
    seed_is_given: bool
    warned_without_scope: bool = False


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
        seed, seed_is_given = _meet(cluster, start_timeout)
        keep_freed_pages()
        names = [f"{job} {index} ({cluster.jobs[job][index]})" for job, index in cluster.compute_tasks]
        peers = Peers(names, cluster.rank, peer_timeout)
        _joined = Job(cluster, peers, ChiefFiles(peers), seed, seed_is_given)
    elif _joined.cluster != cluster:
        raise ClusterError(
            f"Received: {cluster}. Expected: {_joined.cluster}, which this process has joined already. TensorFlow's "
            "server cannot be restarted: use one cluster in a process, or start another process."
        )
    _joined.peers.timeout = peer_timeout
    return _joined


def joined() -> Job | None:
    """The job that this process has joined, if it has."""
    return _joined


def _meet(cluster: ClusterConfig, timeout: float) -> tuple[int, bool]:
    seed = context.global_seed()
    information = {
        "same.tensorflow": tf.__version__,
        "same.keras": keras.__version__,
        "seed": random.SystemRandom().randrange(2**31) if seed is None else seed,
        "seed is given": seed is not None,
    }
    chief = meet(cluster, timeout=timeout, info=information)[0]
    return chief["seed"], chief["seed is given"]
