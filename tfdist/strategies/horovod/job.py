"""The processes that Horovod connects, and how this one finds them.

horovodrun         connects the processes, and so does mpirun, if Horovod was built with MPI
a tfdist cluster   the processes meet at the chief, which then keeps the addresses of Horovod's connections for them

Horovod's library reads these variables when it connects the processes, and again whenever it forms another group of
them, so they are set for this process as horovodrun would have set them for it.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster import preflight, server, sockets
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import find
from tfdist.cluster.environments import HOROVODRUN, SET_FOR_HOROVOD
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.meeting import disagreements, meet, named, store_of
from tfdist.cluster.server import Client, Server, Store
from tfdist.runtime.chief import ChiefIO
from tfdist.runtime.job import Job, enter, has_failed, introduction, joined
from tfdist.runtime.peers import Peers
from tfdist.strategies.horovod import installation
from tfdist.strategies.horovod.extended import Collectives

_CONNECT_SECONDS = 30.0
# How long rank 0 keeps the messages for those that have yet to read the last ones.
_LAST_WORDS_SECONDS = 10.0


@dataclasses.dataclass
class HorovodJob(Job):
    """A job whose processes Horovod connects.

    Attributes:
        horovod: the module `horovod.tensorflow`.
        collectives: what it carries.
        device: this process' device.
        store: where all processes leave messages for each other.
        failed: whether the last fit has ended by an exception.
    """

    horovod: Any = None
    collectives: Collectives | None = None
    device: str = "CPU:0"
    store: Store | None = None
    failed: bool = False

    def leave(self) -> None:
        """Waits until all processes have come to their end, and closes the connections.

        Horovod's connections end for all processes at once, so one that left earlier would break the others. After an
        error it does not wait: the others may be waiting for this process, and have to fail.
        """
        if not self.horovod.is_initialized():
            return
        if not self.failed and not has_failed():
            self.peers.leave()
            self.peers.wait_until_left(self.peers.timeout)
        with contextlib.suppress(Exception):
            self.horovod.shutdown()
        with contextlib.suppress(Exception):
            if isinstance(self.store, Server):
                self.store.wait_until_left(_LAST_WORDS_SECONDS if not self.failed else 0.0)
            self.store.leave()


def join(cluster: ClusterConfig, start_timeout: float, peer_timeout: float) -> HorovodJob | None:
    """Connects the processes; `None` if there is only this one.

    Args:
        cluster: the cluster, if tfdist knows it; otherwise a single process.
        start_timeout: how long to wait until all are there, in seconds; horovodrun and mpirun have limits of their own.
        peer_timeout: how long to wait for another process that has not yet come to the same call, in seconds.

    Raises:
        ClusterError: if a process does not come, Horovod cannot connect them, or they do not fit together.
        ImportError: if Horovod is not installed, or was built for another TensorFlow.
    """
    launcher = launcher_of(os.environ) if cluster.is_single_process else None
    if launcher is None and cluster.num_workers == 1:
        return None
    if (before := joined()) is not None:
        if not isinstance(before, HorovodJob) or (before.cluster is not None and before.cluster != cluster):
            raise ClusterError(
                f"Received: HorovodStrategy in {cluster}. Expected: {before}, which this process has joined already. "
                "Use one kind of strategy and one cluster in a process, or start another process."
            )
        before.peers.timeout = peer_timeout
        return before
    horovod = installation.load()
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise ClusterError(
            "Received: a process of Horovod's elastic driver (HOROVOD_ELASTIC=1). Expected: a fixed number of "
            "processes; `tfdist run -n MIN:MAX` starts fewer after a failure."
        )
    if launcher is None:
        _meet(cluster, start_timeout)
    _initialize(horovod, size_of(os.environ) if launcher else cluster.num_workers, launcher or "tfdist")
    # Before anything makes TensorFlow take memory on all of them.
    job = _form(horovod, None if launcher else cluster, own_device(horovod.local_rank()), peer_timeout)
    enter(job)
    # Registered once more, so that it runs before Horovod's own exit handler, which each `init` registers.
    atexit.unregister(job.leave)
    atexit.register(job.leave)
    return job


def is_connected_by_launcher(env: Mapping[str, str]) -> bool:
    """Whether horovodrun, or mpirun and a Horovod with MPI, connects the processes without tfdist.

    Raises:
        ImportError: if mpirun has started this process, and Horovod is not installed, or was built for another
            TensorFlow.
    """
    if isinstance(find(env), ClusterConfig):
        return False
    launcher = launcher_of(env)
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


def _form(horovod: Any, cluster: ClusterConfig | None, device: str, peer_timeout: float) -> HorovodJob:
    """The job of the processes that Horovod has connected; all of them come here at the same time."""
    rank = horovod.rank()
    own = {
        **introduction(),
        "host": socket.gethostname(),
        "name": os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname(),
    }
    own |= {"token": secrets.token_bytes(32), "port": None}
    hello, store = server.hello(rank, f"rank {rank}"), None
    if cluster is not None:
        store = store_of(cluster)
    elif rank == 0:
        store = Server(sockets.bind_everywhere(0, reuse=False), own["token"], horovod.size(), hello)
        own["port"] = store.port
    everyone = horovod.allgather_object(own)
    told = [{"task": f"rank {number}", "fingerprint": "", "info": one} for number, one in enumerate(everyone)]
    if problems := [problem for one in told for problem in disagreements(told[0], one)]:
        raise ClusterError(problems)
    first = everyone[0]
    if store is None:
        local = len({one["host"] for one in everyone}) == 1
        place = "localhost" if local else first["name"], first["port"]
        store = Client(place, first["token"], hello, _CONNECT_SECONDS)
    if cluster is not None:
        names = named(cluster, cluster.compute_tasks)
    else:
        names = [f"rank {rank} ({one['host']})" for rank, one in enumerate(everyone)]
    peers = Peers(names, rank, peer_timeout, store)
    return HorovodJob(
        cluster,
        peers,
        ChiefIO(peers),
        first["seed"],
        first["seed is given"],
        horovod=horovod,
        collectives=Collectives(horovod),
        device=device,
        store=store,
    )


def _meet(cluster: ClusterConfig, start_timeout: float) -> None:
    """Meets the other processes and tells Horovod where they are."""
    preflight.require(cluster)
    port = start_rendezvous(cluster) if cluster.is_chief else None
    everyone = meet(cluster, timeout=start_timeout, info={**introduction(), "port": port})
    describe(cluster, everyone[0]["port"])


def _initialize(horovod: Any, size: int, launcher: str) -> None:
    """Lets Horovod connect the processes, of which there should be `size`."""
    if not horovod.is_initialized():
        try:
            horovod.init()
        except Exception as error:
            raise ClusterError(
                f"Horovod could not connect the processes: {error}. Expected: every process can reach the others on "
                "the network interface HOROVOD_GLOO_IFACE; the lines above tell what was tried"
            ) from None
    if horovod.size() != size:
        raise ClusterError(
            f"Received: {size} processes, started by {launcher}, of which Horovod connects {horovod.size()}. Expected: "
            "one job of all, started by `tfdist run --transport horovod` or `horovodrun --gloo`, without "
            "HOROVOD_CONTROLLER and HOROVOD_CPU_OPERATIONS, and without hvd.init(), which the strategy calls"
        )


# By which a launcher's processes know how many they are.
_SIZES = {"horovodrun": "HOROVOD_SIZE", "mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}


def launcher_of(env: Mapping[str, str]) -> str | None:
    """The launcher that has set where the processes are: horovodrun, mpirun or mpiexec; else `None`.

    Example:
        >>> launcher_of({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}), launcher_of({})
        ('horovodrun', None)
    """
    if HOROVODRUN.detect(env):
        return "horovodrun"
    if env.get(_SIZES["horovodrun"]):
        return None  # set by `describe`
    # A single process under mpirun needs no Horovod.
    return next((name for name, variable in _SIZES.items() if (env.get(variable) or "1") != "1"), None)


def size_of(env: Mapping[str, str]) -> int:
    """How many processes the launcher has started.

    Example:
        >>> size_of({"OMPI_COMM_WORLD_SIZE": "4"}), size_of({})
        (4, 1)
    """
    return next((int(env[variable]) for variable in _SIZES.values() if env.get(variable)), 1)


def start_rendezvous(cluster: ClusterConfig) -> int:
    """Starts the server at which Horovod's connections find each other, in this process; returns its port."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    server.init([SlotInfo(**place._asdict()) for place in places(_hosts(cluster))])
    return port


def describe(cluster: ClusterConfig, port: int) -> None:
    """Sets what horovodrun would have set.

    Args:
        cluster: the cluster and this process' place in it.
        port: of the server at the chief.

    Raises:
        ClusterError: if the chief has no IPv4 address.
    """
    place = places(_hosts(cluster))[cluster.rank]
    chief = _hosts(cluster)[0]
    try:
        address = socket.gethostbyname(chief)
    except OSError as error:
        raise ClusterError(
            f"Received: {chief} as the host of the chief, which has no IPv4 address here ({error}). Expected: one that "
            "has; Horovod's connections begin over IPv4"
        ) from None
    variables = {f"HOROVOD_{name.upper()}": str(value) for name, value in place._asdict().items()}
    variables |= {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        SET_FOR_HOROVOD: str(port),
    }
    interface = interface_of(place.hostname)
    if interface is not None and "HOROVOD_GLOO_IFACE" not in os.environ:
        variables["HOROVOD_GLOO_IFACE"] = interface
    os.environ.update(variables)


def interface_of(host: str) -> str | None:
    """The network interface of this machine that has a host's address; `None` if none has.

    Example:
        >>> interface_of("127.0.0.1")
        'lo'
    """
    import psutil

    wanted = sockets.addresses_of(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] in wanted for address in addresses):
            return name
    return None


def _hosts(cluster: ClusterConfig) -> list[str]:
    """The host of each rank, without its port."""
    return [sockets.split_address(cluster.jobs[job][index])[0] for job, index in cluster.compute_tasks]


# One rank among all: its host, its number, its number among the ranks of its host, and among those with this local rank
# on all hosts; how many ranks there are, how many on its host, and how many hosts have this local rank.
Place = collections.namedtuple("Place", "hostname rank local_rank cross_rank size local_size cross_size")


def places(hosts: Sequence[str]) -> list[Place]:
    """The place of each rank.

    Args:
        hosts: the host of each rank, in any order.

    Example:
        >>> places(["a", "b", "a"])[2]
        Place(hostname='a', rank=2, local_rank=1, cross_rank=0, size=3, local_size=2, cross_size=1)
    """
    names = list(dict.fromkeys(hosts))
    sizes = {name: hosts.count(name) for name in names}
    local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    found = []
    for rank, (host, local_rank) in enumerate(zip(hosts, local_ranks, strict=True)):
        across = [name for name in names if sizes[name] > local_rank]
        sizes_of_rank = (len(hosts), sizes[host], len(across))
        found.append(Place(host, rank, local_rank, across.index(host), *sizes_of_rank))
    return found
