"""A real Slurm: srun in all its ways, what a batch script or an interactive shell gets, and training."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.cluster.test_lost_peers import PROGRAM
from tests.launcher.conftest import wait_until
from tests.system.jobs import FIT, MEET, TOLERANCE, Job, Jobs, assert_met, assert_trained_as
from tests.system.slurm import Slurm

pytestmark = pytest.mark.slurm

_SECONDS = 180.0


def batch(jobs: Jobs, slurm: Slurm, script: str, *options: str, env: dict[str, str] | None = None) -> Job:
    """Submits a script, and waits for its end; `sbatch --wait` asks for it every ten seconds only."""
    wrapped = ["sbatch", "--output={folder}/batch.txt", *options, f"--wrap={script}; touch {{folder}}/ended"]
    job = jobs.start(*wrapped, on=slurm, env=env)
    assert job.end(_SECONDS) == 0, job.output
    wait_until((job.folder / "ended").exists, _SECONDS, "the end of the batch script")
    return job


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        (("-N3", "-n6", "--ntasks-per-node=2"), "n9 n9 n10 n10 n11 n11"),
        (("-N3", "-n6", "--ntasks-per-node=2", "--distribution=cyclic"), "n9 n10 n11 n9 n10 n11"),
        (("-N3", "-n5"), "n9 n9 n9 n10 n11"),
        (("-N1", "-n2"), "n9 n9"),
    ],
    ids=["block", "cyclic", "uneven", "one node"],
)
def test_tasks_find_each_other(slurm, jobs, options, nodes):
    job = jobs.start("srun", *options, *MEET, on=slurm)
    assert job.end(_SECONDS) == 0, job.output
    found = assert_met(job, len(nodes.split()))
    assert " ".join(task["node"] for task in found) == nodes
    assert re.fullmatch(r"Slurm step \d+\.0", found[0]["source"])


def test_two_steps_on_one_node_do_not_mix(slurm, jobs):
    step = f"srun -n2 --exact {' '.join(MEET)}"
    job = batch(jobs, slurm, f"{step} & {step} & wait", "-N1", "-n4", env={"MEETING_TEST_ALL": "4"})
    found = job.found()
    assert len(found) == 4, (job.folder / "batch.txt").read_text()
    steps = {task["source"]: [other for other in found if other["source"] == task["source"]] for task in found}
    assert [sorted(task["rank"] for task in tasks) for tasks in steps.values()] == [[0, 1], [0, 1]]
    assert all(task["answers"] == [0, 1] for task in found)
    places = [tuple(place) for tasks in steps.values() for place in tasks[0]["places"]]
    assert len(set(places)) == 4


def test_a_step_may_have_fewer_tasks_than_the_job(slurm, jobs):
    job = jobs.start("salloc", "-N3", "-n6", "srun", "-N2", "-n3", *MEET, on=slurm)
    assert job.end(_SECONDS) == 0, job.output
    assert [task["node"] for task in assert_met(job, 3)] == ["n9", "n9", "n10"]


def test_rank_0_on_another_node_than_the_first(slurm, jobs, tmp_path):
    (tmp_path / "nodes").write_text("n11\nn9\nn10\n")
    options, env = ("-n3", "--distribution=arbitrary"), {"SLURM_HOSTFILE": str(tmp_path / "nodes")}
    wrong = jobs.start("srun", *options, *MEET, on=slurm, env={**env, "MEETING_TEST_TIMEOUT": "2"})
    assert wrong.end(_SECONDS) != 0
    assert any("received rank 0 on node 2 of n[9-11]" in task["error"] for task in wrong.found()), wrong.output
    job = jobs.start("srun", *options, *MEET, on=slurm, env={**env, "TFDIST_MEETING": "n11"})
    assert job.end(_SECONDS) == 0, (job.output, job.found())
    assert [task["node"] for task in assert_met(job, 3)] == ["n11", "n9", "n10"]


@pytest.mark.parametrize("way", ["a batch script", "an interactive shell"])
def test_without_srun_it_says_so(slurm_here, jobs, way):
    env = {"MEETING_TEST_TIMEOUT": "600"}
    if way == "a batch script":
        job = batch(jobs, slurm_here, " ".join(MEET), "-N3", "-n3", env=env)
    else:
        job = jobs.start("salloc", "-N3", "-n3", *MEET, on=slurm_here, env=env)
        assert job.end(_SECONDS) == 3, job.output
    (task,) = job.found()
    assert re.match(r"Received: a process in Slurm job \d+, which has 3 tasks, but not started as one", task["error"])
    assert re.search(r"Start it there with `srun python \S*meeting_program\.py`; to train", task["error"])
    assert task["seconds"] < 300.0, "it has waited for nobody"


def test_a_killed_task_ends_the_step(slurm, jobs):
    job = jobs.start("srun", "-N3", "-n3", "-K1", *MEET, on=slurm, env={"MEETING_TEST_ALL": "99"})
    wait_until(lambda: len(job.found()) == 3 or job.launch.popen.poll() is not None, _SECONDS, "three tasks")
    assert job.launch.popen.poll() is None, job.output
    os.kill(job.found()[1]["pid"], signal.SIGKILL)
    # The highest of the tasks' codes: the others have been asked to end.
    assert job.end(_SECONDS) == 128 + signal.SIGTERM
    assert re.search(r"error: \w+: task 1: Killed", job.output)
    job.launch.assert_nothing_is_left(within=60.0)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.netns
def test_those_that_are_left_name_who_is_gone(slurm_on_hosts, hosts, jobs):
    program = ("{python}", "-c", PROGRAM.replace("{", "{{").replace("}", "}}"), "1", "kill")
    job = jobs.start("srun", "-N3", "-n3", "--label", *program, on=slurm_on_hosts)
    assert job.end(2 * _SECONDS) != 0
    said = dict(re.findall(r"(\d): tfdist: (worker .*)", job.output))
    assert sorted(said) == ["0", "2"], job.output
    assert any(
        re.match(rf"worker 1 \({hosts['n10'].address}:\d+\) is gone; what it has", line) for line in said.values()
    )


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.netns
def test_training_equals_one_process(slurm_on_hosts, jobs, one_process):
    job = jobs.start("srun", "-N3", "-n3", *FIT, on=slurm_on_hosts)
    assert job.end(180) == 0, job.output
    assert_trained_as(job, one_process, 3)
    # A difference would be noticed.
    name = "weight 0"
    with pytest.raises(AssertionError, match=name):
        assert_trained_as(job, {**one_process, name: one_process[name] + 2 * TOLERANCE}, 3)
