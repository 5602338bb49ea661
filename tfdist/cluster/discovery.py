"""Finding the cluster that this process belongs to, and variables that contradict what was found, or lack others."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.environments import BY_HAND, ENVIRONMENTS, RANK_LAUNCHERS, TF_CONFIG, TOGETHER, single_process
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership, roles
from tfdist.cluster.variables import SERVERS, optional_number, text

_log = logging.getLogger("tfdist")
# The cluster of a process that has met the others.
_met: dict[Membership, ClusterConfig] = {}


def discover(env: Mapping[str, str] | None = None, timeout: float = 300.0) -> ClusterConfig:
    """Finds the cluster, by the first system that is there: docs/clusters.md lists them in their order.

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
    """Finds the cluster without meeting the others: a `Membership` where only rank and size are known.

    Raises:
        ClusterError: If the environment describes no valid cluster.

    Example:
        >>> str(find({"TFDIST_RANK": "1", "TFDIST_SIZE": "2", "TFDIST_MEETING": "node-1"}))
        'rank 1 of 2, from TFDIST_RANK'
    """
    env = os.environ if env is None else env
    environment = next(environment for environment in ENVIRONMENTS if environment.detect(env))
    found = environment.read(env)
    if environment is TF_CONFIG:
        problems = left_over(found, env)
    elif isinstance(found, ClusterConfig):
        problems = incomplete(env) if environment.read is single_process.read else []
    else:
        # What a person has set for tfdist overrides everything.
        problems = contradictions(found, env) if environment is not BY_HAND else []
    if problems:
        raise ClusterError(problems)
    if isinstance(found, Membership) and found.size == 1:
        return ClusterConfig.single_process(found.source)
    return found


def contradictions(found: Membership, env: Mapping[str, str]) -> list[str]:
    """The variables that say something else than the system: a line for each, with what to do.

    Raises:
        ClusterError: If one is no number.

    Example:
        >>> contradictions(Membership(0, 2, "Slurm step 17.0", "job"), {"WORLD_SIZE": "4"})[0].partition(".")[0]
        'Received: WORLD_SIZE=4, but Slurm step 17'
        >>> contradictions(Membership(0, 2, "Slurm step 17.0", "job"), {"WORLD_SIZE": "2"})
        []
    """
    # Often left over in scripts. A launcher inside of another system's tasks sets its own, and is asked first.
    variables = {"RANK": found.rank, "TFDIST_SIZE": found.size, "WORLD_SIZE": found.size}
    given = {name: optional_number(env, name) for name in variables}
    return [
        f"Received: {name}={given[name]}, but {found.source} says that the "
        f"{'rank' if name == 'RANK' else 'number of processes'} is {expected}. Expected: the same. "
        f"Unset {name}; or let TFDIST_RANK and TFDIST_SIZE, both of them, override everything"
        for name, expected in variables.items()
        if given[name] not in (None, expected)
    ]


def left_over(config: ClusterConfig, env: Mapping[str, str]) -> list[str]:
    """Why TF_CONFIG, which may be left over from another job, does not fit the launcher: a line, or nothing.

    The number of tasks has to be the same. If the launcher has a single one, that may have started others.

    Example:
        >>> config = ClusterConfig({"worker": ["a:1", "b:1"]}, "worker", 1)
        >>> left_over(config, {"PMI_RANK": "1", "PMI_SIZE": "3"})[0].partition(".")[0]
        'Received: TF_CONFIG of 2 tasks, but MPICH says that there are 3'
        >>> left_over(config, {"PMI_RANK": "1", "PMI_SIZE": "2"})
        []
    """
    launcher = next((environment for environment in RANK_LAUNCHERS if environment.detect(env)), None)
    # Ray sets the TF_CONFIG of its workers, which inherit the variables of the system that started Ray's daemons.
    if launcher is None or any(name.startswith("RAY_") for name in env):
        return []
    try:
        found = launcher.read(env)
    except ClusterError:
        return []  # with TF_CONFIG nothing else has to be known
    own = (config.task_type, config.task_index)
    tasks = [(job, index) for job, index, _ in config.tasks()] or [own]
    count = len(tasks) + (own not in tasks)  # an evaluator beside the cluster
    if found.size in (1, count):
        return []
    return [
        f"Received: TF_CONFIG of {count} task{'' if count == 1 else 's'}, but {found.source} says that there are "
        f"{found.size}. Expected: the same. Unset TF_CONFIG, without which tfdist asks the system; if it is right, "
        'pass cluster=tfdist.ClusterConfig.from_tf_config(os.environ["TF_CONFIG"]) to the strategy'
    ]


def incomplete(env: Mapping[str, str]) -> list[str]:
    """The variables of a single process by which it should be one of several: a line for each, with what to do.

    Raises:
        ClusterError: If one is no number.

    Example:
        >>> incomplete({"WORLD_SIZE": "1"})
        []
        >>> incomplete({"WORLD_SIZE": "4"})[0].partition(".")[0]
        'Received: WORLD_SIZE=4 without RANK and MASTER_ADDR'
    """
    size, servers = (optional_number(env, name) or 0 for name in (BY_HAND.size, SERVERS))
    by_variable: dict[str, str] = {}
    for row in TOGETHER:
        by_variable |= row.incomplete(env)
    found = [
        (
            size > 1,
            f"Received: TFDIST_SIZE={size}, in a process of which nothing tells the rank. Expected: TFDIST_RANK, from "
            f"0 to {size - 1}; or a pod of an Indexed Job or a StatefulSet, whose name ends with it",
        ),
        (
            "TF_CONFIG" in env and not text(env, "TF_CONFIG"),
            "Received: TF_CONFIG, which is set, but blank. Expected: the cluster and this process' task in it, or "
            "unset TF_CONFIG to train in this process alone",
        ),
        (
            servers,
            f"Received: {SERVERS}={servers}, in a process that is none of several. Expected: tasks, of which the last "
            "ones are parameter servers: start it by srun or mpirun, or by `tfdist run --ps`; or unset TFDIST_PS",
        ),
    ]
    return [*by_variable.values(), *(problem for is_wrong, problem in found if is_wrong)]


def _complete(found: Membership, timeout: float, env: Mapping[str, str]) -> ClusterConfig:
    # Imported here because `find` needs no network, and this takes a while to load.
    from tfdist.cluster.meeting import keep
    from tfdist.cluster.rendezvous import meet

    tasks = roles(found.size, optional_number(env, SERVERS) or 0)
    result = meet(found, timeout, env)
    jobs: dict[str, list[str]] = {}
    for (job, _), address in zip(tasks, result["addresses"], strict=True):
        jobs.setdefault(job, []).append(address)
    seen = list(zip(result["hosts"], result["devices"], strict=True))
    sharing = [rank for rank, devices in enumerate(seen) if devices == seen[found.rank]]
    config = ClusterConfig(jobs, *tasks[found.rank], found.source, sharing.index(found.rank), len(sharing))
    keep(config, result["store"])
    _log.info("met %d processes on %d hosts: %s", found.size, len(set(result["hosts"])), config)
    return config
