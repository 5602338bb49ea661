"""Damaged backups in `fit`: the previous one is used and nothing is lost; if there is none, an error and no loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault_tolerance.job import Job
from tests.fault_tolerance.test_store_damage import DAMAGES, FILES, empty
from tests.fault_tolerance.trials import KILLED, Case, Trials, at, interrupted
from tests.tiers import daily

pytestmark = pytest.mark.slow

JOB = Job(backup={"save_freq": 1, "asynchronous": False}).light.with_(epochs=3)
KILL = at(9)


def newest(count: int, damage: Callable[[Path], None], file: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for checkpoint in sorted((folder / "backup").glob("checkpoint-*"))[-count:]:
            damage(checkpoint / file)

    return apply


CASES = [
    interrupted(f"{damage.__name__} {file}", JOB, KILL, between=newest(1, damage, file))
    for damage, file in zip(DAMAGES, (*FILES, "state.data-00000-of-00001"), strict=True)
]


@pytest.mark.parametrize("case", daily(CASES, CASES[0].name), ids=str)
def test_newest_is_damaged(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, 0]
    # Saved after each of 8 executions; the fifth one is the end of the first epoch.
    assert outcome.log.count("UserWarning: The checkpoint ") == 1
    assert "backup/checkpoint-00000008 is damaged: " in outcome.log
    assert "checkpoint-00000007 is used instead" in outcome.log
    assert outcome.steps[1] == 15 - 7
    assert outcome.differences == []


ALL = Case("all are damaged", (JOB.with_(kill=KILL), JOB), between=newest(3, empty, FILES[0]))


@pytest.mark.parametrize("case", [ALL], ids=str)
def test_all_are_damaged(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [KILLED, 1]
    folder = outcome.folder / "backup"
    names = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert len(names) == 3
    reasons = "".join(f"\n  {name}: {FILES[0]} has 0 bytes instead of" for name in reversed(names))
    assert (
        f"DamagedBackupsError: {folder} holds 3 checkpoint(s), but none that is complete and unaltered:" in outcome.log
    )
    assert all(reason in outcome.log for reason in reasons.split("\n"))
    assert outcome.log.rstrip().endswith(f"begin the training anew, move the folder away: mv {folder} {folder}.damaged")
    assert outcome.steps[1] == 0
