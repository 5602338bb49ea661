"""Commands that tests run on clusters, each in a folder of its own, and what their tasks have found there."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.launcher.conftest import Launch

_SHOWN = 8000
MEET = ("{python}", "-m", "tests.system.meeting_program", "{folder}")
FIT = ("{python}", "-m", "tests.system.fit_program", "{folder}")
# What two ways of summing the same gradients may differ by.
TOLERANCE = 5e-7


class Place(Protocol):
    """Where commands run: a host, or a cluster."""

    def command(self, *words: str) -> list[str]:
        """The command that runs another one there."""


@dataclass(frozen=True)
class Job:
    """A command that was started.

    Attributes:
        launch: its process.
        folder: where its tasks write what they find.
        out: what they print.
    """

    launch: Launch
    folder: Path
    out: Path

    def end(self, deadline: float) -> int:
        """Its exit code, once it has ended."""
        return self.launch.finish(deadline).code

    def found(self) -> list[dict[str, Any]]:
        """What each task of `meeting_program` has found, in the order of their ranks, where they have any."""
        tasks = [json.loads(path.read_text()) for path in self.folder.glob("*.json")]
        return sorted(tasks, key=lambda task: (task.get("rank", -1), task["node"], task["pid"]))

    def training(self) -> list[dict[str, np.ndarray]]:
        """What each task of `fit_program` has computed, by rank."""
        paths = sorted(self.folder.glob("rank-*.npz"))
        return [dict(np.load(path)) for path in paths]

    @property
    def output(self) -> str:
        """What it has printed."""
        return self.out.read_text(errors="replace")


class Jobs:
    """Starts them, and ends them.

    Args:
        folder: for their folders.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._started: list[Job] = []

    def start(
        self, *command: str, on: Place | None = None, env: dict[str, str] | None = None, folder: Path | None = None
    ) -> Job:
        """Starts a command, in which `{python}` is this Python, and `{folder}` the job's folder.

        Args:
            command: the command.
            on: where it is started; by default on this machine.
            env: of its environment, in addition to this process' own.
            folder: of another job, if it is to be the same.
        """
        number = len(self._started)
        if folder is None:
            folder = self._folder / f"job-{number}"
            folder.mkdir()
        words = [word.format(python=sys.executable, folder=folder) for word in command]
        if on is not None:
            words = on.command(*words)
        # The kernel ends it when these tests are killed.
        words = ["setpriv", "--pdeathsig=TERM", *words]
        # The home folder holds the key of the jobs.
        more = {"HOME": str(self._folder), "TF_CPP_MIN_LOG_LEVEL": "2", **getattr(on, "env", {}), **(env or {})}
        out = self._folder / f"output-{number}.txt"
        with out.open("wb") as stream:
            launch = Launch(folder, words, env=more, stdout=stream, stderr=stream)
        self._started.append(Job(launch, folder, out))
        return self._started[-1]

    def close(self) -> None:
        """Ends what still runs, and makes sure that nothing is left."""
        for job in self._started:
            job.launch.clean_up()

    def outputs(self) -> str:
        """The ends of what they have printed."""
        return "\n".join(f"--- {' '.join(job.launch.popen.args)}\n{job.output[-_SHOWN:]}" for job in self._started)


def assert_met(job: Job, size: int) -> list[dict[str, Any]]:
    """That all tasks of a job have the same addresses, that each address leads to its rank; returns what they found."""
    found = job.found()
    assert [task.get("rank") for task in found] == list(range(size)), found
    assert all(task["places"] == found[0]["places"] for task in found)
    assert [task["answers"] for task in found] == [list(range(size))] * size
    for task in found:
        same = [other for other in found if other["node"] == task["node"]]
        assert task["local"] == [same.index(task), len(same)]
    return found


def assert_trained_as(job: Job, reference: dict[str, np.ndarray], size: int) -> None:
    """That every task of a job has the losses and the weights of one process."""
    tasks = job.training()
    assert [int(task["replicas"]) for task in tasks] == [size] * size
    for task in tasks:
        for name in reference.keys() - {"replicas"}:
            np.testing.assert_allclose(task[name], reference[name], rtol=0, atol=TOLERANCE, err_msg=name)
