"""Runs that go on with fewer workers."""

from __future__ import annotations

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
