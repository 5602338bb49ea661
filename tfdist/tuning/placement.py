"""Which tuners of a search run here, and where its processes meet. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tfdist.cluster.variables import optional_number
from tfdist.launcher.run_plan import PlanError
from tfdist.log_folders import NAME as LOGS

# Names a search on Kubernetes, the same in all pods and in each of their starts.
SEARCH_ID = "TFDIST_SEARCH_ID"


@dataclass(frozen=True)
class Placement:
    """The part of a search that runs here.

    Attributes:
        tuners: how many there are in all.
        here: which of them run here.
        search_id: names the search.
        folder: of the logs; None: one of this run alone.
    """

    tuners: int
    here: tuple[int, ...]
    search_id: str
    folder: Path | None


def place(scheduler: str, tuners: int | None, log_dir: str | None, local_id: str, env: Mapping[str, str]) -> Placement:
    """Finds out what runs here.

    Args:
        scheduler: "local", "slurm" or "kubernetes".
        tuners: how many there are, if the user says it.
        log_dir: the folder of the logs, if the user names one.
        local_id: names a search on this machine.
        env: the environment.

    Raises:
        PlanError: this process is not what the scheduler's name says, or the number of tuners is another.

    Example:
        >>> array = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "4"}
        >>> array = {**array, "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "3"}
        >>> found = place("slurm", None, "/shared", "", array)
        >>> found.tuners, found.here, found.search_id
        (4, (2,), 'slurm-17')
    """
    folder = Path(log_dir).absolute() if log_dir else None
    if scheduler == "slurm":
        return _in_array(tuners, folder, env)
    if scheduler == "kubernetes":
        return _in_indexed_job(tuners, folder, env)
    assert tuners is not None
    return Placement(tuners, tuple(range(tuners)), local_id, folder)


def _in_array(tuners: int | None, folder: Path | None, env: Mapping[str, str]) -> Placement:
    job = env.get("SLURM_ARRAY_JOB_ID")
    names = ("TASK_ID", "TASK_COUNT", "TASK_MIN", "TASK_MAX")
    numbers = [optional_number(env, f"SLURM_ARRAY_{name}") for name in names]
    if not job or None in numbers:
        raise PlanError(
            "--scheduler slurm: expected an element of a job array, in which SLURM_ARRAY_TASK_ID is set. Use "
            "sbatch --array=0-3 with a script that calls `tfdist tune --scheduler slurm search.py`; on one machine, "
            "leave --scheduler out."
        )
    index, count, first, last = (number or 0 for number in numbers)
    if last - first + 1 != count:
        raise PlanError(
            f"--scheduler slurm: the elements of the array are {count} of {first} to {last}. Expected: one after the "
            "other. Use sbatch --array=0-3, without a step."
        )
    _check_count(tuners, count, "the job array has")
    return Placement(count, (index - first,), f"slurm-{job}", folder or Path(os.getcwd(), LOGS, f"tune-{job}"))


def _in_indexed_job(tuners: int | None, folder: Path | None, env: Mapping[str, str]) -> Placement:
    index = optional_number(env, "JOB_COMPLETION_INDEX")
    if index is None:
        raise PlanError(
            "--scheduler kubernetes: expected a pod of an Indexed Job, in which JOB_COMPLETION_INDEX is set. Set "
            "completionMode: Indexed in the Job; on one machine, leave --scheduler out."
        )
    search = env.get(SEARCH_ID)
    if tuners is None or folder is None or not search:
        missing = "-n" if tuners is None else "--log-dir" if folder is None else SEARCH_ID
        raise PlanError(
            f"--scheduler kubernetes: {missing} is missing. Expected: -n, the completions of the Job; --log-dir, a "
            f"folder on a volume that all pods mount; and {SEARCH_ID} in the environment, such as the uid of the Job. "
            "docs/tuning.md has a manifest."
        )
    if index >= tuners:
        raise PlanError(
            f"-n {tuners}: this pod has the index {index}. Expected: -n as large as the completions of the Job."
        )
    return Placement(tuners, (index,), f"kubernetes-{search}", folder)


def _check_count(asked: int | None, found: int, what: str) -> None:
    if asked is not None and asked != found:
        raise PlanError(f"-n {asked}: {what} {found} elements. Expected: the same number. Leave -n out.")
