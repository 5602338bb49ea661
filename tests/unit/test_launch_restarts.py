"""Which process is to blame, and which failures are worth a restart."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from tfdist.launcher.policy import (
    Failure,
    GiveUp,
    Incident,
    Outcome,
    Overdue,
    Recovery,
    Restart,
    RestartPolicy,
    Watchdog,
    choose,
    suspect,
)
from tfdist.supervision.progress import Progress

UNAVAILABLE = Failure(
    "worker 0",
    1,
    (
        "Traceback (most recent call last):",
        "tensorflow.python.framework.errors_impl.UnavailableError: {{function_node f}} Collective ops is aborted by:",
        "Additional GRPC error information from remote target /job:worker/replica:0/task:1: [Op:f]",
    ),
)
OWN = Failure("worker 1", 1, ("Traceback (most recent call last):", "ValueError: no such column"))
SILENT = Failure("worker 2", 3)
SIGNALLED = Failure("worker 3", -signal.SIGKILL)


@pytest.mark.parametrize(
    ("failures", "chosen"),
    [
        ([OWN], OWN),
        ([OWN, UNAVAILABLE], OWN),
        ([UNAVAILABLE, OWN], OWN),
        ([UNAVAILABLE, SILENT], SILENT),
        ([UNAVAILABLE, SIGNALLED], SIGNALLED),
        ([SILENT, OWN], SILENT),
        ([UNAVAILABLE, UNAVAILABLE], UNAVAILABLE),
    ],
)
def test_choice(failures: list[Failure], chosen: Failure) -> None:
    assert choose(failures) is chosen


@pytest.mark.parametrize(
    ("line", "consequence"),
    [
        ("tensorflow.python.framework.errors_impl.AbortedError: x", True),
        ("UnavailableError: x", True),
        ("errors_impl.CancelledError", True),
        ("tensorflow.python.framework.errors_impl.InvalidArgumentError: x", False),
        ("my.UnavailableErrorInWords", False),
        ("the server said UnavailableError: gone", False),
        ("KeyboardInterrupt", False),
    ],
)
def test_consequence(line: str, consequence: bool) -> None:
    assert Failure("worker 0", 1, ("before", line, "after")).is_consequence is consequence


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (OWN, "worker 1 failed with exit code 1 (ValueError: no such column)"),
        (SILENT, "worker 2 failed with exit code 3"),
        (SIGNALLED, "worker 3 was killed by SIGKILL"),
        (Failure("worker 1", 124, hang="stands still at step 3"), "worker 1 stands still at step 3"),
        (
            Failure("worker 1", 1, ("ValueError: " + "x" * 500,)),
            f"worker 1 failed with exit code 1 (ValueError: {'x' * 148}…)",
        ),
    ],
)
def test_cause(failure: Failure, text: str) -> None:
    assert failure.cause == text


def at(time: float, phase: str = "training", step: int = 1, reports: int | None = None) -> Progress:
    return Progress(time, reports if reports is not None else round(time * 1000) + 1, phase, step)


def overdue_after(watchdog: Watchdog, progress: Progress) -> float:
    """How many seconds after the report it is overdue, looking every half second."""
    for tick in range(1, 4000):
        if watchdog.overdue({"worker 0": progress}, progress.time + tick / 2):
            return (tick - 1) / 2
    return float("inf")


def taught(*gaps: tuple[str, float], hang_timeout: float | None = None) -> tuple[Watchdog, float]:
    """A watchdog that has seen silences of these lengths, and the time at which the last of them ended."""
    watchdog, now = Watchdog(hang_timeout, 600.0), 1000.0
    for phase, gap in gaps:
        progress = at(now, phase)
        for tick in range(round(gap * 2)):
            watchdog.overdue({"worker 0": progress}, now + tick / 2)
        now += gap
    return watchdog, now


@pytest.mark.parametrize(
    ("gaps", "phase", "limit"),
    [
        ([], "starting", 600.0),
        ([("starting", 90.0)], "training", 600.0),
        ([("starting", 1.0), ("training", 0.5)], "training", 30.0),
        ([("starting", 1.0), ("training", 5.0)], "training", 50.0),
        ([("starting", 40.0), ("training", 0.5)], "training", 80.0),
        ([("starting", 1.0), ("training", 0.5)], "validating", 600.0),
        ([("starting", 1.0), ("training", 0.5), ("saving", 8.0)], "saving", 80.0),
        ([("starting", 1.0), ("training", 0.5), ("done", 0.5)], "done", float("inf")),
    ],
)
def test_limits_follow_what_was_seen(gaps: list[tuple[str, float]], phase: str, limit: float) -> None:
    watchdog, now = taught(*gaps)
    assert overdue_after(watchdog, at(now, phase)) == limit


def test_seconds_on_request_hold_for_all_but_the_start() -> None:
    for phase, limit in (("starting", 600.0), ("training", 5.0), ("validating", 5.0), ("saving", 5.0)):
        watchdog, now = taught(("starting", 1.0), ("training", 9.0), hang_timeout=5.0)
        assert overdue_after(watchdog, at(now, phase)) == limit


def test_a_program_that_has_not_reported_is_watched_only_if_it_is_known_to_train() -> None:
    nothing = {"worker 0": None, "worker 1": None}
    assert Watchdog(1.0, 10.0).overdue(nothing, 1e6) is None
    assert Watchdog(1.0, 10.0, due=100.0).overdue(nothing, 110.0) is None
    assert Watchdog(1.0, 10.0, due=100.0).overdue(nothing, 111.0) == Overdue("worker 0", 11.0, True)


def test_a_silence_that_has_a_reason_does_not_count() -> None:
    watchdog = Watchdog(5.0, 600.0)
    progress = {"worker 0": at(100.0)}
    for now in (101.0, 105.0):
        assert watchdog.overdue(progress, now) is None
    watchdog.excuse(105.5)
    for now in (108.0, 110.5):
        assert watchdog.overdue(progress, now) is None
    assert watchdog.overdue(progress, 110.6) == Overdue("worker 0", pytest.approx(5.1), False)


@pytest.mark.parametrize("reason", ["excused", "the launcher was stopped"])
def test_a_silence_that_has_a_reason_is_not_usual_from_then_on(reason: str) -> None:
    watchdog = Watchdog(None, 600.0)
    for time in (100.0, 101.0, 300.0, 301.0):
        if time == 300.0 and reason == "excused":
            for now in range(102, 300):
                watchdog.excuse(now)
                watchdog.overdue({"worker 0": at(101.0)}, now)
        assert watchdog.overdue({"worker 0": at(time)}, time) is None
    assert watchdog.limit("training") == 30.0


def test_time_in_which_the_launcher_was_stopped_does_not_count() -> None:
    watchdog = Watchdog(10.0, 600.0)
    seen = {"worker 0": at(100.0)}
    assert watchdog.overdue(seen, 101.0) is None
    assert watchdog.overdue(seen, 500.0) is None
    for second in range(1, 11):
        assert watchdog.overdue(seen, 500.0 + second) is None
    found = watchdog.overdue(seen, 511.0)
    assert found == Overdue("worker 0", 11.0, False)


TRAINING = Overdue("worker 0", 30.25, False)
STARTING = Overdue("worker 0", 600.5, True)
NO_PROGRESS = "no progress for 30.2 s (--hang-timeout)"


@pytest.mark.parametrize(
    ("seen", "states", "name", "text"),
    [
        (
            {"worker 0": at(5.0, step=7), "worker 1": at(5.0, step=8)},
            {"worker 0": "sleeping", "worker 1": "stopped"},
            "worker 1",
            f"is stopped (process state T): {NO_PROGRESS}",
        ),
        (
            {"worker 0": at(5.0, step=8), "worker 1": at(5.0, step=7), "worker 2": at(5.0, step=8)},
            {},
            "worker 1",
            f"stands still at step 7 while others have reached step 8: {NO_PROGRESS}",
        ),
        (
            {"worker 0": at(5.0, step=8), "worker 1": at(3.5, step=8)},
            {},
            "worker 1",
            f"stands still at step 8 and was the first to fall silent: {NO_PROGRESS}",
        ),
        (
            {"worker 0": at(5.0, step=8), "worker 1": at(4.9, step=8)},
            {},
            "worker 0",
            f"stands still at step 8, as do all others, so that the cause may be any of them: {NO_PROGRESS}",
        ),
        (
            {"worker 0": at(5.0, step=8), "worker 1": at(1.0, "done", step=3)},
            {},
            "worker 0",
            f"stands still at step 8, while worker 1 has ended its fit at step 3: {NO_PROGRESS}",
        ),
        ({"worker 0": at(5.0, step=8)}, {}, "worker 0", f"stands still at step 8: {NO_PROGRESS}"),
    ],
    ids=["stopped", "behind", "silent first", "together", "others are done", "alone"],
)
def test_suspect(seen: dict, states: dict, name: str, text: str) -> None:
    assert suspect(TRAINING, seen, states) == (name, text)


CALL, EPOCH = "start fit, evaluate or predict", "finish the epoch"


@pytest.mark.parametrize(
    ("waits", "text"),
    [
        ([CALL, ""], f"worker 0 waits for the others to {CALL}, and worker 1 does not come to that"),
        (["", CALL, ""], f"worker 1 waits for the others to {CALL}, and worker 0, worker 2 do not come to that"),
        ([CALL, EPOCH], f"worker 0 waits for the others to {CALL} and worker 1 waits for the others to {EPOCH}"),
        ([EPOCH, EPOCH, ""], f"worker 0, worker 1 wait for the others to {EPOCH}, and worker 2 does not come to that"),
    ],
)
def test_the_call_that_some_are_in_is_named(waits: list[str], text: str) -> None:
    seen = {f"worker {i}": dataclasses.replace(at(5.0, step=8), waits_to=one) for i, one in enumerate(waits)}
    _, said = suspect(TRAINING, seen, {})
    assert said == (
        f"stands still at step 8, as do all others: {text}. Look for a call that only some processes make, in a "
        f"callback, say: {NO_PROGRESS}"
    )


@pytest.mark.parametrize("seen", [{"worker 0": at(5.0, "starting", 0), "worker 1": None}, {"worker 1": None}])
def test_who_has_not_begun_is_suspected_at_the_start(seen: dict) -> None:
    says = "has not begun to train: no progress for 600 s (--start-timeout)"
    assert suspect(STARTING, seen, {}) == ("worker 1", says)


KILLED = Failure("worker 1", -9)
HUNG = Failure("worker 1", 124, hang="stands still")
RAISED = Failure("worker 1", 1, ("ValueError: no such column",))


def reached(step: int, phase: str = "training", resumed: int | None = None) -> Progress:
    return Progress(1.0, 1, phase, step, resumed)


def incident(step: int, failure: Failure = KILLED, **changed) -> Incident:
    values = {
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


def test_the_same_step_with_fewer_workers_is_another_attempt() -> None:
    policy = RestartPolicy(9, min_workers=1)
    assert policy.decide(incident(7, workers=3)) == Restart(1, 2, 0.0)
    assert policy.decide(incident(7, workers=2)) == Restart(2, 1, 0.0)
    assert isinstance(policy.decide(incident(7, workers=1)), Restart)
    assert isinstance(policy.decide(incident(7, workers=1)), GiveUp)


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
    recovery = Recovery(incident(123, workers=3), Restart(1, 2, 0.0), "1 of 3")
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


def test_a_worker_is_replaced_at_once_and_after_short_lives_less_and_less_often() -> None:
    policy = RestartPolicy(99)
    lives = [0.1, 0.1, 5.0, 29.9, 31.0, 0.1]
    assert [policy.replace("worker 1", lived)[1] for lived in lives] == [0.0, 1.0, 2.0, 4.0, 0.0, 1.0]
    assert [policy.replace("worker 0", 0.1)[1] for _ in range(7)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]


def test_replacements_and_restarts_share_the_limit() -> None:
    policy = RestartPolicy(3)
    assert policy.replace("worker 1", 60.0) == (1, 0.0)
    assert policy.decide(incident(5)) == Restart(2, 2, 0.0)
    assert policy.replace("worker 0", 60.0) == (3, 0.0)
    assert policy.replace("worker 1", 60.0) is None
    assert policy.decide(incident(9)) == GiveUp("not restarted: 3 restarts used up (--max-restarts)")
    assert RestartPolicy(0).replace("worker 1", 60.0) is None
