"""Which failures are worth a restart."""

from __future__ import annotations

import pytest

from tfdist.launcher.failure import Failure
from tfdist.launcher.restarts import GiveUp, Incident, Outcome, Recovery, Replacement, Restart, RestartPolicy
from tfdist.supervision.progress import Progress

KILLED = Failure("worker 1", -9)
HUNG = Failure("worker 1", 124, hang="stands still")
RAISED = Failure("worker 1", 1, ("ValueError: no such column",))


def reached(step: int, phase: str = "training", resumed: int | None = None) -> Progress:
    return Progress(1.0, 1, phase, step, resumed)


def incident(step: int, failure: Failure = KILLED, **changed) -> Incident:
    values = {
        "trains": True,
        "progress": {"worker 0": reached(step), "worker 1": reached(step)},
        "progressed": True,
        "workers": 2,
        "at": 100.0,
        **changed,
    }
    return Incident(failure, **values)


def delays(policy: RestartPolicy, *incidents: Incident) -> list[float | str]:
    return [
        decision.delay if isinstance(decision, Restart) else decision.reason
        for decision in map(policy.decide, incidents)
    ]


def test_a_failure_after_progress_is_followed_by_a_restart_at_once() -> None:
    policy = RestartPolicy(3)
    assert policy.decide(incident(10)) == Restart(1, 2, 0.0)
    assert policy.decide(incident(20)) == Restart(2, 2, 0.0)
    assert policy.used == 2


def test_failures_without_progress_are_followed_less_and_less_often() -> None:
    in_vain = [incident(step, progressed=False) for step in range(8)]
    assert delays(RestartPolicy(99), *in_vain) == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_progress_makes_the_next_delay_short_again() -> None:
    assert delays(
        RestartPolicy(99),
        incident(1, progressed=False),
        incident(2, progressed=False),
        incident(9),
        incident(10, progressed=False),
    ) == [1.0, 2.0, 0.0, 1.0]


def test_the_limit() -> None:
    used_up = "not restarted: {} used up (--max-restarts)"
    assert delays(RestartPolicy(1), incident(1), incident(2)) == [0.0, used_up.format("1 restart")]
    assert delays(RestartPolicy(2), *map(incident, (1, 2, 3))) == [0.0, 0.0, used_up.format("2 restarts")]


def test_the_same_step_twice() -> None:
    again = "not restarted: it failed at step 7 for the second time in a row"
    assert delays(RestartPolicy(9), incident(7), incident(7, RAISED)) == [0.0, again]
    assert delays(RestartPolicy(9), incident(7), incident(9), incident(7)) == [0.0, 0.0, 0.0]


def test_before_the_first_step_twice() -> None:
    first, second = (incident(0, failure, progressed=False) for failure in (KILLED, RAISED))
    assert delays(RestartPolicy(9), first, second) == [
        1.0,
        "not restarted: it failed before its first step for the second time in a row",
    ]


def test_a_host_that_is_lost_again_says_nothing_about_the_program() -> None:
    lost = Failure("worker 1", 255, lost="host two is lost")
    start = dict.fromkeys(("worker 0", "worker 1"))
    before_training = incident(0, lost, progress=start, progressed=False)
    assert delays(RestartPolicy(3), incident(7), *[before_training] * 3) == [
        0.0,
        1.0,
        2.0,
        "not restarted: 3 restarts used up (--max-restarts)",
    ]
    assert delays(RestartPolicy(9), incident(7, lost), incident(7), incident(7)) == [
        0.0,
        0.0,
        "not restarted: it failed at step 7 for the second time in a row",
    ]


def test_whatever_ran_on_a_host_that_is_lost() -> None:
    of_the_host, alone = Failure("evaluator 0", 255, lost="host two is lost"), Failure("evaluator 0", -9)
    again = "not restarted: it is not one of the training processes"
    assert delays(RestartPolicy(3), incident(7, of_the_host, trains=False)) == [0.0]
    assert delays(RestartPolicy(3), incident(7, alone, trains=False)) == [again]


def test_the_same_step_with_fewer_workers_is_another_attempt() -> None:
    policy = RestartPolicy(9, min_workers=1)
    assert policy.decide(incident(7, workers=3)) == Restart(1, 2, 0.0)
    assert policy.decide(incident(7, workers=2)) == Restart(2, 1, 0.0)
    assert isinstance(policy.decide(incident(7, workers=1)), Restart)
    assert isinstance(policy.decide(incident(7, workers=1)), GiveUp)


def test_the_same_exception_without_progress() -> None:
    again = "not restarted: it failed with the same exception again, before a single step was done"
    assert delays(RestartPolicy(9), incident(7, RAISED), incident(5, RAISED, progressed=False)) == [0.0, again]
    assert delays(RestartPolicy(9), incident(7, RAISED), incident(9, RAISED)) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("policy", "what", "reason"),
    [
        (RestartPolicy(0), incident(5), ""),
        (RestartPolicy(3), incident(0, progress={"worker 0": None, "worker 1": None}, progressed=False), ""),
        (
            RestartPolicy(3),
            incident(0, Failure("worker 1", 78), progressed=False),
            "not restarted: exit code 78 says that it would fail again",
        ),
        (RestartPolicy(3), incident(5, trains=False), "not restarted: it is not one of the training processes"),
        (
            RestartPolicy(3),
            incident(5, RAISED, progress={"worker 1": reached(5, "done")}),
            "not restarted: its last fit had ended, what failed came after that",
        ),
    ],
    ids=["limit 0", "never reported", "refused", "other job", "after the training"],
)
def test_not_worth_a_restart(policy: RestartPolicy, what: Incident, reason: str) -> None:
    assert policy.decide(what) == GiveUp(reason)


def test_a_process_killed_after_its_training_is_replaced_for_the_sake_of_the_others() -> None:
    assert delays(RestartPolicy(3), incident(5, progress={"worker 1": reached(5, "done")})) == [0.0]


@pytest.mark.parametrize(
    ("failure", "fewest", "workers", "left"),
    [(KILLED, 1, 3, 2), (HUNG, 1, 3, 2), (RAISED, 1, 3, 3), (KILLED, 3, 3, 3), (KILLED, None, 3, 3)],
)
def test_who_is_lost_is_not_replaced_in_an_elastic_run(
    failure: Failure, fewest: int | None, workers: int, left: int
) -> None:
    assert RestartPolicy(3, fewest).decide(incident(5, failure, workers=workers)) == Restart(1, left, 0.0)


def test_a_process_without_steps_of_its_own_fails_at_those_of_the_run() -> None:
    what = incident(0, progress={"worker 0": reached(12), "worker 1": None})
    assert (what.step, what.cause) == (12, "worker 1 was killed by SIGKILL at step 12")


def test_recovery() -> None:
    recovery = Recovery(incident(123, workers=3), Restart(1, 2, 0.0), 3)
    assert recovery.name == "restart 1 of 3 with 2 workers"
    for progress, complete in (
        ({"worker 0": None, "worker 1": None}, False),
        ({"worker 0": reached(116, "starting", 116), "worker 1": None}, False),
        ({"worker 0": reached(117, resumed=116), "worker 1": reached(116, "starting", 116)}, False),
        ({"worker 0": reached(117, resumed=116), "worker 1": reached(117, resumed=116)}, True),
        ({"worker 0": reached(1), "worker 1": reached(1)}, True),
    ):
        assert recovery.is_complete(progress) is complete
    outcome = recovery.outcome({"worker 0": reached(117, resumed=116), "worker 1": None}, 103.42)
    assert outcome == Outcome(restart=1, seconds=3.42, resumed_step=116, steps_redone=7)


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome(1, 3.42, 116, 7), "training again after 3.4 s, 7 steps redone"),
        (Outcome(1, 0.06, 116, 1), "training again after 0.1 s, 1 step redone"),
        (
            Outcome(1, 9, 0, 5),
            "training again after 9.0 s, 5 steps redone: from the beginning, since no backup was resumed",
        ),
    ],
)
def test_outcome(outcome: Outcome, text: str) -> None:
    assert str(outcome) == text


def test_a_hang_is_told_without_repeating_the_step() -> None:
    assert incident(5, HUNG).cause == "worker 1 stands still"


def test_a_worker_is_replaced_at_once_and_after_short_lives_less_and_less_often() -> None:
    policy = RestartPolicy(99)
    lives = [0.1, 0.1, 5.0, 29.9, 31.0, 0.1]
    assert [policy.replace("worker 1", lived).delay for lived in lives] == [0.0, 1.0, 2.0, 4.0, 0.0, 1.0]
    assert [policy.replace("worker 0", 0.1).delay for _ in range(7)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]


def test_replacements_and_restarts_share_the_limit() -> None:
    policy = RestartPolicy(3)
    assert policy.replace("worker 1", 60.0) == Replacement(1, 0.0)
    assert policy.decide(incident(5)) == Restart(2, 2, 0.0)
    assert policy.replace("worker 0", 60.0) == Replacement(3, 0.0)
    assert policy.replace("worker 1", 60.0) is None
    assert policy.decide(incident(9)) == GiveUp("not restarted: 3 restarts used up (--max-restarts)")
    assert RestartPolicy(0).replace("worker 1", 60.0) is None
