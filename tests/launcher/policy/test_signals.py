"""Signals to the launcher: they are passed on, and what the processes make of them decides."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM

import pytest

from tests.launcher.policy.simulation import FOREVER, TICK, Life, Program, SimulatedProcess

AGAIN = "; press Ctrl-C again to kill them now"


@pytest.fixture
def heed_hangup() -> Iterator[None]:
    """The tests may run below nohup, which the launcher would respect."""
    before = signal.signal(SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(SIGHUP, before)


def saves(*codes: int, after: float = 0.5) -> Program:
    """Worker n ends with the code of that place so long after a signal."""

    def program(process: SimulatedProcess) -> Life:
        def save(process: SimulatedProcess) -> Life:
            yield after
            return codes[process.index]

        process.handlers = {SIGINT: save, SIGTERM: save}
        yield FOREVER

    return program


def sleep(process: SimulatedProcess) -> Life:
    yield FOREVER


def ignore(process: SimulatedProcess) -> Life:
    process.handlers = {SIGINT: None, SIGTERM: None}
    yield FOREVER


@pytest.mark.parametrize(("number", "code", "more"), [(SIGINT, 130, AGAIN), (SIGTERM, 143, ""), (SIGHUP, 129, "")])
def test_a_signal_ends_the_run(simulate, heed_hangup, number: signal.Signals, code: int, more: str) -> None:
    run = simulate(sleep, signals=[(1.0, number)])
    assert (run.code, run.seconds) == (code, 1.0 + 2 * TICK)
    assert run.said == [(1.0, f"{number.name} received and passed on to 2 processes (SIGKILL in 30 s{more})")]
    assert run.signals == [(1.0, "worker 0", number), (1.0, "worker 1", number)]
    assert run.kinds == ["start", "interrupted"]
    (event,) = run.of_kind("interrupted")
    assert (event["signal"], event["exit_code"]) == (number.name, code)


def test_only_processes_that_still_run_get_it(simulate) -> None:
    run = simulate(lambda process: sleep(process) if process.index else 0, "--grace", "2.5", signals=[(1.0, SIGTERM)])
    assert run.code == 143
    assert run.messages == ["SIGTERM received and passed on to 1 process (SIGKILL in 2.5 s)"]
    assert run.signals == [(1.0, "worker 1", SIGTERM)]


@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
@pytest.mark.parametrize(
    ("codes", "code"),
    [((70, 70), 70), ((0, 0), 0), ((70, 71), None), ((70, 0), None), ((70, -SIGTERM), None)],
)
def test_a_code_that_all_agree_on_is_returned(
    simulate, number: signal.Signals, codes: tuple[int, int], code: int | None
) -> None:
    run = simulate(saves(*codes), signals=[(1.0, number)])
    assert run.code == (128 + number if code is None else code)
    assert (run.seconds, run.kinds) == (1.5 + TICK, ["start", "interrupted"])


def test_the_code_of_servers_does_not_count(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.handlers[SIGTERM] = lambda process: 70 if process.job == "chief" else 3
        yield FOREVER

    assert simulate(program, "--ps", "1", signals=[(1.0, SIGTERM)]).code == 70


def test_the_grace_period_ends_with_sigkill(simulate) -> None:
    run = simulate(ignore, "--grace", "4", signals=[(1.0, SIGTERM)])
    assert (run.code, run.seconds) == (143, 5.0 + 2 * TICK)
    assert run.signals[2:] == [(5.0, "worker 0", SIGKILL), (5.0, "worker 1", SIGKILL)]


def test_who_saves_within_the_grace_period_is_not_killed(simulate) -> None:
    assert simulate(saves(70, 70, after=4.0), "--grace", "4", signals=[(1.0, SIGTERM)]).code == 70
    assert simulate(saves(70, 70, after=4.0 + TICK), "--grace", "4", signals=[(1.0, SIGTERM)]).code == 143


@pytest.mark.parametrize(("second", "killed"), [(1.25, 21.0), (1.3125, 1.3125), (9.0, 9.0)])
def test_a_second_ctrl_c_kills_at_once_unless_it_is_the_same_key_press(simulate, second: float, killed: float) -> None:
    run = simulate(ignore, "--grace", "20", signals=[(1.0, SIGINT), (second, SIGINT)])
    assert run.code == 130
    assert run.signals[2:] == [(killed, "worker 0", SIGKILL), (killed, "worker 1", SIGKILL)]


def test_a_second_sigterm_changes_nothing(simulate) -> None:
    run = simulate(ignore, "--grace", "5", signals=[(1.0, SIGINT), (2.0, SIGTERM), (3.0, SIGTERM)])
    assert (run.code, len(run.messages), run.signals[2][0]) == (130, 1, 6.0)


def test_what_fails_after_a_signal_is_no_failure(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.handlers[SIGTERM] = None
        yield from process.train(10)
        return 3

    run = simulate(program, signals=[(1.0, SIGTERM)])
    assert (run.code, run.kinds) == (3, ["start", "interrupted"])


def test_a_signal_while_the_others_are_ended_does_not_prolong_that(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.handlers = {SIGINT: None, SIGTERM: None}
        yield 0.5 if process.index else FOREVER
        return 5

    run = simulate(program, signals=[(1.0, SIGTERM)])
    assert run.code == 5
    assert run.signals[-1] == (2.5, "worker 0", SIGKILL)
    assert run.messages[-1].startswith("worker 1 failed with exit code 5; ")


@pytest.mark.parametrize(
    ("received", "kinds"),
    [(2.5, ["start", "gave-up"]), (2.5 + TICK, ["start", "failure", "gave-up"])],
    ids=["in the tick of a failure", "when a restart was decided"],
)
def test_a_signal_prevents_a_restart(simulate, received: float, kinds: list[str]) -> None:
    def program(process: SimulatedProcess) -> Life:
        yield from process.train(10)
        yield 0.0 if process.index else FOREVER
        return 3

    run = simulate(program, signals=[(received, SIGTERM)])
    assert (run.code, run.kinds) == (3, kinds)
    assert [(when, name) for when, name, _ in run.signals] == [(2.5, "worker 0")]
