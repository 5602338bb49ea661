"""Runs that go on after a failure: when they are started again, when not, and what is told about it."""

from __future__ import annotations

import itertools
from signal import SIGKILL, SIGTERM

import pytest

from tests.launcher.policy.simulation import FOREVER, TICK, Life, Program, SimulatedProcess

BEGINNING = ": from the beginning, since no backup was resumed"
REPORT = "; its last lines:\n  (it printed nothing)\ntfdist: its complete log: logs/worker-1.log"
TYPO = "NameError: name 'modle' is not defined"


def fails(end: int, lives: int = 1, text: str = "", more: int = 1) -> Program:
    """Trains for ten steps in its first life and then fails, in the next one for so many more, until it survives."""

    def program(process: SimulatedProcess) -> Life:
        resumed = 8 if process.restart else None
        if process.restart < lives:
            yield from process.train(10 + more * process.restart, resumed)
            yield 0.0 if process.index == 1 else FOREVER
            process.printed += text.splitlines()
            return end
        yield from process.train(20, resumed)
        return None

    return program


def begins(*resumed: int, end: int = -9) -> Program:
    """In each life training is taken up where it is said, but nothing is done until worker 1 fails a second later."""

    def program(process: SimulatedProcess) -> Life:
        process.writer.begin()
        process.writer.resumed(resumed[process.restart])
        yield 1.0 if process.index == 1 else FOREVER
        return end

    return program


@pytest.mark.parametrize(
    ("end", "text", "cause", "kind", "code"),
    [
        (-9, "", "was killed by SIGKILL", "signal", 137),
        (3, "", "failed with exit code 3", "exit", 3),
        (1, "ValueError: no", "failed with exit code 1 (ValueError: no)", "exit", 1),
    ],
)
def test_a_failed_worker_is_replaced(simulate, end: int, text: str, cause: str, kind: str, code: int) -> None:
    run = simulate(fails(end, text=text))
    assert run.code == 0
    # It is seen to have ended in one tick, the other one in the next, and nobody is left in the third.
    assert run.said == [
        (2.5 + 2 * TICK, f"worker 1 {cause} at step 10; restart 1 of 3"),
        (2.5 + 3 * TICK, "restart 1 of 3: training again after 0.0 s, 2 steps redone"),
    ]
    assert run.signals == [(2.5, "worker 0", SIGKILL)]
    assert run.kinds == ["start", "failure", "restart", "start", "training-again", "complete"]
    first, failure, restart, second, again, complete = run.events
    assert failure == {
        **failure,
        **{"time": 2.5, "task": "worker 1", "kind": kind, "cause": f"worker 1 {cause} at step 10"},
        **{"exit_code": code, "step": 10, "log": "logs/worker-1.log"},
    }
    assert (restart["restart"], restart["workers"], restart["delay"]) == (1, 2, 0.0)
    assert (again["restart"], again["seconds"]) == (1, round(3 * TICK, 3))
    assert (again["resumed_step"], again["steps_redone"]) == (8, 2)
    assert (complete["restarts"], complete["time"]) == (1, run.seconds)
    assert [(start["restart"], start["workers"]) for start in (first, second)] == [(0, 2), (1, 2)]
    assert set(first["processes"]) == set(second["processes"]) == {"worker 0", "worker 1"}
    assert not set(first["processes"].values()) & set(second["processes"].values())


def test_the_chief_is_replaced_and_its_name_told(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield from process.train(6, resumed=5) if process.restart else process.train(5)
        yield FOREVER if not process.restart and process.job != "chief" else 0.0
        return 0 if process.restart else -9

    run = simulate(program, "--chief", "-n", "2")
    assert (run.code, len(run.of_kind("start"))) == (0, 2)
    assert run.messages[0] == "chief 0 was killed by SIGKILL at step 5; restart 1 of 3"
    assert run.messages[1].startswith("restart 1 of 3: training again after")
    assert run.messages[1].endswith(" s, 0 steps redone")


def test_all_workers_killed_at_once(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield from process.train(12, resumed=10) if process.restart else process.train(10)
        return 0 if process.restart else -9

    run = simulate(program, "-n", "3")
    assert (run.code, run.signals) == (0, [])
    assert [failure["task"] for failure in run.of_kind("failure")] == ["worker 0"]
    assert run.messages == [
        "worker 0 was killed by SIGKILL at step 10; restart 1 of 3",
        "restart 1 of 3: training again after 0.0 s, 0 steps redone",
    ]


def test_the_group_is_killed_at_once_even_if_it_ignores_sigterm(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.handlers[SIGTERM] = None
        return fails(-9)(process)

    run = simulate(program, "--grace", "30")
    assert (run.code, run.signals) == (0, [(2.5, "worker 0", SIGKILL)])


def test_without_a_backup_everything_is_redone(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield from process.train(5 if process.restart else 10)
        yield FOREVER if not process.restart and process.index == 0 else 0.0
        return 0 if process.restart else -9

    _, message = simulate(program).messages
    assert message == f"restart 1 of 3: training again after 0.0 s, 10 steps redone{BEGINNING}"


def test_restarts_are_limited(simulate) -> None:
    run = simulate(fails(-9, lives=9), "--max-restarts", "2")
    assert run.code == 137
    dead = "worker 1 was killed by SIGKILL at step {}; restart {} of 2"
    again = "restart {} of 2: training again after 0.0 s, {} steps redone"
    *restarts, report, reason = run.messages
    assert restarts == [dead.format(10, 1), again.format(1, 2), dead.format(11, 2), again.format(2, 3)]
    assert reason == "not restarted: 2 restarts used up (--max-restarts)"
    assert report.startswith(
        "worker 1 was killed by SIGKILL (exit code 137; the kernel does that when memory runs out)"
    )
    (end,) = run.of_kind("gave-up")
    assert (end["exit_code"], end["reason"]) == (137, reason)
    # Those that are left after the last failure may save.
    assert [number for _, _, number in run.signals] == [SIGKILL, SIGKILL, SIGTERM]


def test_no_restarts_on_request(simulate) -> None:
    run = simulate(fails(3), "--max-restarts", "0")
    assert (run.code, run.messages) == (3, [f"worker 1 failed with exit code 3{REPORT}"])
    assert run.kinds == ["start", "failure", "gave-up"]


def test_the_same_step_twice_is_the_end(simulate) -> None:
    run = simulate(fails(1, lives=9, text="ValueError: bad", more=0))
    assert run.code == 1
    _, again, report, reason = run.messages
    assert again.startswith("restart 1 of 3: training again after")
    assert reason == "not restarted: it failed at step 10 for the second time in a row"
    assert "\n  ValueError: bad\n" in report
    assert len(run.of_kind("restart")) == 1


def test_failing_before_the_first_step_twice_is_the_end(simulate) -> None:
    run = simulate(begins(0, 0, end=5))
    assert run.code == 5
    assert run.said[:2] == [
        (1.0 + 2 * TICK, "worker 1 failed with exit code 5; restart 1 of 3 in 1 s"),
        (3.0 + 2 * TICK, "restart 1 of 3: ended before the training began again"),
    ]
    assert run.messages[2:] == [
        f"worker 1 failed with exit code 5{REPORT}",
        "not restarted: it failed before its first step for the second time in a row",
    ]
    assert run.of_kind("restart")[0]["delay"] == 1.0


def test_the_same_exception_without_a_step_is_the_end(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.printed.append(TYPO)
        return (yield from begins(10, 20, end=1)(process))

    run = simulate(program)
    assert (run.code, len(run.of_kind("restart"))) == (1, 1)
    assert run.messages[-1] == ("not restarted: it failed with the same exception again, before a single step was done")


def test_exit_code_78_is_the_end(simulate) -> None:
    run = simulate(fails(78))
    assert run.code == 78
    assert run.messages[1] == "not restarted: exit code 78 says that it would fail again"


def test_what_never_reported_is_not_restarted(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield 1.0 if process.index else FOREVER
        return 3

    run = simulate(program)
    assert (run.code, run.messages) == (3, [f"worker 1 failed with exit code 3{REPORT}"])
    assert run.kinds == ["start", "failure", "gave-up"]


def test_restarts_in_vain_are_made_less_and_less_often(simulate) -> None:
    run = simulate(begins(*range(10)), "--max-restarts", "8")
    assert run.code == 137
    delays = [event["delay"] for event in run.of_kind("restart")]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    starts = [event["time"] for event in run.of_kind("start")]
    # A second until it fails, and two ticks until all have ended.
    assert [after - before - 1.0 - 2 * TICK for before, after in itertools.pairwise(starts)] == delays
    cause = "worker 1 was killed by SIGKILL"
    assert run.messages[0] == f"{cause}; restart 1 of 8 in 1 s"
    assert run.messages[1] == "restart 1 of 8: ended before the training began again"
    assert run.messages[2] == f"{cause} at step 1; restart 2 of 8 in 2 s"
    assert run.messages[-1] == "not restarted: 8 restarts used up (--max-restarts)"


def test_a_step_makes_the_next_delay_short_again(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        if process.restart != 2:
            return (yield from begins(0, 1, 1, 30, 40)(process))
        yield from process.train(20, resumed=2)
        yield 0.0 if process.index else FOREVER
        return -9

    run = simulate(program, "--max-restarts", "4")
    assert [event["delay"] for event in run.of_kind("restart")] == [1.0, 2.0, 0.0, 1.0]


def test_an_error_after_the_training_is_not_worth_another_one(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield from process.train(10)
        process.writer.report("done", 10)
        yield 0.0 if process.index else FOREVER
        process.printed.append(TYPO)
        return 1

    run = simulate(program)
    assert (run.code, run.of_kind("restart")) == (1, [])
    assert run.messages[1] == "not restarted: its last fit had ended, what failed came after that"


def test_a_run_that_was_complete_before_the_failure(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        if process.restart:
            process.writer.begin()
            process.writer.resumed(10)
            process.writer.report("done", 10)
            return 0
        return (yield from fails(-9)(process))

    run = simulate(program)
    assert (run.code, run.messages) == (
        0,
        ["worker 1 was killed by SIGKILL at step 10; restart 1 of 3", "restart 1 of 3: complete"],
    )


def test_the_seconds_are_those_until_all_have_done_a_step(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        if process.restart:
            yield 1.0 + process.index
            yield from process.train(20, resumed=8)
            return 0
        return (yield from fails(-9)(process))

    run = simulate(program)
    (again,) = run.of_kind("training-again")
    assert again["time"] == 4.5 + 2 * TICK
    assert again["seconds"] == round(2.0 + 2 * TICK, 3)
    assert run.messages[1].endswith(": training again after 2.0 s, 2 steps redone")
