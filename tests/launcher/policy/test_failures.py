"""Which failure is named, what is said about it, and how the other processes are ended."""

from __future__ import annotations

from signal import SIGKILL, SIGSEGV, SIGTERM

import pytest

from tests.launcher.policy.simulation import FOREVER, TICK, Life, Program, SimulatedProcess

UNAVAILABLE = "tensorflow.python.framework.errors_impl.UnavailableError: Collective ops is aborted by: gone"
LOG = "\ntfdist: its complete log: logs/{}.log"


def ends(lives: dict[str, tuple[float, int, str]]) -> Program:
    """Processes that are named end as told: after how many seconds, how, and with which text. Others never do."""

    def program(process: SimulatedProcess) -> Life:
        after, end, text = lives.get(process.name, (FOREVER, 0, ""))
        yield after
        process.printed += text.splitlines()
        return end

    return program


def test_exit_code_and_last_lines_of_the_failing_process(simulate) -> None:
    lines = [f"step {number}" for number in range(40)]
    run = simulate(ends({"worker 1": (0.5, 3, "\n".join(lines))}), "-n", "3")
    assert (run.code, run.seconds) == (3, 0.5 + 2 * TICK)
    shown = "\n  ".join(lines[20:])
    assert run.messages == [f"worker 1 failed with exit code 3; its last lines:\n  {shown}{LOG.format('worker-1')}"]
    assert run.signals == [(0.5, "worker 0", SIGTERM), (0.5, "worker 2", SIGTERM)]
    assert run.kinds == ["start", "failure", "gave-up"]
    (failure,) = run.of_kind("failure")
    assert failure == {**failure, "time": 0.5, "task": "worker 1", "kind": "exit", "exit_code": 3, "step": 0}
    assert failure["cause"] == "worker 1 failed with exit code 3" and failure["log"] == "logs/worker-1.log"
    (end,) = run.of_kind("gave-up")
    assert (end["reason"], end["exit_code"]) == ("", 3)


def test_what_tensorflow_writes_at_its_start_is_not_among_the_last_lines(simulate, monkeypatch) -> None:
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    noise = "I0000 00:00:1795590664.791870   30750 port.cc:153] oneDNN custom operations are on. You may see slightly"
    run = simulate(ends({"worker 1": (0.5, 3, f"{noise}\nno such column\n{noise}")}))
    assert run.messages == [
        f"worker 1 failed with exit code 3; its last lines:\n  no such column{LOG.format('worker-1')}"
    ]


@pytest.mark.parametrize(
    ("end", "text", "code", "words"),
    [
        (1, "ValueError: no such column", 1, "failed with exit code 1; its last lines:\n  ValueError: no such column"),
        (9, "last words", 9, "failed with exit code 9; its last lines:\n  last words"),
        (-SIGSEGV, "", 139, "was killed by SIGSEGV (exit code 139); its last lines:\n  (it printed nothing)"),
    ],
)
@pytest.mark.parametrize(("name", "options"), [("worker 0", ()), ("worker 1", ()), ("chief 0", ("--chief",))])
def test_whoever_fails_is_named(
    simulate, name: str, options: tuple[str, ...], end: int, text: str, code: int, words: str
) -> None:
    run = simulate(ends({name: (0.5, end, text)}), *options)
    assert run.code == code
    assert run.messages == [f"{name} {words}{LOG.format(name.replace(' ', '-'))}"]
    assert len(run.signals) == 1


def test_parameter_servers_are_named_too(simulate) -> None:
    run = simulate(ends({"ps 0": (0.5, 7, "")}), "--ps", "1")
    assert run.code == 7
    assert run.messages[-1].startswith("ps 0 failed with exit code 7; ")
    assert len(run.signals) == 3


@pytest.mark.parametrize(("grace", "patience"), [("30", 2.0), ("1", 1.0), ("0", 0.0)])
def test_who_ignores_sigterm_is_killed_soon(simulate, grace: str, patience: float) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.handlers[SIGTERM] = None
        yield 0.5 if process.index else FOREVER
        return 5

    run = simulate(program, "--grace", grace)
    assert run.code == 5
    assert run.signals[0] == (0.5, "worker 0", SIGTERM)
    assert run.signals[1][0] == pytest.approx(0.5 + patience, abs=TICK)
    assert run.signals[1:] == [(run.signals[1][0], "worker 0", SIGKILL)]


CULPRIT = "ValueError: the culprit"


@pytest.mark.parametrize(
    ("culprit_ends", "named"),
    [
        (0.25, "worker 1"),
        (0.75, "worker 1"),
        (2.25, "worker 1"),
        (2.25 + TICK, "worker 1"),
        (2.25 + 2 * TICK, "worker 0"),
    ],
    ids=["same tick", "soon", "at the limit", "last moment", "too late"],
)
def test_a_consequence_that_ends_first_is_not_named_if_the_culprit_ends_within_a_moment(
    simulate, culprit_ends: float, named: str
) -> None:
    run = simulate(ends({"worker 0": (0.25, 1, UNAVAILABLE), "worker 1": (culprit_ends, 4, CULPRIT)}))
    assert run.code == (4 if named == "worker 1" else 1)
    (failure,) = run.of_kind("failure")
    assert (failure["task"], failure["time"]) == (named, min(culprit_ends, 2.25 + TICK))
    assert run.messages[-1].startswith(f"{named} failed with exit code {run.code}; its last lines:\n")


def test_a_consequence_without_a_culprit_is_named(simulate) -> None:
    run = simulate(ends({"worker 1": (0.25, 6, UNAVAILABLE)}))
    assert (run.code, run.of_kind("failure")[0]["time"]) == (6, 2.25 + TICK)


def test_nobody_is_left_to_be_the_culprit(simulate) -> None:
    run = simulate(ends({"worker 0": (0.25, 6, UNAVAILABLE), "worker 1": (0.25, 0, "")}))
    assert (run.code, run.seconds) == (6, 0.25 + TICK)
    assert run.messages[-1].startswith("worker 0 failed with exit code 6; ")


def test_of_two_failures_in_the_same_tick_the_first_in_the_plan_is_named(simulate) -> None:
    run = simulate(ends({"worker 0": (0.5, 0, ""), "worker 1": (0.5, 3, ""), "worker 2": (0.5, 4, "")}), "-n", "3")
    assert run.code == 3
    assert run.kinds == ["start", "failure", "gave-up"]
    assert run.of_kind("failure")[0]["task"] == "worker 1"


def test_later_failures_do_not_count(simulate) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.handlers[SIGTERM] = lambda process: 8
        yield 0.5 if process.index else FOREVER
        return 4

    run = simulate(program)
    assert (run.code, len(run.messages), run.kinds) == (4, 1, ["start", "failure", "gave-up"])


@pytest.mark.parametrize("last", ["worker 0", "worker 1"])
def test_processes_may_end_at_different_times(simulate, last: str) -> None:
    run = simulate(ends({"worker 0": (0.0, 0, ""), "worker 1": (0.0, 0, ""), last: (9.0, 0, "")}))
    assert (run.code, run.messages, run.signals) == (0, [], [])
    assert run.kinds == ["start", "complete"]
    assert run.seconds == 9.0 + TICK
