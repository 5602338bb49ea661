"""Variables that tell of several processes, but not enough to be one of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.environments.variables import optional_number

_PAIRS = {"RANK": "WORLD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE"}


def incomplete(env: Mapping[str, str]) -> list[str]:
    """What a person has set in a process that would be a single one, although it was to be one of several.

    Args:
        env: the environment variables.

    Returns:
        A line for each variable, with what to do.

    Raises:
        ClusterError: if one is no number.

    Example:
        >>> incomplete({"WORLD_SIZE": "1"})
        []
        >>> incomplete({"WORLD_SIZE": "4"})[0].partition(".")[0]
        'Received: WORLD_SIZE=4 without RANK and MASTER_ADDR'
    """
    problems = []
    size = optional_number(env, "TFDIST_SIZE") or 1
    if size > 1:
        problems.append(
            f"Received: TFDIST_SIZE={size}, in a process of which nothing tells the rank. Expected: TFDIST_RANK, from "
            f"0 to {size - 1}; or a pod of an Indexed Job or a StatefulSet, whose name ends with it"
        )
    world = optional_number(env, "WORLD_SIZE") or 1
    missing = [name for name in ("RANK", "MASTER_ADDR") if not env.get(name, "").strip()]
    if world > 1 and missing:
        problems.append(
            f"Received: WORLD_SIZE={world} without {' and '.join(missing)}. Expected: RANK, from 0 to {world - 1}, and "
            "MASTER_ADDR, the host of rank 0, as well; or unset WORLD_SIZE to train in this process alone"
        )
    for rank, count in _PAIRS.items():
        number = env.get(rank, "").strip()
        # People have other uses for a variable of that name.
        if number.isdecimal() and not env.get(count, "").strip():
            problems.append(
                f"Received: {rank}={number} without {count}. Expected: {count}, the number of processes, as well; or "
                f"unset {rank} to train in this process alone"
            )
    if "TF_CONFIG" in env and not env["TF_CONFIG"].strip():
        problems.append(
            "Received: TF_CONFIG, which is set, but blank. Expected: the cluster and this process' task in it, or "
            "unset TF_CONFIG to train in this process alone"
        )
    servers = optional_number(env, "TFDIST_PS") or 0
    if servers:
        problems.append(
            f"Received: TFDIST_PS={servers}, in a process that is none of several. Expected: tasks, of which the last "
            "ones are parameter servers: start it by srun or mpirun, or by `tfdist run --ps`; or unset TFDIST_PS"
        )
    return problems
