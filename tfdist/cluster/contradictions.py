"""Variables that say something else than the system that has started the process. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.environments.variables import optional_number
from tfdist.cluster.membership import Membership

# Left over in many a script; what starts processes within another system's tasks sets its own, and is asked first.
_RANKS = ("RANK",)
_SIZES = ("TFDIST_SIZE", "WORLD_SIZE")
# Ray starts its workers, and sets their TF_CONFIG, in whatever its own daemons were started by.
_RAY = "RAY_"


def contradictions(found: Membership, env: Mapping[str, str]) -> list[str]:
    """What a person has set that does not fit.

    Args:
        found: what the system says.
        env: the environment variables.

    Returns:
        A line for each variable, with what to do.

    Raises:
        ClusterError: if one is no number.

    Example:
        >>> contradictions(Membership(0, 2, "Slurm step 17.0", "job"), {"WORLD_SIZE": "4"})[0].partition(".")[0]
        'Received: WORLD_SIZE=4, but Slurm step 17'
        >>> contradictions(Membership(0, 2, "Slurm step 17.0", "job"), {"WORLD_SIZE": "2"})
        []
    """
    problems = []
    for names, own, what in ((_RANKS, found.rank, "rank"), (_SIZES, found.size, "number of processes")):
        for name in names:
            given = optional_number(env, name)
            if given is not None and given != own:
                problems.append(
                    f"Received: {name}={given}, but {found.source} says that the {what} is {own}. Expected: the same. "
                    f"Unset {name}; or let TFDIST_RANK and TFDIST_SIZE, both of them, override everything"
                )
    return problems


def contradictions_of_cluster(config: ClusterConfig, found: Membership, env: Mapping[str, str]) -> list[str]:
    """What TF_CONFIG says that does not fit the system: it may be left over from another job.

    All of its tasks count. Where it has parameter servers or an evaluator, it is for whoever wrote it to say which task
    comes first; otherwise ranks are compared, too.

    Args:
        config: what TF_CONFIG says.
        found: what the system says. A single task of it may well have started others.
        env: the environment variables.

    Returns:
        A line, with what to do, or nothing.

    Example:
        >>> config = ClusterConfig({"worker": ["a:1", "b:1"]}, "worker", 1)
        >>> contradictions_of_cluster(config, Membership(1, 2, "Slurm step 17.0", "job"), {})
        []
        >>> contradictions_of_cluster(config, Membership(1, 3, "Slurm step 17.0", "job"), {})[0].partition(".")[0]
        'Received: TF_CONFIG of 2 tasks, but Slurm step 17'
    """
    if found.size == 1 or any(name.startswith(_RAY) for name in env):
        return []
    own = (config.task_type, config.task_index)
    tasks = [(job, index) for job, index, _ in config.tasks()] or [own]
    count = len(tasks) + (own not in tasks)  # an evaluator beside the cluster
    if count != found.size:
        given, said = f"of {_counted(count, 'task')}", f"number of tasks is {found.size}"
    elif {job for job, _ in (*tasks, own)} <= {"chief", "worker"} and config.rank != found.rank:
        given, said = f"of rank {config.rank} ({config.task_type} {config.task_index})", f"rank is {found.rank}"
    else:
        return []
    return [
        f"Received: TF_CONFIG {given}, but {found.source} says that the {said}. Expected: the same. Unset TF_CONFIG, "
        "without which tfdist asks the system; if it is right, pass "
        'cluster=tfdist.ClusterConfig.from_tf_config(os.environ["TF_CONFIG"]) to the strategy'
    ]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
