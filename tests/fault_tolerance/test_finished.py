"""A fit that has finished, in a script that is started again."""

from __future__ import annotations

import pytest

from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import Case, Trials, at
from tests.tiers import daily

pytestmark = pytest.mark.slow

STOPPED = Job(backup={})
WHOLE = Job(backup={"save_freq": 4}).light
SEVERAL = WHOLE.with_(fits=2, epochs=2)
KEPT = [
    Case("stopped early", (STOPPED, STOPPED, STOPPED)),
    Case("after its last epoch", (WHOLE, WHOLE)),
    Case("several fits", (SEVERAL, SEVERAL)),
]


@pytest.mark.parametrize("case", daily(KEPT, "several fits"), ids=str)
def test_returns_at_once_with_all_of_its_history(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [0] * len(case.jobs)
    assert outcome.steps[1:] == [0] * (len(case.jobs) - 1)
    assert outcome.differences == []
    assert outcome.log.count("The fit is finished: ") == case.jobs[0].fits


@pytest.mark.parametrize("case", [Case("deleted", (Job(backup={"delete_checkpoint": True}).light,) * 2)], ids=str)
def test_trains_anew_if_the_backup_is_deleted(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [0, 0]
    assert outcome.steps[0] == outcome.steps[1] == outcome.reference.result["steps of this process"]
    assert outcome.differences == []
    assert not (outcome.folder / "backup").exists()


DELETED = Job(backup={"delete_checkpoint": True}, fits=2, epochs=2).light.with_(epochs=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [Case("several deleted", (DELETED,))], ids=str)
def test_no_folder_of_a_deleted_fit_stays(case: Case, trials: Trials) -> None:
    outcome = trials.outcome(case)
    assert outcome.codes == [0]
    assert not (outcome.folder / "backup").exists()


KILL = at(9)


@pytest.mark.parametrize("keep", daily([1, 2], "2"))
def test_as_many_backups_stay_as_are_to_be_kept(trials: Trials, keep: int) -> None:
    job = WHOLE.with_(backup={"save_freq": 1, "max_to_keep": keep})
    outcome = trials.outcome(Case(f"keep {keep}", (job.with_(kill=KILL), job)))
    assert outcome.codes == [-9, 0]
    assert len(list((outcome.folder / "backup").iterdir())) == keep
