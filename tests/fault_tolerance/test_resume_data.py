"""All kinds of data whose position can be found again: each row is read once an epoch, in the uninterrupted order."""

from __future__ import annotations

import shutil

import pytest

from tests.fault_tolerance.forked_jobs import Ended
from tests.fault_tolerance.job import ROWS, Job
from tests.fault_tolerance.trials import KILLED, Case, Trials, at, differences, interrupted
from tests.tiers import daily

pytestmark = pytest.mark.slow

# In the second epoch.
KILL = at(9)
# And then again in the third.
KILLS = (KILL, at(5))
EARLY_KILLS = (at(4), at(2))
BACKUP = {"save_freq": 4, "asynchronous": False}


def resumed(name: str, data: str, *kills: dict, **options) -> Case:
    return interrupted(name, Job().light.with_(data=data, **{"backup": BACKUP, **options}), *(kills or KILLS[:1]))


CASES = [
    resumed("arrays", "arrays", *KILLS),
    resumed("shuffle", "shuffle", *KILLS),
    resumed("filter", "filter", *KILLS),
    resumed("PyDataset", "PyDataset", *KILLS),
    resumed("PyDataset, reshuffled", "PyDataset, reshuffled", *KILLS),
    *(
        resumed(name, name)
        for name in (
            "cache",
            "random map",
            "shuffle twice",
        )
    ),
    resumed("repeat", "repeat", fit={"steps_per_epoch": 12}),
    resumed("finite, executions of several steps", "shuffle", *EARLY_KILLS, fit={"steps_per_epoch": 6}, epochs=5),
    resumed("unknown size, killed in the first epoch", "filter", at(4)),
    resumed("part of a shuffled validation", "shuffle", KILL, validation="shuffle", fit={"validation_steps": 2}),
    resumed("shuffled validation", "shuffle", *KILLS, at(2, "on_test_batch_begin"), validation="shuffle"),
]


def epochs_of(run: Ended) -> list[list[int]]:
    rows = run.result["fit 1: observer/rows"]
    return [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]


@pytest.mark.parametrize("case", daily(CASES, "shuffle"), ids=str)
def test_kill(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED] * (len(case.jobs) - 1) + [0]
    assert outcome.differences == []
    job = case.jobs[-1]
    if not job.fit and job.data != "filter":
        epochs = epochs_of(outcome.runs[-1])
        assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * job.epochs
        if job.data in ("shuffle", "cache", "random map", "PyDataset", "PyDataset, reshuffled"):
            assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


OWN = Job().light.with_(data="shuffle", backup={**BACKUP, "of_epoch": True})
DATASET_FN = interrupted("dataset_fn", OWN, *KILLS, reference=OWN)
UNORDERED = [
    Job().light.with_(data=data, backup=BACKUP, validation=validation)
    for data, validation in (("unordered", ""), ("unordered, cache", "unordered"))
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case", [DATASET_FN, *(interrupted(job.data, job, *KILLS, reference=job) for job in UNORDERED)], ids=str
)
def test_what_the_backup_decides(case: Case, trials: Trials) -> None:
    """A function of the epoch, or an order for data without one: the uninterrupted run has a backup, too."""
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, KILLED, 0]
    assert outcome.differences == []
    epochs = epochs_of(outcome.runs[-1])
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


@pytest.mark.nightly
@pytest.mark.parametrize("data", ["unordered", "PyDataset"])
def test_continuations_of_one_backup_without_a_seed(trials: Trials, data: str) -> None:
    """Without a seed two runs differ, but not two continuations of one backup."""
    job = Job().light.with_(data=data, seed=None, backup={"save_freq": 4, "asynchronous": False})
    folder = trials.folder / f"{data} without a seed"
    killed = trials.jobs.run(job.with_(kill=KILL), folder)
    assert killed.code == KILLED, killed.log
    shutil.copytree(folder, trials.folder / f"{data} again")
    started = [trials.jobs.start(job, folder), trials.jobs.start(job, trials.folder / f"{data} again")]
    one, another = (process.wait() for process in started)
    assert (one.code, another.code) == (0, 0), one.log + another.log
    assert differences(one, another) == []
    assert "goes on at step 9 of epoch 2" in one.log
    epochs = epochs_of(one)
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4
