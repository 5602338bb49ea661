"""One process drives and trains, the others are stages that serve it."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

import pytest

from tests.launcher.policy.simulation import FOREVER, TICK, Life, Program, SimulatedProcess

ONCE = ("--max-restarts", "0")
UNAVAILABLE = "tensorflow.python.framework.errors_impl.UnavailableError: gone"


def driven(drive: Program, serve: Program = SimulatedProcess.serve) -> Program:
    return lambda process: (serve if process.index else drive)(process)


def ends(code: int) -> Program:
    def program(process: SimulatedProcess) -> Life:
        yield from process.train(4)
        return code

    return program


@pytest.mark.parametrize("code", [0, 3, 77])
@pytest.mark.parametrize("serve", [SimulatedProcess.serve, lambda process: 0], ids=["after it", "before it"])
def test_the_exit_code_is_that_of_the_process_that_drives(simulate, serve: Program, code: int) -> None:
    run = simulate(driven(ends(code), serve), "--stages", "3", *ONCE)
    assert run.code == code
    assert [text.partition(";")[0] for text in run.messages] == (
        ["worker 0 failed with exit code 3"] if code == 3 else []
    )


def test_a_failure_is_not_put_down_to_servers_that_end_after_it(simulate) -> None:
    def serve(process: SimulatedProcess) -> Life:
        process.handlers[SIGTERM] = None
        yield 1.5
        return 9

    run = simulate(driven(ends(3), serve), "--stages", "2", *ONCE)
    assert (run.code, run.kinds) == (3, ["start", "failure", "gave-up"])


def test_servers_that_outlast_the_driver_are_ended(simulate) -> None:
    def serve(process: SimulatedProcess) -> Life:
        process.handlers[SIGTERM] = None
        yield FOREVER

    run = simulate(driven(ends(0), serve), "--stages", "2")
    assert (run.code, run.signals) == (0, [(1.0, "worker 1", SIGTERM), (3.0, "worker 1", SIGKILL)])


def test_a_killed_server_restarts_all(simulate) -> None:
    def drive(process: SimulatedProcess) -> Life:
        yield from process.train(8, resumed=2) if process.restart else process.train(4)
        process.printed.append(UNAVAILABLE)
        return 0 if process.restart else 1

    def serve(process: SimulatedProcess) -> Life:
        if process.index == 2 and not process.restart:
            yield 1.5
            return -9
        return (yield from process.serve())

    run = simulate(driven(drive, serve), "--stages", "3", "--max-restarts", "1")
    assert run.code == 0
    assert run.messages[0] == "worker 2 was killed by SIGKILL at step 4; restart 1 of 1"
    assert run.messages[1].startswith("restart 1 of 1: training again after")
    (failure,) = run.of_kind("failure")
    assert (failure["task"], failure["kind"], failure["time"]) == ("worker 2", "signal", 1.5)
    starts = run.of_kind("start")
    assert [list(start["processes"]) for start in starts] == [["worker 0", "worker 1", "worker 2"]] * 2
    assert not set(starts[0]["processes"].values()) & set(starts[1]["processes"].values())


@pytest.mark.parametrize(("code", "kind"), [(0, "interrupted"), (3, "interrupted"), (77, "preempted")])
def test_a_driver_that_gets_a_signal_is_served_until_it_has_saved(simulate, code: int, kind: str) -> None:
    served = []

    def drive(process: SimulatedProcess) -> Life:
        def save(process: SimulatedProcess) -> Life:
            yield 3.0
            served.extend(other.name for other in process.world.processes if other.end is None)
            return code

        process.handlers[SIGTERM] = save
        yield from process.train(100)

    run = simulate(driven(drive), "--stages", "3", signals=[(1.0, SIGTERM)])
    assert (run.code, run.kinds) == (code, ["start", kind])
    assert served == ["worker 0", "worker 1", "worker 2"]


def test_servers_that_say_nothing_do_not_count_as_hung(simulate) -> None:
    run = simulate(driven(lambda process: process.train(40)), "--stages", "2", "--hang-timeout", "1", *ONCE)
    assert (run.code, run.messages) == (0, [])


@pytest.mark.parametrize(
    ("steps", "serve", "cause", "noticed"),
    [
        (4, SimulatedProcess.serve, "worker 0 stands still at step 4: no progress for 2.02 s (--hang-timeout)", 2.75),
        (0, SimulatedProcess.serve, "worker 0 stands still at step 0: no progress for 5.02 s (--start-timeout)", 5.0),
        (
            4,
            SimulatedProcess.stop,
            "worker 1 is stopped (process state T): no progress for 2.02 s (--hang-timeout)",
            2.75,
        ),
    ],
    ids=["driver", "before the first step", "stopped server"],
)
def test_who_is_blamed_for_a_hang(simulate, steps: int, serve: Program, cause: str, noticed: float) -> None:
    def drive(process: SimulatedProcess) -> Life:
        yield from process.train(steps)
        yield FOREVER

    options = ("--hang-timeout", "2", "--start-timeout", "5")
    run = simulate(driven(drive, serve), "--stages", "2", *options, *ONCE)
    assert run.code == 124
    (failure,) = run.of_kind("failure")
    assert (failure["cause"], failure["time"]) == (cause, noticed + TICK)
