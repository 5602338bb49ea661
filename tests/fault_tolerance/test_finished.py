"""A fit that has finished, in a script that is started again."""

from __future__ import annotations

import pytest

from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import Case, Trials

pytestmark = pytest.mark.slow

WHOLE = Job(backup={"save_freq": 4}).light
SEVERAL = WHOLE.with_(fits=2, epochs=2)


def test_returns_at_once_with_all_of_its_history(trials: Trials) -> None:
    outcome = trials.outcome(Case("several fits", (SEVERAL, SEVERAL)))
    assert (outcome.codes, outcome.steps[1]) == ([0, 0], 0)
    assert outcome.differences == []
    assert outcome.log.count("The fit is finished: ") == 2
