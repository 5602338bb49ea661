"""Checks before TensorFlow starts: what would otherwise hang or fail far from its cause."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from tfdist.cluster import sockets
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError

# Set where the others reach this process by an address that is not this machine's own.
SKIP_ADDRESS_CHECK = "TFDIST_SKIP_ADDRESS_CHECK"
_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"


def check(config: ClusterConfig, env: Mapping[str, str] | None = None) -> list[str]:
    """Looks for what would keep this process from taking part in the cluster.

    With `TFDIST_SKIP_ADDRESS_CHECK=1` in the environment its address need not be one of this machine.

    Args:
        config: The cluster as this process sees it.
        env: The environment variables; those of this process by default.

    Returns:
        The problems, one line each with what to do; empty if all is well.

    Example:
        >>> check(ClusterConfig.single_process(), env={})
        []
    """
    env = os.environ if env is None else env
    problems = []
    if is_on(env, _LEGACY_KERAS):
        legacy = f"{_LEGACY_KERAS}={env[_LEGACY_KERAS]}"
        problems.append(f"{legacy} selects Keras 2, which is not supported; unset it to use Keras 3")
    if config.is_single_process:
        return problems
    if config.rank is not None and config.num_workers > 1:
        problems += _tensorflow()
    # In Kubernetes a name may appear only when its pod is ready, and may stand for a service instead of the pod.
    in_kubernetes = "KUBERNETES_SERVICE_HOST" in env
    if not in_kubernetes:
        problems += _hosts(config)
    if config.address is not None:
        problems += _own_port(config, must_be_local=not in_kubernetes and not is_on(env, SKIP_ADDRESS_CHECK))
    return problems


def require(config: ClusterConfig) -> None:
    """Refuses what `check` finds.

    Raises:
        ClusterError: If there is any problem.

    Example:
        >>> require(ClusterConfig.single_process())
    """
    if problems := check(config):
        raise ClusterError(problems)


def is_on(env: Mapping[str, str], name: str) -> bool:
    """Whether a variable is 1 or true."""
    return env.get(name, "").lower() in ("1", "true")


def _tensorflow() -> list[str]:
    # Only if the program has imported it: a check must not import, let alone initialise, TensorFlow.
    module = sys.modules.get("tensorflow.python.eager.context")
    if module is None:
        return []
    context = module.context()
    if not (getattr(context, "_initialized", False) or getattr(context, "_context_handle", None) is not None):
        return []
    return [
        'TensorFlow is already initialised, so it would refuse with "Collective ops must be configured at program '
        'startup"; create the strategy before any other TensorFlow or Keras operation, as the first line of the script'
    ]


def _hosts(config: ClusterConfig) -> list[str]:
    places = {(job, index): sockets.split_address(place)[0] for job, index, place in config.tasks()}
    hosts = sorted(set(places.values()))
    with ThreadPoolExecutor(max_workers=min(16, len(hosts))) as pool:  # a name server that is down costs seconds a name
        found = dict(zip(hosts, pool.map(sockets.addresses_of, hosts), strict=True))
    problems = []
    mixed = any(addresses and not _all_loopback(addresses) for addresses in found.values())
    for (job, index), host in places.items():
        # The /etc/hosts of this machine may map its own name to 127.0.1.1. A loopback address that is written in the
        # cluster, however, misleads the others.
        misleads = (job, index) != (config.task_type, config.task_index) or sockets.is_loopback(host)
        if not found[host]:
            problems.append(
                f"{job} {index}: the host {host!r} cannot be resolved; correct the name, add it to /etc/hosts, or use "
                "an IP address"
            )
        elif mixed and misleads and _all_loopback(found[host]):
            problems.append(
                f"{job} {index}: the host {host!r} is only a loopback address here ({', '.join(sorted(found[host]))}), "
                "but other tasks are on the network; use the address that every machine reaches it by"
            )
    return problems


def _all_loopback(addresses: set[str]) -> bool:
    return all(map(sockets.is_loopback, addresses))


def _own_port(config: ClusterConfig, must_be_local: bool) -> list[str]:
    host, port = sockets.split_address(config.address)
    task = f"{config.task_type} {config.task_index}"
    if must_be_local and not sockets.is_own(host):
        return [
            f"{task}: {config.address} is not an address of this machine; "
            "set the task type and index of this process to the task that runs here, or correct the address; "
            "if it is forwarded to this machine (NAT, the published port of a container), "
            f"set {SKIP_ADDRESS_CHECK}=1"
        ]
    try:
        sockets.bind_everywhere(port, reuse=True).close()
    except OSError as error:
        remedies = {
            errno.EADDRINUSE: f"another process listens there; stop it (`ss -ltnp 'sport = :{port}'` shows it)",
            errno.EACCES: "ports below 1024 are for the administrator; start it as one",
        }
        why = f"{sockets.reason_of(error).lower()}: {remedies.get(error.errno, 'correct the address')}"
        return [f"{task}: cannot bind port {port} of {config.address}: {why}, or choose another port"]
    return []
