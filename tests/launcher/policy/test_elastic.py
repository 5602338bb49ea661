"""Runs that go on with fewer workers."""

from __future__ import annotations

import signal

import pytest

from tests.launcher.policy.simulation import FOREVER, Life, Program, SimulatedProcess


def shrinks(losses: int, end: int) -> Program:
    """In each of its first lives the last worker ends, every time a step later."""

    def program(process: SimulatedProcess) -> Life:
        if process.restart < losses:
            yield from process.train(10 + process.restart)
            yield 0.0 if process.index == process.workers - 1 else FOREVER
            return end
        yield from process.train(20, resumed=8)
        return None

    return program


@pytest.mark.parametrize(
    ("workers", "losses", "end", "counts"),
    [
        ("1:3", 1, -9, [3, 2]),
        ("1:3", 3, -9, [3, 2, 1, 1]),
        ("2:3", 2, -9, [3, 2, 2]),
        ("3:3", 1, -9, [3, 3]),
        ("3", 1, -9, [3, 3]),
        ("1:3", 1, 3, [3, 3]),
    ],
    ids=["one fewer", "down to one", "minimum", "no range", "one number", "an error costs nobody"],
)
def test_how_many_workers_go_on(simulate, workers: str, losses: int, end: int, counts: list[int]) -> None:
    run = simulate(shrinks(losses, end), "-n", workers)
    assert run.code == 0
    starts = run.of_kind("start")
    assert [start["workers"] for start in starts] == counts
    assert [len(start["processes"]) for start in starts] == counts
    assert [event["workers"] for event in run.of_kind("restart")] == counts[1:]


def test_the_number_of_workers_is_told_when_it_changes(simulate) -> None:
    run = simulate(shrinks(2, -9), "-n", "1:3")
    again = "training again after 0.0 s"
    assert run.messages == [
        "worker 2 was killed by SIGKILL at step 10; restart 1 of 3 with 2 workers",
        f"restart 1 of 3 with 2 workers: {again}, 10 steps redone: from the beginning, since no backup was resumed",
        "worker 1 was killed by SIGKILL at step 11; restart 2 of 3 with 1 worker",
        f"restart 2 of 3 with 1 worker: {again}, 3 steps redone",
    ]
    assert simulate(shrinks(1, -9), "-n", "3:3").messages == [
        "worker 2 was killed by SIGKILL at step 10; restart 1 of 3",
        f"restart 1 of 3: {again}, 2 steps redone",
    ]


def test_a_hung_process_is_left_out(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        if process.restart == 0:
            yield from process.train(10 - process.index)
            yield FOREVER
        yield from process.train(20, resumed=8)

    run = simulate(program, "-n", "1:2", "--hang-timeout", "1")
    assert run.code == 0
    assert [start["workers"] for start in run.of_kind("start")] == [2, 1]
    assert run.messages[0].endswith("; restart 1 of 3 with 1 worker")
    assert run.messages[1].startswith("restart 1 of 3 with 1 worker: training again after ")


def grows(process: SimulatedProcess) -> Life:
    """Loses its last worker at step 10, and saves when it is asked to stop."""
    process.handlers = {signal.SIGTERM: lambda process: 77}
    if process.restart == 0:
        yield from process.train(10)
        yield 0.0 if process.index == process.workers - 1 else FOREVER
        return -9
    yield from process.train(8 + 400, resumed=8)
    return None


def test_it_grows_again(simulate) -> None:
    run = simulate(grows, "-n", "1:3", "--regrow-after", "30")
    assert run.code == 0
    assert [start["workers"] for start in run.of_kind("start")] == [3, 2, 3]
    assert [(event["restart"], event["workers"]) for event in run.of_kind("restart")] == [(1, 2), (2, 3)]
    assert run.messages == [
        "worker 2 was killed by SIGKILL at step 10; restart 1 of 3 with 2 workers",
        "restart 1 of 3 with 2 workers: training again after 0.0 s, 2 steps redone",
        "there is room for 3 workers; saving with 2 workers to start again",
        "saved at step 129; start with 3 workers",
        "start with 3 workers: training again after 0.0 s, 121 steps redone",
    ]
    asked = [name for at, name, number in run.signals if number == signal.SIGTERM]
    assert asked == ["worker 0", "worker 1"]


@pytest.mark.parametrize(
    ("options", "resumed", "counts"),
    [
        (("--regrow-after", "inf"), 8, [3, 2]),
        (("--regrow-after", "200"), 8, [3, 2]),
        (("--regrow-after", "30"), None, [3, 2]),
        (("--regrow-after", "30"), 8, [3, 2, 3]),
    ],
    ids=["never", "later than its end", "what has no backup would begin again", "and it does"],
)
def test_when_it_does_not_grow(simulate, options: tuple[str, ...], resumed: int | None, counts: list[int]) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.handlers = {signal.SIGTERM: lambda process: 77}
        yield from process.train(200, resumed=None if process.restart == 0 else resumed)
        return None

    def loses(process: SimulatedProcess) -> Life:
        if process.restart:
            return (yield from program(process))
        yield from process.train(10)
        yield 0.0 if process.index == process.workers - 1 else FOREVER
        return -9

    run = simulate(loses, "-n", "1:3", *options)
    assert run.code == 0
    assert [start["workers"] for start in run.of_kind("start")] == counts


def test_who_is_lost_again_soon_comes_later(simulate) -> None:
    """Each time that the new worker does not last, the run waits twice as long."""

    def program(process: SimulatedProcess) -> Life:
        process.handlers = {signal.SIGTERM: lambda process: 77}
        last = process.workers == 2
        yield from process.train(10 + process.restart if last else 2000, resumed=process.restart + 1)
        yield 0.0 if process.index == 1 else FOREVER
        return -9

    run = simulate(program, "-n", "1:2", "--regrow-after", "40", "--max-restarts", "3")
    assert [start["workers"] for start in run.of_kind("start")] == [2, 1, 2, 1, 2, 1, 2]
    times = [start["time"] for start in run.of_kind("start")]
    assert [round(after - before) for before, after in zip(times[1::2], times[2::2], strict=True)] == [40, 80, 160]
    assert run.code == 137 and "3 restarts used up" in run.messages[-1]


def test_a_signal_while_it_saves_ends_it(simulate) -> None:
    def slow(process: SimulatedProcess) -> Life:
        life = grows(process)
        for pause in life:
            process.handlers = {signal.SIGTERM: _save_slowly}
            yield pause
        return -9 if process.restart == 0 else None

    run = simulate(slow, "-n", "1:3", "--regrow-after", "30", signals=[(36.0, signal.SIGTERM)])
    assert run.code == 77
    assert [start["workers"] for start in run.of_kind("start")] == [3, 2]


def _save_slowly(process: SimulatedProcess) -> Life:
    yield 5.0
    return 77


@pytest.mark.parametrize(("end", "workers"), [(-9, 1), (3, 2)])
def test_a_failure_while_it_saves_is_one(simulate, end: int, workers: int) -> None:
    """The process was asked to end, but ended of something else: the run shrinks by it, and grows again later."""

    def saves(process: SimulatedProcess) -> Life:
        yield 1.0 if process.index == 1 else 5.0
        return end if process.index == 1 else 77

    def program(process: SimulatedProcess) -> Life:
        life = grows(process)
        yield next(life)
        if process.restart == 1:
            process.handlers = {signal.SIGTERM: saves}
        return (yield from life)

    run = simulate(program, "-n", "1:3", "--regrow-after", "30", "--max-restarts", "2")
    assert run.code == 0
    assert [start["workers"] for start in run.of_kind("start")] == [3, 2, workers, 3]
    how = "was killed by SIGKILL" if end < 0 else "failed with exit code 3"
    assert run.messages[2:4] == [
        "there is room for 3 workers; saving with 2 workers to start again",
        f"worker 1 {how} at step 129; restart 2 of 2{' with 1 worker' if workers == 1 else ''}",
    ]


@pytest.mark.parametrize("end", [-signal.SIGTERM, 128 + signal.SIGTERM, 74], ids=["killed", "in a shell", "unsaved"])
def test_what_does_not_save_is_asked_once(simulate, end: int) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.handlers = {signal.SIGTERM: lambda process: end}
        if process.restart == 0:
            yield from process.train(10)
            yield 0.0 if process.index == process.workers - 1 else FOREVER
            return -9
        yield from process.train(300, resumed=8)
        return None

    run = simulate(program, "-n", "1:3", "--regrow-after", "10", "--max-restarts", "1")
    assert run.code == 0
    assert [start["workers"] for start in run.of_kind("start")] == [3, 2, 2]
    assert any(text.startswith("the run will not grow: it has not saved on SIGTERM") for text in run.messages)
