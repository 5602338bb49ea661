"""A batch system has given this process hosts, but has not started it as one of the tasks on them.

A batch script, an interactive shell of salloc, qsub -I or bsub -Is: training would begin once, alone, and the other
hosts would idle. That is an error, with what has to be written instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.environments.incomplete import incomplete
from tfdist.cluster.environments.variables import optional_number
from tfdist.cluster.errors import ClusterError

NAME = "allocation"
_ALONE = "to train in this process alone, set TFDIST_RANK=0 TFDIST_SIZE=1"


def detect(env: Mapping[str, str]) -> bool:
    """Whether this process is in a job of a batch system."""
    return _found(env) is not None


def read(env: Mapping[str, str]) -> ClusterConfig:
    """A single process, if one is all that was asked for: one task of Slurm, one host elsewhere, where slots are cores.

    Raises:
        ClusterError: if there are several, of which this process has only one; or the file with the hosts is missing;
            or a variable says that there are several processes.

    Example:
        >>> read({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "1"}).is_single_process
        True
    """
    job, has, count, remedy = _found(env)  # type: ignore[misc]
    if count > 1:
        raise ClusterError(
            f"Received: a process in {job}, which has {count} {has}, but not started as one of its tasks: it is in the "
            f"batch script or an interactive shell. Expected: a process for each of them. Start it there with "
            f"{remedy}; {_ALONE}"
        )
    problems = incomplete(env)
    if problems:
        raise ClusterError(problems)
    return ClusterConfig.single_process(job)


def _found(env: Mapping[str, str]) -> tuple[str, str, int, str] | None:
    """The job, what it has several of, how many, and how to start a process on each."""
    program = program_of(sys.argv)
    if job := env.get("SLURM_JOB_ID"):
        # A job that asks for nodes only has no number of tasks yet: srun starts one on each.
        count = optional_number(env, "SLURM_NTASKS") or optional_number(env, "SLURM_JOB_NUM_NODES") or 1
        return f"Slurm job {job}", "tasks", count, f"`srun {program}`"
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
    """What was started, as somebody would type it.

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
            "the job. It is on the first host only: if this process was started on another one, it needs TFDIST_RANK, "
            f"TFDIST_SIZE and TFDIST_MEETING; {_ALONE}"
        ) from None
