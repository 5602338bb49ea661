"""Finding the cluster that this process belongs to, and variables that contradict what was found."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.environments import ENVIRONMENTS, RANK_LAUNCHERS, TF_CONFIG
from tfdist.cluster.environments.launchers import BY_HAND
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership, roles
from tfdist.cluster.variables import SERVERS, optional_number

_log = logging.getLogger("tfdist")
# Ray sets the TF_CONFIG of its workers, which inherit the variables of the system that started Ray's daemons.
_RAY = "RAY_"
# The cluster of a process that has met the others.
_met: dict[Membership, ClusterConfig] = {}
# By what the processes of a cluster have known each other when they met; not in the description, which is printed.
_secrets: dict[str, bytes] = {}


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
    if isinstance(found, ClusterConfig):
        problems = _against_launcher(found, env) if environment is TF_CONFIG else []
    else:
        # What a person has set for tfdist overrides everything.
        problems = contradictions(found, env) if environment is not BY_HAND else []
    if problems:
        raise ClusterError(problems)
    if isinstance(found, Membership) and found.size == 1:
        return ClusterConfig.single_process(found.source)
    return found


def secret_of(config: ClusterConfig) -> bytes | None:
    """The secret by which the processes of a cluster have met, if they have, and nobody else can know it.

    Example:
        >>> secret_of(ClusterConfig({"worker": ["a:1", "b:1"]}))
    """
    return _secrets.get(config.fingerprint())


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


def tf_config_contradictions(config: ClusterConfig, found: Membership, env: Mapping[str, str]) -> list[str]:
    """Why TF_CONFIG, which may be left over from another job, does not fit the system: a line, or nothing.

    The number of tasks has to be the same. With parameter servers or an evaluator, whoever wrote TF_CONFIG decides
    which task comes first; otherwise the ranks have to be the same as well. If the system has a single task, that one
    may have started others.

    Example:
        >>> config = ClusterConfig({"worker": ["a:1", "b:1"]}, "worker", 1)
        >>> tf_config_contradictions(config, Membership(1, 2, "Slurm step 17.0", "job"), {})
        []
        >>> tf_config_contradictions(config, Membership(1, 3, "Slurm step 17.0", "job"), {})[0].partition(".")[0]
        'Received: TF_CONFIG of 2 tasks, but Slurm step 17'
    """
    if found.size == 1 or any(name.startswith(_RAY) for name in env):
        return []
    own = (config.task_type, config.task_index)
    tasks = [(job, index) for job, index, _ in config.tasks()] or [own]
    count = len(tasks) + (own not in tasks)  # an evaluator beside the cluster
    if count != found.size:
        given, said = f"of {count} task{'' if count == 1 else 's'}", f"number of tasks is {found.size}"
    elif {job for job, _ in (*tasks, own)} <= {"chief", "worker"} and config.rank != found.rank:
        given, said = f"of rank {config.rank} ({config.task_type} {config.task_index})", f"rank is {found.rank}"
    else:
        return []
    return [
        f"Received: TF_CONFIG {given}, but {found.source} says that the {said}. Expected: the same. Unset TF_CONFIG, "
        "without which tfdist asks the system; if it is right, pass "
        'cluster=tfdist.ClusterConfig.from_tf_config(os.environ["TF_CONFIG"]) to the strategy'
    ]


def _against_launcher(config: ClusterConfig, env: Mapping[str, str]) -> list[str]:
    launcher = next((environment for environment in RANK_LAUNCHERS if environment.detect(env)), None)
    if launcher is None:
        return []
    try:
        return tf_config_contradictions(config, launcher.read(env), env)
    except ClusterError:
        return []  # with TF_CONFIG nothing else has to be known


def _complete(found: Membership, timeout: float, env: Mapping[str, str]) -> ClusterConfig:
    # Imported here because `find` needs no network, and this takes a while to load.
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
    if result["secret"] is not None:
        _secrets[config.fingerprint()] = result["secret"]
    _log.info("met %d processes on %d hosts: %s", found.size, len(set(result["hosts"])), config)
    return config
