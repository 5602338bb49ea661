"""Real mpirun: Open MPI's and MPICH's, on one host and inside of a Slurm allocation of three."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import wait_until
from tests.system.jobs import MEET, assert_met

pytestmark = pytest.mark.mpi

_SECONDS = 180.0
_AS_ROOT = ("--allow-run-as-root",) if os.geteuid() == 0 else ()


@functools.cache
def command_of(kind: str) -> str | None:
    """The mpirun of "Open MPI" or of "HYDRA"; both may be installed, under the same names."""
    # `make test-slurm` keeps MPICH apart: it would take the place of Open MPI's commands.
    own = Path(sys.prefix) / "mpich" / "bin" / "mpiexec.hydra"
    for name in ("mpirun.openmpi", "mpirun", "mpiexec.hydra", str(own)):
        path = shutil.which(name)
        if path and kind in subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout:
            return path
    return None


def open_mpi(count: int) -> list[str]:
    """The command that starts so many tasks by Open MPI's mpirun."""
    path = command_of("Open MPI")
    if path is None:
        pytest.skip("mpirun is not Open MPI's")
    return [path, *_AS_ROOT, "--oversubscribe", "-n", str(count)]


def mpich(count: int) -> list[str]:
    """The same by MPICH's mpiexec."""
    path = command_of("HYDRA")
    if path is None:
        pytest.skip("MPICH is not installed: no mpiexec.hydra; `make test-slurm` installs it")
    return [path, "-n", str(count)]


@pytest.mark.parametrize(("launcher", "source"), [(open_mpi, "Open MPI"), (mpich, "MPICH")], ids=["Open MPI", "MPICH"])
def test_tasks_of_one_host_find_each_other(jobs, launcher, source):
    job = jobs.start(*launcher(3), *MEET)
    assert job.end(_SECONDS) == 0, job.output
    assert [task["source"] for task in assert_met(job, 3)] == [source] * 3


@pytest.mark.slurm
@pytest.mark.netns
@pytest.mark.parametrize(
    ("launcher", "options", "source"),
    [(open_mpi, ("--map-by", "node"), "Open MPI"), (mpich, ("-launcher", "slurm", "-ppn", "1"), "MPICH")],
    ids=["Open MPI", "MPICH"],
)
def test_tasks_in_an_allocation_find_each_other(slurm_on_hosts, hosts, jobs, launcher, options, source):
    # Of Slurm's variables they see those of mpirun's own daemons.
    job = jobs.start("salloc", "-N3", "-n6", "--ntasks-per-node=2", *launcher(6), *options, *MEET, on=slurm_on_hosts)
    assert job.end(_SECONDS) == 0, job.output
    found = assert_met(job, 6)
    assert [task["node"] for task in found] == ["n9", "n10", "n11"] * 2
    assert [task["source"] for task in found] == [source] * 6
    assert [place[0] for place in found[0]["places"]] == [hosts[task["node"]].address for task in found]


def test_two_jobs_on_one_host_do_not_mix(jobs):
    env = {"MEETING_TEST_ALL": "4"}
    one = jobs.start(*open_mpi(2), *MEET, env=env)
    other = jobs.start(*open_mpi(2), *MEET, env=env, folder=one.folder)
    for job in (one, other):
        assert job.end(_SECONDS) == 0, job.output
    found = one.found()
    assert [(task["rank"], task["answers"]) for task in found] == [(0, [0, 1]), (0, [0, 1]), (1, [0, 1]), (1, [0, 1])]
    places = {tuple(map(tuple, task["places"])) for task in found}
    assert len(places) == 2 and len({place for pair in places for place in pair}) == 4


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        (1, "not all tasks came within .* missing: rank 1;"),
        (0, "Received: nothing from rank 0 within .*, in .*meetings"),
    ],
)
def test_a_task_that_does_not_come(jobs, absent, words):
    job = jobs.start(*open_mpi(3), *MEET, env={"MEETING_TEST_ABSENT": str(absent), "MEETING_TEST_TIMEOUT": "15"})
    # The job ends as soon as one task has failed: the others may not have printed theirs.
    wait_until(lambda: bool(job.found()), _SECONDS, "an error")
    for task in job.found():
        assert re.search(words, task["error"])
        assert task["seconds"] > 13.0
    assert job.end(_SECONDS) == 3
