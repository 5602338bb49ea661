"""Trials: a job that is interrupted and started again in one folder, beside the same job without interruption."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.fault_tolerance.forked_jobs import Ended, ForkedJobs
from tests.fault_tolerance.job import Job

KILLED = -9


@dataclasses.dataclass(frozen=True)
class Case:
    """What is run one after the other in one folder.

    Attributes:
        name: what the test is called.
        jobs: in their order.
        reference: the job whose result the last one must have; without interruption and without a backup by default.
        between: called with the folder between the last two jobs.
    """

    name: str
    jobs: tuple[Job, ...]
    reference: Job | None = None
    between: Callable[[Path], None] | None = None

    def __str__(self) -> str:
        return self.name


def interrupted(name: str, job: Job, *kills: Mapping[str, Any], **changes: Any) -> Case:
    """A case of a job that is interrupted by each of `kills` in turn, and then left alone."""
    return Case(name, (*(job.with_(kill=dict(kill)) for kill in kills), job), **changes)


def at(number: float, when: str = "on_train_batch_begin") -> dict[str, Any]:
    """A kill at the `number`-th call of a callback method in the process."""
    return {"when": when, "number": number}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        runs: the jobs of the case.
        reference: the job without interruption.
        folder: where the jobs of the case ran.
    """

    runs: list[Ended]
    reference: Ended
    folder: Path

    @property
    def codes(self) -> list[int]:
        """The exit codes of the jobs."""
        return [run.code for run in self.runs]

    @property
    def steps(self) -> list[int | None]:
        """How many executions of steps each job has begun; `None` for one that was killed."""
        return [run.result and run.result["steps of this process"] for run in self.runs]

    @property
    def log(self) -> str:
        """What the last job printed."""
        return self.runs[-1].log

    @property
    def differences(self) -> list[str]:
        """What the last job has observed otherwise than the reference, bit by bit."""
        return differences(self.reference, self.runs[-1])


def differences(expected: Ended, received: Ended) -> list[str]:
    """The names of all observations that differ in any bit."""
    for run in (expected, received):
        assert run.result is not None, f"no result, exit code {run.code}:\n{run.log}"
    left, right = dict(expected.result), dict(received.result)
    # A run that goes on has fewer of them left.
    del left["steps of this process"], right["steps of this process"]
    return [name for name in sorted({*left, *right}) if not _same(left.get(name), right.get(name))]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    return type(left) is type(right) and left == right


def about(names: Iterable[str]) -> set[str]:
    """The kinds of observations that names of differences belong to, such as `weights`, `history` and `csv`."""
    return {re.sub(r"^fit \d+: ", "", name).split("/")[0] for name in names}


class Trials:
    """Runs cases, each once.

    Args:
        jobs: where their processes come from.
        folder: gets a folder for each case.
    """

    def __init__(self, jobs: ForkedJobs, folder: Path) -> None:
        self.jobs = jobs
        self.folder = folder
        self._outcomes: dict[str, Outcome] = {}
        self._runs: dict[str, tuple[Path, list[Ended]]] = {}

    def outcome(self, case: Case) -> Outcome:
        """Runs a case; shows what its processes printed (pytest keeps it to itself if the test passes)."""
        if case.name not in self._outcomes:
            self._outcomes[case.name] = self._run(case)
        outcome = self._outcomes[case.name]
        for run in (outcome.reference, *outcome.runs):
            print(f"=== exit code {run.code}\n{run.log}")
        return outcome

    def _run(self, case: Case) -> Outcome:
        folder = self.folder / re.sub(r"\W+", "-", case.name)
        runs: list[Ended] = []
        if case.jobs[1:]:
            # Cases that differ in what follows share it.
            before, runs = self._once(case.jobs[:-1])
            shutil.copytree(before, folder)
        if case.between is not None:
            case.between(folder)
        runs = [*runs, self.jobs.run(case.jobs[-1], folder)]
        (reference,) = self._once((case.reference or case.jobs[-1].reference,))[1]
        return Outcome(runs, reference, folder)

    def _once(self, jobs: tuple[Job, ...]) -> tuple[Path, list[Ended]]:
        """Runs jobs in a folder of their own, unless that was done before."""
        if repr(jobs) not in self._runs:
            folder = self.folder / f"jobs-{len(self._runs)}"
            self._runs[repr(jobs)] = folder, [self.jobs.run(job, folder) for job in jobs]
        return self._runs[repr(jobs)]
