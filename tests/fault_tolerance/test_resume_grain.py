"""Grain datasets: a killed fit goes on in the middle of an epoch, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault_tolerance.forked_jobs import ForkedJobs
from tests.fault_tolerance.job import Job
from tests.fault_tolerance.test_resume_data import BACKUP, EARLY_KILLS, KILL, KILLS, resumed
from tests.fault_tolerance.test_resume_workers import Cluster, assert_same
from tests.fault_tolerance.trials import KILLED, Case, Trials, about
from tests.tiers import daily

pytest.importorskip("grain", reason="Grain is not installed: pip install grain")
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

JOB = Job().light.with_(data="Grain", backup=BACKUP)
CASES = [
    resumed("Grain", "Grain", *KILLS),
    resumed("Grain, killed in the first epoch", "Grain", EARLY_KILLS[0]),
    resumed("Grain, saved at ends of epochs", "Grain", backup={}),
    resumed("Grain, one iterator", "Grain, repeat", *KILLS, fit={"steps_per_epoch": 12}),
    resumed(
        "Grain, several epochs a pass", "Grain, repeat", fit={"steps_per_epoch": 5}, epochs=6, steps_per_execution=1
    ),
    resumed("Grain, executions that do not divide it", "Grain, repeat", *EARLY_KILLS, fit={"steps_per_epoch": 7}),
    resumed("Grain, iterated", "Grain, iterated", *KILLS),
    resumed("Grain, loader", "Grain, loader", *KILLS),
    resumed("Grain, loader with workers", "Grain, loader with workers"),
    resumed("Grain, two replicas", "Grain", model="light, replicated", strategy="mirrored"),
]


@pytest.mark.parametrize("case", daily(CASES, "Grain", "Grain, loader"), ids=str)
def test_kill(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED] * (len(case.jobs) - 1) + [0]
    assert outcome.differences == []
    if case.jobs[-1].backup and not case.jobs[-1].fit:
        # It went on within an epoch; with steps_per_epoch, the kill may be between two.
        assert "goes on at step 0 of" not in outcome.log
        assert "saves at the ends of epochs only" not in outcome.log


@pytest.mark.parametrize(
    "case", [Case("without the state", (JOB.with_(kill=KILL), JOB.with_(leave_out="Grain state")))], ids=str
)
def test_the_comparison_sees_another_position(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, 0]
    assert {"observer", "weights"} <= about(outcome.differences)


@pytest.mark.parametrize(
    "case",
    [
        Case(
            "random numbers of the process",
            (JOB.with_(data="Grain, np.random", kill=KILL), JOB.with_(data="Grain, np.random")),
        )
    ],
    ids=str,
)
def test_random_numbers_of_the_process_are_no_position(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, 0]
    assert (
        "saves at the ends of epochs only: a transformation of the Grain dataset draws from the global random state of "
        "Python, NumPy or TensorFlow; use grain.transforms.RandomMap, or random_map, which are given a generator."
    ) in outcome.log


@pytest.mark.parametrize(
    ("case", "error"),
    [
        pytest.param(
            Case("another Grain dataset", (JOB.with_(kill=KILL), JOB.with_(data="Grain, loader"))),
            "Received: a Grain dataset that does not take the saved position: ",
            id="another kind",
        ),
    ],
)
def test_refuses_another_dataset(case: Case, error: str, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, 1]
    assert error in outcome.log
    assert outcome.steps[1] == 0


@pytest.mark.cluster
@pytest.mark.parametrize("killed", daily([[1], [0, 1]], "[1]"), ids=str)
def test_two_workers(jobs: ForkedJobs, tmp_path: Path, killed: list[int]) -> None:
    job = JOB.with_(model="light, replicated", strategy="workers")
    reference = Cluster(jobs, tmp_path / "reference").complete(job.reference)
    cluster = Cluster(jobs, tmp_path / "killed")
    ended = cluster.run(job, kill=dict.fromkeys(killed, KILL))
    assert [ended[rank].code for rank in killed] == [KILLED] * len(killed)
    assert_same(reference, cluster.complete(job))
    assert next(event["step"] for event in cluster.events("resumed")) > 15
