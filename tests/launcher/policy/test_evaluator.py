"""The evaluator, which may outlast the training by the grace period."""

from __future__ import annotations

from signal import SIGINT, SIGTERM

import pytest

from tests.launcher.policy.simulation import FOREVER, TICK, Life, Program, SimulatedProcess

STOPPED = (
    "the evaluator still runs {} s after the end of the training and is stopped now; "
    "a longer --grace gives it more time"
)


def evaluates(seconds: float, code: int = 0) -> Program:
    """Workers end after a second, the evaluator so long after that, parameter servers never."""

    def program(process: SimulatedProcess) -> Life:
        yield {"evaluator": 1.0 + seconds, "ps": FOREVER}.get(process.job, 1.0)
        return code if process.job == "evaluator" else 0

    return program


def signals_to_evaluator(run) -> list[tuple]:
    return [(when, number) for when, name, number in run.signals if name == "evaluator 0"]


@pytest.mark.parametrize("options", [(), ("--ps", "1")])
@pytest.mark.parametrize("grace", [0.0, 1.0, 10.0])
def test_an_evaluator_that_never_ends_is_stopped_after_the_grace_period(
    simulate, grace: float, options: tuple[str, ...]
) -> None:
    run = simulate(evaluates(FOREVER), "--evaluator", "--grace", f"{grace:g}", *options)
    assert (run.code, run.kinds) == (0, ["start", "complete"])
    assert run.said == [(1.0 + grace, STOPPED.format(f"{grace:g}"))]
    assert signals_to_evaluator(run) == [(1.0 + grace, SIGTERM)]
    # It may need them for its last evaluation.
    assert {when for when, name, _ in run.signals if name == "ps 0"} <= {1.0 + grace}


@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_an_evaluator_that_ends_within_the_grace_period_is_left_alone(simulate, seconds: float) -> None:
    run = simulate(evaluates(seconds), "--evaluator", "--ps", "1", "--grace", "5")
    assert (run.code, run.messages, signals_to_evaluator(run)) == (0, [], [])
    assert run.signals == [(1.0 + seconds, "ps 0", SIGTERM)]


def test_an_evaluator_that_is_stopped_has_two_seconds_at_most(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.handlers[SIGTERM] = None
        yield FOREVER if process.job == "evaluator" else 1.0

    run = simulate(program, "--evaluator", "--grace", "10")
    assert [when for when, _ in signals_to_evaluator(run)] == [11.0, 13.0]
    assert run.code == 0


def test_an_evaluator_that_fails_after_the_training_fails_the_run(simulate) -> None:
    run = simulate(evaluates(1.0, code=5), "--evaluator")
    assert (run.code, run.kinds) == (5, ["start", "failure", "gave-up"])
    assert run.messages[-1].startswith("evaluator 0 failed with exit code 5; ")


def test_an_evaluator_that_fails_ends_a_training_too(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        if process.job == "evaluator":
            yield 1.0
            return 7
        yield from process.train(1000)
        return None

    run = simulate(program, "--evaluator")
    assert run.code == 7
    assert run.said[1] == (1.0 + 2 * TICK, "not restarted: it is not one of the training processes")
    assert run.of_kind("gave-up")[0]["reason"] == run.messages[1]


def test_an_interrupted_evaluator_keeps_its_grace_period(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        def save(process: SimulatedProcess) -> Life:
            yield 2.0

        process.handlers[SIGINT] = save
        yield FOREVER if process.job == "evaluator" else 0.5

    # That after the training would end while it saves.
    run = simulate(program, "-n", "1", "--evaluator", "--grace", "3", signals=[(2.5, SIGINT)])
    assert (run.code, run.seconds) == (0, 4.5 + TICK)
    assert signals_to_evaluator(run) == [(2.5, SIGINT)]
