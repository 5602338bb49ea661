"""Without a seed two runs differ, but not two continuations of one backup; and every row is read once an epoch."""

from __future__ import annotations

import shutil

import pytest

from tests.fault_tolerance.job import ROWS, Job
from tests.fault_tolerance.trials import KILLED, Trials, at, differences
from tests.tiers import daily

pytestmark = pytest.mark.slow

KILL = at(9)


@pytest.mark.parametrize(
    ("data", "known"),
    daily(
        [
            ("arrays", 4),
            # The order of the following epochs is not drawn yet, and no seed says what it will be.
            ("shuffle", 2),
            ("PyDataset", 4),
        ],
        "arrays",
    ),
)
def test_continuations_of_one_backup(trials: Trials, data: str, known: int) -> None:
    job = Job().light.with_(data=data, seed=None, backup={"save_freq": 4, "asynchronous": False})
    folder = trials.folder / data
    killed = trials.jobs.run(job.with_(kill=KILL), folder)
    assert killed.code == KILLED, killed.log
    shutil.copytree(folder, trials.folder / f"{data} again")
    started = [trials.jobs.start(job, folder), trials.jobs.start(job, trials.folder / f"{data} again")]
    one, another = (process.wait() for process in started)
    assert (one.code, another.code) == (0, 0), one.log + another.log
    if known == job.epochs:
        assert differences(one, another) == []
    orders = []
    for run in (one, another):
        assert "goes on at step 9 of epoch 2" in run.log
        rows = run.result["fit 1: observer/rows"]
        orders.append([rows[i : i + ROWS] for i in range(0, len(rows), ROWS)])
        assert [sorted(epoch) for epoch in orders[-1]] == [list(range(ROWS))] * 4
        assert len({tuple(epoch) for epoch in orders[-1]}) == 4
    assert orders[0][:known] == orders[1][:known]
    losses = [run.result["fit 1: history/loss"][:known].tolist() for run in (one, another)]
    assert losses[0] == losses[1]
