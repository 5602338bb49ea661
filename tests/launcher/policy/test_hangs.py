"""Processes that stand still: when that is noticed, who is named, and what is not taken for a hang."""

from __future__ import annotations

import pytest

from tests.launcher.policy.simulation import FOREVER, TICK, Life, Program, SimulatedProcess

HANG, START = ("--hang-timeout", "4"), ("--start-timeout", "5")


def hangs(how: Program) -> Program:
    """Worker 0 trains ten steps in its first life, worker 1 nine; what that one does next is told."""

    def program(process: SimulatedProcess) -> Life:
        if process.restart:
            yield from process.train(20, resumed=8)
            return
        yield from process.train(10 - process.index)
        if process.index == 1:
            yield from how(process)
        yield FOREVER

    return program


def sleep(process: SimulatedProcess) -> Life:
    yield FOREVER


# The last report of worker 1 is that of step 9, of worker 0 that of step 10.
LAST = 2.0
WAITED = "no progress for 4.02 s (--hang-timeout)"
KILLED = "worker 1 was killed by SIGKILL (logs/worker-1.log)"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (SimulatedProcess.stop, "is stopped (process state T)"),
        (sleep, "stands still at step 9 while others have reached step 10"),
    ],
)
def test_who_stands_still_is_named(simulate, how: Program, words: str) -> None:
    run = simulate(hangs(how), *HANG)
    assert run.code == 0
    (failure,) = run.of_kind("failure")
    assert failure == {**failure, "task": "worker 1", "kind": "hang", "exit_code": 124, "step": 9}
    assert failure["time"] == LAST + 4.0 + TICK
    assert failure["cause"] == f"worker 1 {words}: {WAITED}"
    assert run.messages == [
        f"worker 1 {words}: {WAITED}; restart 1 of 3",
        "restart 1 of 3: training again after 0.0 s, 2 steps redone",
    ]


@pytest.mark.parametrize(("pause", "hung"), [(4.0 + TICK, False), (4.0 + 2 * TICK, True)])
def test_the_limit_is_not_yet_a_hang(simulate, pause: float, hung: bool) -> None:
    # A report in the very tick in which the hang would be noticed comes just in time.
    run = simulate(lambda process: process.train(5, pause=pause), *HANG, "--max-restarts", "0")
    assert (run.code, run.kinds[1]) == ((124, "failure") if hung else (0, "complete"))


@pytest.mark.parametrize(("pause", "limit"), [(0.25, 30.0), (2.5, 30.0), (4.0, 40.0)])
def test_without_a_limit_a_hang_is_what_is_unusual(simulate, pause: float, limit: float) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield from process.train(5, pause=pause)
        yield FOREVER

    run = simulate(program, "--max-restarts", "0")
    assert run.code == 124
    assert run.of_kind("failure")[0]["time"] == 4 * pause + limit + TICK


def test_a_process_that_never_joins_is_named(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        if not process.restart:
            if process.index == 0:
                process.writer.begin()
            yield FOREVER
        yield from process.train(20)

    run = simulate(program, *START)
    assert run.code == 0
    dead = "worker 1 has not begun to train: no progress for 5.02 s (--start-timeout)"
    assert run.said[0] == (5.0 + 3 * TICK, f"{dead}; restart 1 of 3 in 1 s")
    assert run.messages[1].startswith("restart 1 of 3: training again after ")


@pytest.mark.parametrize("preparation", [0.0, 3.0])
def test_a_restarted_run_that_never_begins_is_ended(simulate, preparation: float) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield preparation
        if process.restart:
            yield FOREVER
        yield from process.train(4)
        return -9

    run = simulate(program, *START)
    assert run.code == 124
    killed, *hangs = run.of_kind("failure")
    assert killed["time"] == preparation + 1.0
    # Each may take twice as long as the first one until it calls fit.
    starts = [start["time"] for start in run.of_kind("start")[1:]]
    limit = 2 * max(preparation, TICK) + 5.0 + TICK
    assert [event["time"] for event in hangs] == [start + limit for start in starts]
    assert hangs[0]["cause"] == "worker 0 has not begun to train: no progress for 5.02 s (--start-timeout)"
    assert run.messages[-1] == "not restarted: it failed before its first step for the second time in a row"


def test_a_hang_that_repeats_itself_is_the_end(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield from process.train(10 - process.index)
        yield FOREVER

    run = simulate(program, *HANG)
    assert (run.code, len(run.of_kind("restart"))) == (124, 1)
    assert run.messages[-1] == "not restarted: it failed at step 9 for the second time in a row"
    assert run.messages[-2].startswith("worker 1 stands still at step 9 while others have reached step 10: ")


def test_a_program_that_does_not_train_is_not_watched(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield 20.0

    run = simulate(program, "--hang-timeout", "0.25", "--start-timeout", "0.25")
    assert (run.code, run.seconds) == (0, 20.0 + TICK)


def test_what_comes_after_the_training_is_not_watched(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield from process.train(3)
        process.writer.report("done", 3)
        yield 20.0

    assert simulate(program, *HANG).code == 0


@pytest.mark.parametrize(("seconds", "code"), [(4.5, 0), (5.5, 124)])
def test_after_an_exception_there_is_as_much_time_as_for_a_start(simulate, seconds: float, code: int) -> None:
    """A program may catch it and go on, or be about to end and stand still."""

    def program(process: SimulatedProcess) -> Life:
        yield from process.train(3)
        process.writer.failed()
        yield seconds

    assert simulate(program, "--hang-timeout", "1", *START, "--max-restarts", "0").code == code


def test_who_has_ended_is_not_watched(simulate) -> None:
    run = simulate(lambda process: process.train(3 + 40 * process.index), *HANG)
    assert (run.code, run.kinds) == (0, ["start", "complete"])


def test_a_worker_in_the_place_of_another_one_is_judged_by_its_own_pauses(simulate) -> None:
    """The other one's last report is long ago when this one makes its first."""

    def program(process: SimulatedProcess) -> Life:
        if process.index == 0:
            return (yield from process.train(400))
        if process.replacement == 0:
            yield from process.train(4)
            return -9
        yield 20.0
        # It takes a second to end.
        process.kill = lambda: process.world.clock.after(1.0, lambda: SimulatedProcess.kill(process))
        yield from process.train(40)
        yield FOREVER

    run = simulate(program, "--replace-workers")
    assert run.code == 0
    seen = 1.0 + TICK + 20.0 + 39 * 0.25 + 30.0 + TICK
    assert run.said == [
        (1.0, f"{KILLED}; started again (replacement 1 of 3), the others go on"),
        (seen, "worker 1 hangs: killed"),
        (seen + 1.0, f"{KILLED}; started again (replacement 2 of 3), the others go on"),
    ]


def test_a_failure_in_the_tick_of_a_hang_is_what_is_told(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield from process.train(9)
        yield 4.0 + TICK - 0.25 if process.index == 1 else FOREVER
        return 3

    run = simulate(program, *HANG, "--max-restarts", "0")
    assert run.code == 3
    assert [(event["time"], event["kind"]) for event in run.of_kind("failure")] == [(6.0 + TICK, "exit")]
