"""Backups that are damaged or cannot be written: the good one before is used, and nothing else is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault_tolerance.job import Job
from tests.fault_tolerance.test_store_damage import FILES, flip_first_bit
from tests.fault_tolerance.trials import KILLED, Trials, at, interrupted

pytestmark = pytest.mark.slow

JOB = Job(backup={"save_freq": 1, "asynchronous": False}).light.with_(epochs=3)
KILL = at(9)


def damage_the_newest(folder: Path) -> None:
    flip_first_bit(max((folder / "backup").glob("checkpoint-*")) / FILES[0])


# test_store_damage.py has the other damages and files.
@pytest.mark.nightly
def test_newest_is_damaged(trials: Trials) -> None:
    outcome = trials.outcome(interrupted("the newest is damaged", JOB, KILL, between=damage_the_newest))
    assert outcome.codes == [KILLED, 0]
    # Saved after each of 8 executions; the fifth one is the end of the first epoch.
    assert outcome.log.count("UserWarning: The checkpoint ") == 1
    assert "backup/checkpoint-00000008 is damaged: " in outcome.log
    assert "checkpoint-00000007 is used instead" in outcome.log
    assert outcome.steps[1] == 15 - 7
    assert outcome.differences == []
