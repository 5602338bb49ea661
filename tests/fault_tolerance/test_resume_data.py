"""All kinds of data whose position can be found again: each row is read once an epoch, in the uninterrupted order."""

from __future__ import annotations

import pytest

from tests.fault_tolerance.job import ROWS, Job
from tests.fault_tolerance.trials import KILLED, Case, Trials, at, interrupted
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
    resumed("arrays in order", "arrays", fit={"shuffle": False}),
    resumed("arrays with steps_per_epoch", "arrays", *EARLY_KILLS, fit={"steps_per_epoch": 6}),
    resumed("shuffle", "shuffle", *KILLS),
    resumed("filter", "filter", *KILLS),
    resumed("PyDataset", "PyDataset", *KILLS),
    resumed("PyDataset, reshuffled", "PyDataset, reshuffled", *KILLS),
    *(
        resumed(name, name)
        for name in (
            "dataset in order",
            "shuffle once",
            "cache",
            "interleave",
            "map",
            "random map",
            "PyDataset, 2 workers",
        )
    ),
    resumed("repeat", "repeat", fit={"steps_per_epoch": 12}),
    resumed("finite, several epochs a pass", "shuffle", fit={"steps_per_epoch": 5}, epochs=6, steps_per_execution=1),
    resumed("finite, executions of several steps", "shuffle", *EARLY_KILLS, fit={"steps_per_epoch": 6}, epochs=5),
    resumed("PyDataset in order", "PyDataset", fit={"shuffle": False}),
    resumed("killed in the first epoch", "shuffle", at(4)),
    resumed("unknown size, killed in the first epoch", "filter", at(4)),
    resumed("shuffled validation", "shuffle", *KILLS, at(2, "on_test_batch_begin"), validation="shuffle"),
    resumed("saved at ends of epochs", "shuffle", backup={}),
    resumed("unknown size, saved at ends of epochs", "filter", backup={}),
    resumed("repeat, saved at ends of epochs", "repeat", fit={"steps_per_epoch": 12}, backup={}),
    resumed("PyDataset, saved at ends of epochs", "PyDataset, reshuffled", backup={}),
    resumed("several fits", "shuffle", {**at(7), "fit": 2}, fits=2, epochs=2),
]


# One of each kind of data.
DAILY = ("arrays", "shuffle", "repeat")


@pytest.mark.parametrize("case", daily(CASES, *DAILY), ids=str)
def test_kill(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED] * (len(case.jobs) - 1) + [0]
    assert outcome.differences == []


@pytest.mark.parametrize(
    "case",
    daily(
        [case for case in CASES if "steps_per_epoch" not in case.jobs[-1].fit and case.jobs[-1].data != "filter"],
        "arrays",
        "shuffle",
    ),
    ids=str,
)
def test_every_row_once_an_epoch(case: Case, trials: Trials) -> None:
    rows = trials.outcome(case).runs[-1].result["fit 1: observer/rows"]
    epochs = [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * case.jobs[-1].epochs
    shuffles_again = case.jobs[-1].data in ("shuffle", "cache", "random map", "PyDataset", "PyDataset, reshuffled")
    if shuffles_again and not case.jobs[-1].fit:
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


OWN = Job().light.with_(data="shuffle", backup={**BACKUP, "of_epoch": True})
DATASET_FN = interrupted("dataset_fn", OWN, *KILLS, reference=OWN)


@pytest.mark.parametrize("case", [DATASET_FN], ids=str)
def test_a_function_of_the_epoch(case: Case, trials: Trials) -> None:
    """It exists with the callback only: the uninterrupted run has one, too."""
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, KILLED, 0]
    assert outcome.differences == []
    rows = outcome.runs[-1].result["fit 1: observer/rows"]
    epochs = [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
