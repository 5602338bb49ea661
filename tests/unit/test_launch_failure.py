"""Which process is to blame: of several failed ones, and of those that stand still."""

from __future__ import annotations

import signal

import pytest

from tfdist.launcher.failure import Failure, Overdue, Watchdog, choose, exit_code, signal_name, suspect
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
KILLED = Failure("worker 3", -signal.SIGKILL)


@pytest.mark.parametrize(
    ("failures", "chosen"),
    [
        ([OWN], OWN),
        ([OWN, UNAVAILABLE], OWN),
        ([UNAVAILABLE, OWN], OWN),
        ([UNAVAILABLE, SILENT], SILENT),
        ([UNAVAILABLE, KILLED], KILLED),
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


def test_the_last_exception_counts() -> None:
    tail = (
        "UnavailableError: first",
        "During handling of the above exception, another exception occurred:",
        "KeyError: 1",
    )
    assert not Failure("worker 0", 1, tail).is_consequence
    assert Failure("worker 0", 1, tail[::-1]).is_consequence


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (SILENT, 3, "worker 2 failed with exit code 3"),
        (Failure("chief 0", -signal.SIGSEGV), 139, "chief 0 was killed by SIGSEGV (exit code 139)"),
        (KILLED, 137, "worker 3 was killed by SIGKILL (exit code 137; the kernel does that when memory runs out)"),
    ],
)
def test_wording(failure: Failure, code: int, text: str) -> None:
    assert failure.exit_code == code
    assert str(failure) == text


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (OWN, "worker 1 failed with exit code 1 (ValueError: no such column)"),
        (SILENT, "worker 2 failed with exit code 3"),
        (KILLED, "worker 3 was killed by SIGKILL"),
        (Failure("worker 1", 124, hang="stands still at step 3"), "worker 1 stands still at step 3"),
        (
            Failure("worker 1", 1, ("ValueError: " + "x" * 500,)),
            f"worker 1 failed with exit code 1 (ValueError: {'x' * 148}…)",
        ),
    ],
)
def test_cause(failure: Failure, text: str) -> None:
    assert failure.cause == text


def test_a_hang_is_reported_as_one() -> None:
    failure = Failure("worker 1", 124, ("a",), "log", hang="stands still at step 3")
    assert failure.report().startswith("worker 1 stands still at step 3; its last lines:\n  a\n")
    assert failure.exit_code == 124


def test_report() -> None:
    assert Failure("worker 1", 3, ("a", "b"), "logs/worker-1.log").report() == (
        "worker 1 failed with exit code 3; its last lines:\n  a\n  b\ntfdist: its complete log: logs/worker-1.log"
    )
    long = Failure("worker 1", 3, tuple(f"line {number}" for number in range(50))).report()
    assert "last lines:\n  line 30\n" in long
    assert "(it printed nothing)" in SILENT.report()
    shown = Failure("worker 0", 3, ("a", "b"), "logs/worker-0.log", was_shown=True).report()
    assert (
        shown
        == "worker 0 failed with exit code 3; its last lines are above\ntfdist: its complete log: logs/worker-0.log"
    )


def test_codes_and_names() -> None:
    assert [exit_code(status) for status in (0, 7, -2, -15)] == [0, 7, 130, 143]
    assert signal_name(15) == "SIGTERM"
    assert signal_name(99) == "signal 99"


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


def test_nobody_is_left() -> None:
    assert Watchdog(1.0, 10.0, due=100.0).overdue({}, 1e6) is None


def test_a_silence_that_has_a_reason_does_not_count() -> None:
    watchdog = Watchdog(5.0, 600.0)
    progress = {"worker 0": at(100.0)}
    for now in (101.0, 105.0):
        assert watchdog.overdue(progress, now) is None
    watchdog.excuse(105.5)
    for now in (108.0, 110.5):
        assert watchdog.overdue(progress, now) is None
    assert watchdog.overdue(progress, 110.6) == Overdue("worker 0", pytest.approx(5.1), False)


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
    found = suspect(TRAINING, seen, states)
    assert (found.name, found.text) == (name, text)


@pytest.mark.parametrize("seen", [{"worker 0": at(5.0, "starting", 0), "worker 1": None}, {"worker 1": None}])
def test_who_has_not_begun_is_suspected_at_the_start(seen: dict) -> None:
    found = suspect(STARTING, seen, {})
    assert (found.name, found.text) == ("worker 1", "has not begun to train: no progress for 600 s (--start-timeout)")
