"""Runs that are asked to stop and say that they have saved (exit code 77): that is no failure."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

import pytest

from tests.launcher.policy.simulation import FOREVER, TICK, Life, Program, SimulatedProcess
from tfdist.supervision.progress import DONE, SAVED

UNAVAILABLE = "UnavailableError: gone"


def after_training(*ends: tuple[float, int]) -> Program:
    """Worker n trains ten steps in 2.5 seconds, and ends so long after that."""

    def program(process: SimulatedProcess) -> Life:
        after, end = ends[process.index]
        yield from process.train(10)
        yield after
        if end == 1:
            process.printed.append(UNAVAILABLE)
        return end

    return program


@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [
        ((0.0, 77), (0.0, 77), 2.5),
        ((0.0, 77), (1.0, 77), 3.5),
        ((0.0, 0), (0.0, 77), 2.5),
        ((1.0, 1), (0.0, 77), 3.5),
        ((0.0, 1), (1.0, 77), 3.5),
        ((0.0, 3), (0.0, 77), 2.5),
        ((1.0, 3), (0.0, 77), 3.5),
        ((0.0, 77), (1.0, -9), 3.5),
    ],
    ids=[
        "together",
        "one after the other",
        "the other is complete",
        "the other misses it",
        "the other missed it before",
        "the other fails in the same tick",
        "the other fails meanwhile",
        "the other is killed meanwhile",
    ],
)
def test_a_preempted_run_is_not_restarted(
    simulate, first: tuple[float, int], second: tuple[float, int], seconds: float
) -> None:
    run = simulate(after_training(first, second))
    assert (run.code, run.seconds, run.messages) == (77, seconds + TICK, [])
    assert run.kinds == ["start", "preempted"]
    assert run.events[-1]["exit_code"] == 77


def test_the_others_have_the_grace_period_to_save(simulate) -> None:
    run = simulate(after_training((0.0, 77), (FOREVER, 0)), "--grace", "4")
    assert (run.code, run.kinds) == (77, ["start", "preempted"])
    assert run.signals == [(6.5, "worker 1", SIGKILL)]


def test_the_grace_period_begins_with_the_first(simulate) -> None:
    run = simulate(after_training((0.0, 77), (3.0, 77), (FOREVER, 0)), "-n", "3", "--grace", "4")
    assert (run.code, run.signals) == (77, [(6.5, "worker 2", SIGKILL)])


def test_a_failure_that_was_decided_about_stays_one(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.handlers[SIGTERM] = lambda process: 77
        yield from process.train(10)
        yield 0.0 if process.index else FOREVER
        return 3

    run = simulate(program, "--max-restarts", "0")
    assert (run.code, run.kinds) == (3, ["start", "failure", "gave-up"])


def test_sigterm_to_a_run_that_saves(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.handlers[SIGTERM] = lambda process: 77
        yield from process.train(1000)

    run = simulate(program, signals=[(1.0, SIGTERM)])
    assert (run.code, run.kinds) == (77, ["start", "preempted"])
    assert [name for _, name, _ in run.signals] == ["worker 0", "worker 1"]
    assert run.seconds == 1.0 + 2 * TICK


@pytest.mark.parametrize(("saved", "code"), [((True, True), 77), ((True, False), 77), ((False, False), 143)])
def test_a_run_that_has_saved_says_so_even_if_its_end_takes_too_long(
    simulate, saved: tuple[bool, bool], code: int
) -> None:
    def save(process: SimulatedProcess) -> Life:
        process.writer.report(DONE, 4)
        yield 1.0
        if saved[process.index]:
            process.writer.report(SAVED, 4)
        yield FOREVER  # the interpreter ends, on a busy machine

    def program(process: SimulatedProcess) -> Life:
        process.handlers[SIGTERM] = save
        yield from process.train(1000)

    run = simulate(program, signals=[(1.0, SIGTERM)])
    assert (run.code, run.kinds) == (code, ["start", "preempted" if code == 77 else "interrupted"])
    assert [(name, number) for _, name, number in run.signals[2:]] == [("worker 0", SIGKILL), ("worker 1", SIGKILL)]


def test_a_crash_after_it_had_saved_is_no_failure(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield from process.train(10)
        process.writer.report(SAVED, 10)
        return -11 if process.index else 77

    run = simulate(program)
    assert (run.code, run.kinds) == (77, ["start", "preempted"])


def test_an_exit_code_of_its_own_counts_whatever_it_has_saved(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield from process.train(10)
        process.writer.report(SAVED, 10)
        return 5

    assert simulate(program, "--max-restarts", "0").code == 5


def test_sigterm_to_a_run_that_cannot_save(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.handlers[SIGTERM] = lambda process: 74
        yield from process.train(1000)

    run = simulate(program, signals=[(1.0, SIGTERM)])
    assert (run.code, run.kinds) == (74, ["start", "interrupted"])
    assert run.messages[1:] == [
        "stopped by SIGTERM, and could not save (exit code 74): what was trained since the last backup is lost; its "
        "output says why, and where it goes on"
    ]


def test_workers_that_could_not_save_are_restarted(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield from process.train(10)
        if process.restart:
            return 0
        process.writer.report(DONE, 10)  # as a fit that is asked to stop
        return 74

    run = simulate(program, "--max-restarts", "1")
    assert (run.code, run.kinds) == (0, ["start", "failure", "restart", "start", "training-again", "complete"])
    assert any("worker 0 was asked to stop, and could not save (exit code 74)" in text for text in run.messages)


def test_a_signal_ends_the_run_whatever_the_processes_do(simulate) -> None:
    run = simulate(lambda process: process.train(1000), signals=[(1.0, SIGTERM)])
    assert (run.code, run.seconds, run.kinds) == (143, 1.0 + 2 * TICK, ["start", "interrupted"])


@pytest.mark.parametrize("received", [3.0625 + TICK, 4.0, 5.0625])
def test_a_signal_while_a_restart_is_waited_for(simulate, received: float) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.writer.begin()
        process.writer.resumed(10 * process.restart)
        yield 1.0 if process.index else FOREVER
        return -SIGKILL

    run = simulate(program, signals=[(received, SIGTERM)])
    assert [event["delay"] for event in run.of_kind("restart")] == [1.0, 2.0]
    assert run.of_kind("restart")[1]["time"] == 3.0625
    assert (run.code, run.seconds) == (143, received)
    assert run.said[-1] == (received, "SIGTERM received: not restarted")
    assert run.kinds[-2:] == ["restart", "interrupted"]
    assert (run.events[-1]["signal"], run.events[-1]["exit_code"]) == ("SIGTERM", 143)
