"""Finding the cluster that this process belongs to."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.contradictions import contradictions, contradictions_of_cluster
from tfdist.cluster.environments import ENVIRONMENTS, mvapich, open_mpi, own, pmi, slurm, tf_config
from tfdist.cluster.environments.variables import optional_number
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership
from tfdist.cluster.roles import VARIABLE as SERVERS
from tfdist.cluster.roles import roles

_log = logging.getLogger("tfdist")
# What starts processes by rank; other systems set TF_CONFIG themselves.
_LAUNCHERS = (open_mpi, mvapich, pmi, slurm)
# Where a process is known, once it has met the others.
_met: dict[Membership, ClusterConfig] = {}


def discover(env: Mapping[str, str] | None = None, timeout: float = 300.0) -> ClusterConfig:
    """Finds the cluster, by the first system that is there: see docs/clusters.md for which they are, in which order.

    Where the system tells only ranks, this waits until all processes have come, and keeps a port for TensorFlow's
    server; further calls in the same process return the same.

    Args:
        env: The environment variables; those of this process by default.
        timeout: How long to wait for the others, in seconds.

    Raises:
        ClusterError: If the environment describes no valid cluster, or the processes do not meet.

    Example:
        >>> discover({}).is_single_process
        True
    """
    env = os.environ if env is None else env
    found = find(env)
    if isinstance(found, ClusterConfig):
        return found
    if found not in _met:
        _met[found] = _complete(found, timeout, env)
    return _met[found]


def find(env: Mapping[str, str] | None = None) -> ClusterConfig | Membership:
    """The same without meeting the others: a `Membership` where only rank and size are known.

    Raises:
        ClusterError: If the environment describes no valid cluster.

    Example:
        >>> str(find({"TFDIST_RANK": "1", "TFDIST_SIZE": "2", "TFDIST_MEETING": "node-1"}))
        'rank 1 of 2, from TFDIST_RANK'
    """
    env = os.environ if env is None else env
    environment = next(environment for environment in ENVIRONMENTS if environment.detect(env))
    found = environment.read(env)
    if isinstance(found, ClusterConfig):
        problems = _against_launcher(found, env) if environment is tf_config else []
        if problems:
            raise ClusterError(problems)
        return found
    # What a person has set for tfdist overrides everything.
    problems = contradictions(found, env) if environment is not own else []
    if problems:
        raise ClusterError(problems)
    if found.size == 1:
        return ClusterConfig.single_process(found.source)
    return found


def _against_launcher(config: ClusterConfig, env: Mapping[str, str]) -> list[str]:
    launcher = next((environment for environment in _LAUNCHERS if environment.detect(env)), None)
    if launcher is None:
        return []
    try:
        return contradictions_of_cluster(config, launcher.read(env), env)
    except ClusterError:
        return []  # with TF_CONFIG nothing else has to be known


def _complete(found: Membership, timeout: float, env: Mapping[str, str]) -> ClusterConfig:
    # Whoever only asks who is there needs no network.
    from tfdist.cluster.rendezvous import meet

    tasks = roles(found.size, optional_number(env, SERVERS) or 0)
    result = meet(found, timeout, env)
    jobs: dict[str, list[str]] = {}
    for (job, _), address in zip(tasks, result["addresses"], strict=True):
        jobs.setdefault(job, []).append(address)
    seen = list(zip(result["hosts"], result["devices"], strict=True))
    sharing = [rank for rank, devices in enumerate(seen) if devices == seen[found.rank]]
    config = ClusterConfig(jobs, *tasks[found.rank], source=found.source)
    config = dataclasses.replace(config, local_rank=sharing.index(found.rank), local_size=len(sharing))
    _log.info("met %d processes on %d hosts: %s", found.size, len(set(result["hosts"])), config)
    return config
