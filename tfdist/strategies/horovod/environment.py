"""What Horovod reads from the environment: who has started the processes, and where they are.

Horovod's library reads these variables when it connects the processes, and again whenever it forms another group of
them, so they are set for this process as horovodrun would have set them for it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.environments.launchers import HOROVODRUN, SET_FOR_HOROVOD
from tfdist.cluster.errors import ClusterError
from tfdist.strategies.horovod.topology import places

# By which a launcher's processes know how many they are.
_SIZES = {"horovodrun": "HOROVOD_SIZE", "mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}


def launcher(env: Mapping[str, str]) -> str | None:
    """The launcher that has told Horovod where the processes are: horovodrun, mpirun or mpiexec; else `None`.

    Example:
        >>> launcher({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}), launcher({})
        ('horovodrun', None)
    """
    if HOROVODRUN.detect(env):
        return "horovodrun"
    if env.get(_SIZES["horovodrun"]):
        return None  # set by `describe`
    # A single process under mpirun needs no Horovod.
    return next((name for name, variable in _SIZES.items() if (env.get(variable) or "1") != "1"), None)


def size(env: Mapping[str, str]) -> int:
    """How many processes the launcher has started.

    Example:
        >>> size({"OMPI_COMM_WORLD_SIZE": "4"}), size({})
        (4, 1)
    """
    return next((int(env[variable]) for variable in _SIZES.values() if env.get(variable)), 1)


def allow_groups() -> None:
    """Lets process sets be added after Horovod was initialized."""
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")


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

    try:
        wanted = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] in wanted for address in addresses):
            return name
    return None


def host(env: Mapping[str, str]) -> str:
    """The name under which processes on other hosts reach this one.

    Example:
        >>> host({"HOROVOD_HOSTNAME": "node-3"})
        'node-3'
    """
    return env.get("HOROVOD_HOSTNAME") or socket.gethostname()


def _hosts(cluster: ClusterConfig) -> list[str]:
    """The host of each rank, without its port."""
    addresses = (cluster.jobs[job][index] for job, index in cluster.compute_tasks)
    return [address.rpartition(":")[0].strip("[]") for address in addresses]
