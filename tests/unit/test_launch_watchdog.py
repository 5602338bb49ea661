"""When a silence counts as a hang, and which process it is put down to."""

from __future__ import annotations

import pytest

from tfdist.launch.watchdog import Overdue, Watchdog, suspect
from tfdist.supervision.progress import Progress


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
            {"worker 0": "S", "worker 1": "T"},
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
