"""The processes that Horovod connects, and how this one finds them.

horovodrun         has told Horovod already who is where, and so has mpirun, if Horovod was built with MPI
a tfdist cluster   the processes meet at the chief, which then keeps the addresses of Horovod's connections for them
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster import preflight
from tfdist.cluster.barrier import meet
from tfdist.cluster.barrier.messages import named
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import find
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.key_value import KeyValueClient, KeyValueServer, ProcessGoneError
from tfdist.runtime.chief_io import ChiefIO
from tfdist.runtime.elastic import is_elastic
from tfdist.runtime.job import Job, enter, has_failed, introduction, joined
from tfdist.runtime.peers import Peers
from tfdist.strategies.horovod import environment, installation
from tfdist.strategies.horovod.collectives import Collectives
from tfdist.strategies.horovod.topology import groups_of, process_set_of

_log = logging.getLogger("tfdist")
_POLL_SECONDS = 10.0
# How long rank 0 keeps the messages for those that have yet to read the last ones.
_LAST_WORDS_SECONDS = 10.0


class _GroupStore:
    """The part of a job's store for one group of ranks, which are numbered from 0 within it."""

    def __init__(self, store: KeyValueServer | KeyValueClient, group: Sequence[int]):
        self._store, self._group = store, group
        self._prefix = f"group of {group[0]}/"

    def set(self, name: str, text: str) -> None:
        """See `Store` in peers.py."""
        self._store.set(self._prefix + name, text)

    def decide(self, name: str, text: str) -> str:
        """See `Store` in peers.py."""
        return self._store.decide(self._prefix + name, text)

    def delete(self, name: str) -> None:
        """See `Store` in peers.py."""
        self._store.delete(self._prefix + name)

    def get(self, name: str, seconds: float, of: int | None = None) -> str | None:
        """See `Store` in peers.py."""
        return self._store.get(self._prefix + name, seconds, None if of is None else self._group[of])


@dataclasses.dataclass
class HorovodJob(Job):
    """A job whose processes Horovod connects.

    Attributes:
        horovod: the module `horovod.tensorflow`.
        collectives: what it carries for the processes that train with this one.
        group: the ranks of those; `None` for all.
        device: this process' device.
        store: where all processes leave messages for each other.
        failed: whether the last fit has ended by an exception.
    """

    horovod: Any = None
    collectives: Collectives | None = None
    group: tuple[int, ...] | None = None
    device: str = "CPU:0"
    store: KeyValueServer | KeyValueClient | None = None
    failed: bool = False

    def leave(self) -> None:
        """Waits until all processes have come to their end, and closes the connections.

        Horovod's connections end for all processes at once, so one that left earlier would break the others. After an
        error it does not wait: the others may be waiting for this process, and have to fail.
        """
        if not self.horovod.is_initialized():
            return
        with contextlib.suppress(Exception):
            if not self.failed and not has_failed():
                self._wait_for_the_others()
        with contextlib.suppress(Exception):
            self.horovod.shutdown()
        with contextlib.suppress(Exception):
            if isinstance(self.store, KeyValueServer):
                self.store.wait_until_left(_LAST_WORDS_SECONDS if not self.failed else 0.0)
            self.store.close()

    def _wait_for_the_others(self) -> None:
        own = self.horovod.rank()
        self.store.set(f"end/{own}", "reached")
        deadline = time.monotonic() + self.peers.timeout
        for rank in range(self.horovod.size()):
            with contextlib.suppress(ProcessGoneError):
                while rank != own and self.store.get(f"end/{rank}", _POLL_SECONDS, rank) is None:
                    if time.monotonic() > deadline:
                        return
                    _log.info("rank %d has come to its end, and waits for rank %d", own, rank)


def join(
    cluster: ClusterConfig, ranks: Sequence[int] | None, start_timeout: float, peer_timeout: float
) -> HorovodJob | None:
    """Connects the processes; `None` if there is only this one.

    Args:
        cluster: the cluster, if tfdist knows it; otherwise a single process.
        ranks: those that train together with this one; `None` for all.
        start_timeout: how long to wait until all are there, in seconds; horovodrun and mpirun have limits of their own.
        peer_timeout: how long to wait for another process that has not yet come to the same call, in seconds.

    Raises:
        ClusterError: if a process does not come, Horovod cannot connect them, or they do not fit together.
        ImportError: if Horovod is not installed, or was built for another TensorFlow.
    """
    launcher = environment.launcher(os.environ) if cluster.is_single_process else None
    group = None if ranks is None else tuple(sorted(int(rank) for rank in ranks))
    if launcher is None and cluster.num_workers == 1:
        groups_of([group])
        return None
    before = joined()
    if before is not None:
        return _again(before, cluster, group, peer_timeout)
    horovod = installation.load()
    if not is_elastic(os.environ):
        # There are no groups in an elastic job; and while they may be formed, a step that begins at the moment at which
        # another process dies can slip through: it neither fails nor ends.
        environment.allow_groups()
    if launcher is None:
        _meet(cluster, start_timeout)
    size = environment.size(os.environ) if launcher else cluster.num_workers
    _initialize(horovod, None if is_elastic(os.environ) else size, launcher or "tfdist")
    # Before anything makes TensorFlow take memory on all of them.
    device = own_device(horovod.local_rank())
    job = _form(horovod, None if launcher else cluster, group, device, peer_timeout)
    enter(job)
    _leave_first(job)
    return job


def is_connected_by_launcher(env: Mapping[str, str]) -> bool:
    """Whether horovodrun, or mpirun and a Horovod with MPI, connects the processes without tfdist.

    Raises:
        ImportError: if mpirun has started this process, and Horovod is not installed, or was built for another
            TensorFlow.
    """
    if isinstance(find(env), ClusterConfig):
        return False
    launcher = environment.launcher(env)
    return launcher == "horovodrun" or (launcher is not None and installation.load().mpi_built())


def own_device(local_rank: int) -> str:
    """The device of a process: of the GPUs that it sees, the one with its local rank; without GPUs, its CPU.

    To be called before TensorFlow is initialized: TensorFlow then takes memory on this GPU only.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "CPU:0"
    own = local_rank % len(gpus)
    try:
        tf.config.set_visible_devices(gpus[own], "GPU")
    except RuntimeError:  # the program has used TensorFlow already
        return f"GPU:{own}"
    return "GPU:0"


def rejoin(job: HorovodJob) -> None:
    """Connects the processes of an elastic job anew: those that are left, and those that have come.

    Waits until Horovod's driver has enough of them.
    """
    with contextlib.suppress(Exception):
        job.store.close()
    job.horovod.shutdown()
    _initialize(job.horovod, None, "Horovod's elastic driver")
    formed = _form(job.horovod, None, None, job.device, job.peers.timeout)
    vars(job).update(vars(formed))
    _leave_first(job)


def _leave_first(job: HorovodJob) -> None:
    """Registers `job.leave` anew, so that it runs before Horovod's own exit handler, which each `init` registers."""
    atexit.unregister(job.leave)
    atexit.register(job.leave)


def _form(
    horovod: Any,
    cluster: ClusterConfig | None,
    group: tuple[int, ...] | None,
    device: str,
    peer_timeout: float,
) -> HorovodJob:
    """The job of the processes that Horovod has connected; all of them come here at the same time."""
    rank = horovod.rank()
    token = secrets.token_bytes(32)
    server = KeyValueServer(token, horovod.size()) if rank == 0 else None
    own = {**introduction(), "group": group, "host": socket.gethostname(), "name": environment.host(os.environ)}
    everyone = horovod.allgather_object({**own, "port": server and server.port, "token": token if server else None})
    _check_same(everyone)
    groups = groups_of([one["group"] for one in everyone])
    first = everyone[0]
    local = len({one["host"] for one in everyone}) == 1
    place = "localhost" if local else first["name"], first["port"]
    store = server or KeyValueClient(place, first["token"], rank)
    process_set = process_set_of(horovod, groups)
    members = process_set.ranks or range(horovod.size())
    if cluster is not None:
        names = named(cluster, cluster.compute_tasks)
    else:
        names = [f"rank {rank} ({one['host']})" for rank, one in enumerate(everyone)]
    shared = _GroupStore(store, members)
    peers = Peers([names[member] for member in members], process_set.rank(), peer_timeout, shared)
    return HorovodJob(
        cluster,
        peers,
        ChiefIO(peers),
        everyone[members[0]]["seed"],
        everyone[members[0]]["seed is given"],
        horovod=horovod,
        collectives=Collectives(horovod, process_set),
        group=group,
        device=device,
        store=store,
    )


def _again(before: Job, cluster: ClusterConfig, group: tuple[int, ...] | None, peer_timeout: float) -> HorovodJob:
    """The job of a former strategy of this process."""
    if not isinstance(before, HorovodJob) or (before.cluster is not None and before.cluster != cluster):
        raise ClusterError(
            f"Received: HorovodStrategy in {cluster}. Expected: {before}, which this process has joined already. Use "
            "one kind of strategy and one cluster in a process, or start another process."
        )
    if group is not None and group != before.group:
        raise ClusterError(
            f"Received: process_set={list(group)}. Expected: {before.group and list(before.group)}, as in this "
            "process' first HorovodStrategy, or None for the same. Start another process for another group."
        )
    before.peers.timeout = peer_timeout
    return before


def _meet(cluster: ClusterConfig, start_timeout: float) -> None:
    """Meets the other processes and tells Horovod where they are."""
    preflight.require(cluster)
    port = environment.start_rendezvous(cluster) if cluster.is_chief else None
    everyone = meet(cluster, timeout=start_timeout, info={**introduction(), "port": port})
    environment.describe(cluster, everyone[0]["port"])


def _initialize(horovod: Any, size: int | None, launcher: str) -> None:
    """Lets Horovod connect the processes, of which there should be `size`, if that is known."""
    if not horovod.is_initialized():
        try:
            horovod.init()
        except Exception as error:
            raise ClusterError(
                f"Horovod could not connect the processes: {error}. Expected: every process can reach the others on "
                "the network interface HOROVOD_GLOO_IFACE; the lines above tell what was tried"
            ) from None
        if size is not None and horovod.size() != size:
            raise ClusterError(
                f"Received: {size} processes, started by {launcher}, of which Horovod connects {horovod.size()}: each "
                "would train by itself. Expected: one job of all. Leave HOROVOD_CONTROLLER and HOROVOD_CPU_OPERATIONS "
                "unset, or start it by `tfdist run --transport horovod` or `horovodrun --gloo`"
            )
    elif size is not None and horovod.size() != size:
        raise ClusterError(
            f"Received: {size} processes, started by {launcher}, and hvd.init() before tfdist.HorovodStrategy(), which "
            f"has connected {horovod.size()}: each would train by itself. Expected: no hvd.init(), which the strategy "
            "calls"
        )


def _check_same(everyone: list[dict]) -> None:
    for key in (key for key in everyone[0] if key.startswith("same.")):
        values = [one[key] for one in everyone]
        if len(set(values)) > 1:
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ClusterError(f"{key.removeprefix('same.')} differs: {listing}; make it the same on every rank")
