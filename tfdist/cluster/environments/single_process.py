"""A process that nothing has started as one of several.

If a batch system has given the job several hosts or tasks, that is an error: in a batch script, or an interactive shell
of salloc, qsub -I or bsub -Is, training would begin once, alone, and the other hosts would idle.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.variables import SERVERS, optional_number, text

NAME = "single process"
_PAIRS = {"RANK": "WORLD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE"}
_ALONE = "to train in this process alone, set TFDIST_RANK=0 TFDIST_SIZE=1"


def is_allocated(env: Mapping[str, str]) -> bool:
    """Whether this process is in a job of a batch system."""
    return _allocation(env) is not None


def read(env: Mapping[str, str]) -> ClusterConfig:
    """The configuration without a cluster.

    Raises:
        ClusterError: If a batch system has given several tasks (Slurm) or hosts (others, whose slots are cores), or its
            file with the hosts is missing; if variables say that there are several processes, but not enough to be one
            of them; or if TF_CONFIG is blank.

    Example:
        >>> read({}).num_workers, read({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "1"}).source
        (1, 'Slurm job 17')
    """
    source = NAME
    if allocation := _allocation(env):
        source, has, count, remedy = allocation
        if count > 1:
            raise ClusterError(
                f"Received: a process in {source}, which has {count} {has}, but not started as one of its tasks: it is "
                "in the batch script or an interactive shell. Expected: a process for each of them. Start it there "
                f"with {remedy}; {_ALONE}"
            )
    problems = incomplete(env)
    if problems:
        raise ClusterError(problems)
    return ClusterConfig.single_process(source)


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
    size, world = (optional_number(env, name) or 1 for name in ("TFDIST_SIZE", "WORLD_SIZE"))
    servers = optional_number(env, SERVERS) or 0
    missing = [name for name in ("RANK", "MASTER_ADDR") if not text(env, name)]
    found = [
        (
            size > 1,
            f"Received: TFDIST_SIZE={size}, in a process of which nothing tells the rank. Expected: TFDIST_RANK, from "
            f"0 to {size - 1}; or a pod of an Indexed Job or a StatefulSet, whose name ends with it",
        ),
        (
            world > 1 and missing,
            f"Received: WORLD_SIZE={world} without {' and '.join(missing)}. Expected: RANK, from 0 to {world - 1}, and "
            "MASTER_ADDR, the host of rank 0, as well; or unset WORLD_SIZE to train in this process alone",
        ),
        *(
            (
                # People have other uses for a variable of that name.
                text(env, rank).isdecimal() and not text(env, count),
                f"Received: {rank}={text(env, rank)} without {count}. Expected: {count}, the number of processes, as "
                f"well; or unset {rank} to train in this process alone",
            )
            for rank, count in _PAIRS.items()
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
    return [problem for is_wrong, problem in found if is_wrong]


def _allocation(env: Mapping[str, str]) -> tuple[str, str, int, str] | None:
    """The job, "tasks" or "hosts", how many of them it has, and how to start a process on each."""
    program = program_of(sys.argv)
    if job := env.get("SLURM_JOB_ID"):
        # A job that asks for nodes only has no number of tasks yet: srun starts one on each. In a heterogeneous job,
        # these may be the numbers of its first component.
        count = optional_number(env, "SLURM_NTASKS") or optional_number(env, "SLURM_JOB_NUM_NODES") or 1
        components = optional_number(env, "SLURM_HET_SIZE") or 1
        return f"Slurm job {job}", "tasks", max(count, components), f"`srun {program}`"
    if job := env.get("LSB_JOBID"):
        hosts = env.get("LSB_MCPU_HOSTS", "").split()[::2]  # "host-1 4 host-2 4"
        return f"LSF job {job}", "hosts", len(hosts), f"`jsrun {program}` or `mpirun {program}`"
    if job := env.get("PBS_JOBID"):
        return f"PBS job {job}", "hosts", len(_hosts(env, "PBS_NODEFILE")), f"`mpirun {program}`"
    if "PE_HOSTFILE" in env:
        hosts = _hosts(env, "PE_HOSTFILE")
        return f"Grid Engine job {env.get('JOB_ID', '')}", "hosts", len(hosts), f"`mpirun {program}`"
    return None


def program_of(arguments: Sequence[str]) -> str:
    """What was started, as a user would type it.

    Args:
        arguments: as in `sys.argv`.

    Example:
        >>> program_of(["/usr/bin/tfdist", "check"]), program_of(["src/train.py", "--epochs"]), program_of(["-c"])
        ('tfdist check', 'python src/train.py', 'python ...')
    """
    first, name = arguments[0], os.path.basename(arguments[0])
    if name == "tfdist" or first.endswith(os.path.join("tfdist", "__main__.py")):
        return " ".join(["tfdist", *arguments[1:2]])
    return f"python {first}" if name.endswith(".py") and name != "__main__.py" else "python ..."


def _hosts(env: Mapping[str, str], name: str) -> set[str]:
    """The hosts of a file, which a variable names, in which they are the first word of a line."""
    path = env.get(name, "")
    try:
        return {line.split()[0] for line in Path(path).read_text().splitlines() if line.strip()} if path else set()
    except OSError as error:
        raise ClusterError(
            f"Received: {name}={path}, which cannot be read ({error.strerror}). Expected: the file with the hosts of "
            "the job. It is on the first host only, and a container has to mount it: if this process was started on "
            f"another host, it needs TFDIST_RANK, TFDIST_SIZE and TFDIST_MEETING; {_ALONE}"
        ) from None
