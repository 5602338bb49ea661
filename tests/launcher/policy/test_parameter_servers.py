"""A chief drives, workers and parameter servers serve it; a worker that is lost is replaced alone."""

from __future__ import annotations

from signal import SIGKILL, SIGSEGV, SIGTERM

import pytest

from tests.launcher.policy.simulation import FOREVER, TICK, Life, Program, SimulatedProcess

PS = ("--ps", "1")


def cluster(end: int = 0, steps: int = 40, **lives: list[tuple[float, int]]) -> Program:
    """The chief trains and ends as told; others serve, but those with lives end so long after each of their starts."""

    def program(process: SimulatedProcess) -> Life:
        if process.job == "chief":
            yield from process.train(steps)
            return end
        mine = lives.get(process.name.replace(" ", "_"), [])
        life = sum(other.name == process.name for other in process.world.processes) - 1
        if life < len(mine):
            after, how = mine[life]
            yield after
            return how
        yield from process.serve()
        return 0

    return program


def lost(end: int, what: str, name: str = "worker 1") -> str:
    how = f"failed with exit code {end}" if end > 0 else f"was killed by {what}"
    return f"{name} {how} (logs/{name.replace(' ', '-')}.log)"


@pytest.mark.parametrize("code", [0, 3, 77])
def test_the_exit_code_is_the_chiefs(simulate, code: int) -> None:
    run = simulate(cluster(code), *PS, "--max-restarts", "0")
    assert run.code == code
    assert [text.partition(";")[0] for text in run.messages] == (
        ["chief 0 failed with exit code 3"] if code == 3 else []
    )
    assert run.seconds == pytest.approx(10.0, abs=3 * TICK)


def test_servers_that_outlast_the_chief_are_ended(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.handlers[SIGTERM] = None if process.job == "ps" else lambda process: 0
        yield 1.0 if process.job == "chief" else FOREVER

    run = simulate(program, *PS)
    assert (run.code, run.messages) == (0, [])
    assert run.signals == [
        *((1.0, name, SIGTERM) for name in ("worker 0", "worker 1", "ps 0")),
        (3.0, "ps 0", SIGKILL),
    ]


@pytest.mark.parametrize(("end", "what"), [(-SIGKILL, "SIGKILL"), (-SIGSEGV, "SIGSEGV"), (5, "")])
def test_a_lost_worker_is_replaced_alone(simulate, end: int, what: str) -> None:
    run = simulate(cluster(worker_1=[(1.0, end)]), *PS)
    assert run.code == 0
    assert run.said == [(1.0, f"{lost(end, what)}; started again (replacement 1 of 3), the others go on")]
    assert (run.signals, run.kinds) == ([], ["start", "replacement", "complete"])
    (event,) = run.of_kind("replacement")
    assert event == {
        **event,
        **{"time": 1.0, "task": "worker 1", "kind": "exit" if end > 0 else "signal", "number": 1, "delay": 0.0},
        **{"exit_code": end if end > 0 else 128 - end, "log": "logs/worker-1.log"},
    }


def test_the_replacement_knows_its_number_and_the_cluster(simulate) -> None:
    plans = []

    def program(process: SimulatedProcess) -> Life:
        if process.name == "worker 1":
            plans.append((process.world.clock.seconds, process.replacement, process.plan.env["TF_CONFIG"]))
        return (yield from cluster(worker_1=[(1.0, -9), (1.0, -9)])(process))

    assert simulate(program, *PS).code == 0
    # At once, the second time after a second; both times a tick passes until nobody is left in its place.
    assert [(seconds, number) for seconds, number, _ in plans] == [(0.0, 0), (1.0 + TICK, 1), (3.0 + TICK, 2)]
    assert len({config for _, _, config in plans}) == 1


def test_helpers_of_a_lost_worker_do_not_hold_its_place(simulate) -> None:
    starts = []

    def program(process: SimulatedProcess) -> Life:
        if process.name == "worker 1":
            starts.append(process.world.clock.seconds)
            process.has_helpers = not process.replacement
        return (yield from cluster(worker_1=[(1.0, 5)])(process))

    assert simulate(program, *PS).code == 0
    assert starts == [0.0, 1.0 + TICK]


def test_the_training_goes_on_without_a_worker_when_the_limit_is_reached(simulate) -> None:
    run = simulate(cluster(worker_1=[(1.0, -9), (2.0, -9)]), *PS, "--max-restarts", "1")
    assert (run.code, run.seconds) == (0, 10.0 + TICK)
    assert run.messages == [
        f"{lost(-9, 'SIGKILL')}; started again (replacement 1 of 1), the others go on",
        f"{lost(-9, 'SIGKILL')}; not started again: 1 restart used up (--max-restarts); the training goes on with "
        "1 worker",
    ]
    assert run.kinds == ["start", "replacement", "loss", "complete"]
    assert (run.of_kind("loss")[0]["workers"], run.of_kind("loss")[0]["time"]) == (1, 3.0 + TICK)


def test_without_restarts_the_training_goes_on_with_fewer_workers(simulate) -> None:
    run = simulate(cluster(worker_1=[(1.0, -9)]), "-n", "3", *PS, "--max-restarts", "0")
    assert run.code == 0
    assert run.messages == [
        f"{lost(-9, 'SIGKILL')}; not started again: --max-restarts is 0; the training goes on with 2 workers"
    ]


@pytest.mark.parametrize(("limit", "reason"), [(0, []), (1, ["not restarted: 1 restart used up (--max-restarts)"])])
def test_without_any_worker_the_run_fails(simulate, limit: int, reason: list[str]) -> None:
    run = simulate(cluster(worker_0=[(1.0, -9)] * 2), "-n", "1", *PS, "--max-restarts", str(limit))
    assert run.code == 137
    assert run.messages[limit + 1 :] == reason
    assert run.messages[limit].startswith("worker 0 was killed by SIGKILL (exit code 137; the kernel does that")
    assert run.kinds == ["start", *["replacement"] * limit, "failure", "gave-up"]


def test_the_last_two_workers_lost_in_the_same_tick_are_both_replaced(simulate) -> None:
    run = simulate(cluster(worker_0=[(1.0, -9)], worker_1=[(1.0, -9)]), *PS)
    assert run.code == 0
    assert [(event["task"], event["number"]) for event in run.of_kind("replacement")] == [
        ("worker 0", 1),
        ("worker 1", 2),
    ]


def test_the_last_two_workers_lost_when_only_one_may_be_replaced(simulate) -> None:
    run = simulate(cluster(worker_0=[(1.0, -9)], worker_1=[(1.0, -9)]), *PS, "--max-restarts", "1")
    assert run.code == 0
    # The place of worker 0 is empty, but is about to be filled.
    assert [(event["event"], event["task"]) for event in run.events[1:3]] == [
        ("replacement", "worker 0"),
        ("loss", "worker 1"),
    ]
    assert run.of_kind("loss")[0]["workers"] == 1


def test_a_worker_that_dies_at_once_is_not_started_in_a_tight_loop(simulate) -> None:
    run = simulate(cluster(steps=160, worker_1=[(1.0, -9)] * 9), *PS, "--max-restarts", "5")
    assert run.code == 0
    replacements = run.of_kind("replacement")
    assert [event["delay"] for event in replacements] == [0.0, 1.0, 2.0, 4.0, 8.0]
    # It lives for a second, and is started again a tick later at the earliest.
    times = [event["time"] for event in (*replacements, *run.of_kind("loss"))]
    assert times == [1.0, 2.0 + TICK, 4.0 + TICK, 7.0 + TICK, 12.0 + TICK, 21.0 + TICK]
    assert "; started again (replacement 1 of 5), " in run.messages[0]
    assert "; started again in 1 s (replacement 2 of 5), " in run.messages[1]


def test_a_worker_that_has_lived_long_is_started_again_at_once(simulate) -> None:
    lives = [(1.0, -9), (29.5, -9), (30.0, -9)]
    run = simulate(cluster(steps=400, worker_1=lives), *PS)
    assert [event["delay"] for event in run.of_kind("replacement")] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(("limit", "options"), [(2.5, ("--hang-timeout", "2.5")), (30.0, ())])
def test_a_chief_without_workers_does_not_hang_while_one_is_started(
    simulate, limit: float, options: tuple[str, ...]
) -> None:
    def program(process: SimulatedProcess) -> Life:
        if process.job != "chief":
            return (yield from cluster(worker_0=[(1.0, -9)] * 4)(process))
        yield from process.train(4)
        yield 7.0  # with nobody to work
        process.writer.report("training", 5)
        yield FOREVER

    run = simulate(program, "-n", "1", *PS, "--max-restarts", "4", *options)
    assert [event["delay"] for event in run.of_kind("replacement")] == [0.0, 1.0, 2.0, 4.0]
    (failure,) = run.of_kind("failure")
    # From the start of the last one on, there is no excuse any more. What was excused is no usual pause either.
    silence = f"no progress for {limit + TICK:.3g} s (--hang-timeout)"
    assert failure["cause"] == f"chief 0 stands still at step 5: {silence}"
    assert failure["time"] == 11.0 + TICK + limit + TICK


def test_a_chief_that_ends_does_not_wait_for_a_replacement(simulate) -> None:
    run = simulate(cluster(steps=10, worker_1=[(1.0, -9), (1.0, -9)]), *PS)
    assert (run.code, run.seconds) == (0, 2.5 + TICK)
    assert [event["number"] for event in run.of_kind("replacement")] == [1, 2]


def test_a_worker_that_dies_after_the_chief_has_ended_is_no_loss(simulate) -> None:
    run = simulate(cluster(steps=4, worker_1=[(1.0, -9)]), *PS)
    assert (run.code, run.messages, run.kinds) == (0, [], ["start", "complete"])


@pytest.mark.parametrize("victim", ["ps 0", "chief 0"])
def test_a_killed_parameter_server_or_chief_restarts_all(simulate, victim: str) -> None:
    def program(process: SimulatedProcess) -> Life:
        if process.job != "chief":
            return (yield from cluster(ps_0=[(1.0, -9)] if victim == "ps 0" else [])(process))
        yield from process.train(8, resumed=2) if process.restart else process.train(4)
        yield 0.0 if process.restart or victim == "chief 0" else FOREVER
        return 0 if process.restart else -9

    run = simulate(program, *PS, "--max-restarts", "1")
    assert run.code == 0
    assert run.messages == [
        f"{victim} was killed by SIGKILL at step 4; restart 1 of 1",
        "restart 1 of 1: training again after 0.0 s, 2 steps redone",
    ]
    starts = run.of_kind("start")
    assert [(start["workers"], len(start["processes"])) for start in starts] == [(2, 4), (2, 4)]
    assert not set(starts[0]["processes"].values()) & set(starts[1]["processes"].values())
    assert run.of_kind("replacement") == []


def test_a_worker_that_dies_before_the_chief_has_trained_fails_the_run(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        if process.job != "chief":
            return (yield from cluster(worker_1=[(1.0, -9)])(process))
        yield FOREVER

    run = simulate(program, *PS)
    assert (run.code, run.kinds) == (137, ["start", "failure", "gave-up"])
    assert run.messages[0].startswith("worker 1 was killed by SIGKILL (exit code 137; ")


def test_a_preempted_chief_is_served_until_it_has_saved(simulate) -> None:
    served = []

    def program(process: SimulatedProcess) -> Life:
        def save(process: SimulatedProcess) -> Life:
            yield 3.0
            served.extend(other.name for other in process.world.processes if other.end is None)
            return 77

        process.handlers[SIGTERM] = save
        return (yield from cluster()(process))

    run = simulate(program, *PS, signals=[(1.0, SIGTERM)])
    assert (run.code, run.kinds) == (77, ["start", "preempted"])
    assert served == ["chief 0", "worker 0", "worker 1", "ps 0"]
    assert run.seconds == pytest.approx(4.0, abs=3 * TICK)


def test_a_stopped_parameter_server_is_named(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        if process.job == "ps":
            yield from process.stop()
        if process.job != "chief":
            return (yield from process.serve())
        yield from process.train(3)
        yield FOREVER

    run = simulate(program, *PS, "--hang-timeout", "2", "--max-restarts", "0")
    assert run.code == 124
    assert run.of_kind("failure")[0]["cause"] == (
        "ps 0 is stopped (process state T): no progress for 2.02 s (--hang-timeout)"
    )
