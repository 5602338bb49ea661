"""`tfdist monitor`: what is made of the events of a run, and how it is shown."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
from click.testing import CliRunner
from hypothesis import strategies as st
from rich.console import Console

from tfdist.jobs.monitor import Source, Watch, find, lives, status_of, view, watch
from tfdist.jobs.record import VARIABLE, Records
from tfdist.jobs.request import Request, SubmitError
from tfdist.jobs.run_state import RunState
from tfdist.jobs.status import FAILED, RUNNING, Status, last_progress
from tfdist.launcher.arguments import Target
from tfdist.launcher.command import main
from tfdist.plain_text import plain_text
from tfdist.supervision.events import events_in
from tfdist.supervision.identity import Identity

NOW = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))


def event(name: str, what: str, ago: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"time": NOW - ago, "name": name, "event": what, **more}


def start(ago: float, *names: str, restart: int = 0) -> dict[str, Any]:
    numbers = {name: 100 + i for i, name in enumerate(names)}
    return event("launcher", "start", ago, restart=restart, workers=len(names), processes=numbers)


def progress(name: str, rank: int, ago: float, **more: Any) -> dict[str, Any]:
    told = {"epoch": 2, "epochs": 10, "step": 20, "steps": 40, "loss": 0.12345, "seconds_left": 170.0}
    told |= {"steps_per_second": 2.1234, "data_wait": 0.125, "host": "node1", "pid": 500 + rank}
    return event(name, "progress", ago, rank=rank, **{**told, **more})


def run_of(*events: dict[str, Any]) -> RunState:
    run = RunState()
    for one in events:
        run.add(one)
    return run


def shown(run: RunState, status: str = "running", is_running: bool = True) -> list[str]:
    lines = plain_text(view(run, "logs/1", status, is_running, NOW), width=110).splitlines()
    return [line for line in lines if line.strip(" ─")]


TWO = (
    start(100, "worker 0", "worker 1"),
    progress("worker 1", 1, 5, loss=0.2, data_wait=None),
    event("worker 0", "saved", 12, step=58, checkpoint="a"),
    progress("worker 0", 0, 2),
)


ANYTHING = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "worker 0", "\x1b[2J", "5"])
    | st.lists(st.integers(), max_size=1)
    | st.dictionaries(st.sampled_from(["pid", "start", "boot", "worker 0"]), st.integers() | st.just("x"))
)
FIELDS = [
    "name",
    "task",
    "step",
    "epoch",
    "epochs",
    "steps",
    "loss",
    "rank",
    "host",
    "pid",
    "steps_per_second",
    "data_wait",
    "cause",
    "exit_code",
    "launcher",
    "processes",
    "workers",
    "restart",
    "seconds",
    "kind",
    "reason",
    "signal",
    "delay",
    "time",
    "event",
    "checkpoint",
    "error",
    "steps_redone",
]
KINDS = ["start", "progress", "saved", "failure", "restart", "complete", "gave-up", "replacement", "loss", "resumed"]


@pytest.mark.nightly
@hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@hypothesis.given(
    st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.sampled_from(["launcher", "worker 0", "worker 1", "\x1b]0;title\x07"]),
            st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=6),
        ),
        max_size=4,
    ),
    st.binary(max_size=30),
)
def test_whatever_is_in_the_log_there_is_a_view(written: list, noise: bytes) -> None:
    lines = []
    for kind, name, fields in written:
        base = {"time": 5.0, "name": name, "event": kind, "epoch": 1, "step": 2, "processes": {name: 1}}
        lines.append(json.dumps({**base, **fields}).encode() + noise)
    run = RunState()
    found = events_in(b"\n".join(lines).decode(errors="replace"))
    for event in found:
        run.add(event)
    text = plain_text(view(run, "run", status_of(run, True, 100.0)[0], True, 100.0))
    assert all(character.isprintable() or character == "\n" for character in text)
    last_progress(found)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.text() | st.text('{}[]",: 0123456789.eE-time\n', min_size=5))
@hypothesis.example("[" * 100_000)
@hypothesis.example("9" * 5000 + "}")
def test_no_line_ends_the_reading_of_a_log(text: str) -> None:
    assert isinstance(events_in('{"time": ' + text), list) and isinstance(events_in(text), list)


def test_a_run_with_two_workers() -> None:
    assert shown(run_of(*TWO)) == [
        "logs/1: running",
        "  epoch 2/10, step 20/40, loss 0.1235, about 3 min left",
        "  2 processes, restarts: 0, last backup 12 s ago, after step 58",
        " process    host    pid   epoch    step   steps/s   waits for data     loss   state",
        " worker 0   node1   500    2/10   20/40      2.12              12%   0.1235   running",
        " worker 1   node1   501    2/10   20/40      2.12                -      0.2   running",
    ]


def test_workers_that_rarely_exchange() -> None:
    run = run_of(*TWO, progress("worker 0", 0, 1, steps_alone=12))
    assert (
        shown(run)[2] == "  2 processes, restarts: 0, last backup 12 s ago, after step 58, last exchange 12 steps ago"
    )


def test_the_states_of_a_process() -> None:
    run = run_of(start(100, "worker 0", "worker 1"))
    assert [rank.state for rank in run.ranks.values()] == ["starting", "starting"]
    assert shown(run)[-1].split() == ["worker", "1", *"-", "101", *"-----", "starting"]
    for one in TWO:
        run.add(one)
    killed = {
        "task": "worker 1",
        "kind": "signal",
        "cause": "worker 1 was killed by SIGKILL at step 61",
        "exit_code": 137,
    }
    run.add(event("launcher", "failure", 1, **killed, step=61))
    assert [rank.state for rank in run.ranks.values()] == ["running", "ended, exit code 137"]
    run.add(event("launcher", "failure", 1, task="worker 0", kind="hang", cause="it hangs", exit_code=124))
    assert run.ranks["worker 0"].state == "ended, it stood still"
    run.add(event("launcher", "restart", 1, restart=1, workers=2, delay=0.0))
    assert [rank.state for rank in run.ranks.values()] == ["restarting", "restarting"]
    run.add(start(1, "worker 0", "worker 1", restart=1))
    assert [rank.state for rank in run.ranks.values()] == ["starting", "starting"]
    # How far it was is still to be seen, and where; what it does now is not known.
    assert shown(run)[-2].split() == ["worker", "0", "node1", "100", "2/10", "20/40", "-", "-", "0.1235", "starting"]
    for name in ("worker 1", "worker 0"):
        run.add(event(name, "resumed", 0, step=58, checkpoint="ckpt-58"))
    run.add(progress("worker 1", 1, 0, step=22))
    run.add(event("launcher", "training-again", 0, restart=1, seconds=1.44, resumed_step=58, steps_redone=3))
    assert [rank.state for rank in run.ranks.values()] == ["starting", "running"]
    assert run.restarts == 1
    assert [text for _, text in run.notable] == [
        "worker 1 was killed by SIGKILL at step 61",
        "it hangs",
        "restart 1 with 2 workers",
        "goes on after step 58, with backup ckpt-58",
        "training again after 1.4 s, 3 steps redone",
    ]
    assert shown(run)[7] == "12:00:00  training again after 1.4 s, 3 steps redone"
    run.add(event("launcher", "complete", 0, restarts=1))
    assert [rank.state for rank in run.ranks.values()] == ["ended, exit code 0"] * 2
    assert status_of(run, False, NOW) == ("complete after 2 min", False)


@pytest.mark.parametrize(
    ("last", "ending", "states"),
    [
        (("gave-up", {"exit_code": 3, "reason": ""}), "failed after 2 min: exit code 3", ["ended", "ended"]),
        (
            ("gave-up", {"exit_code": 1, "reason": "not restarted"}),
            "failed after 2 min: exit code 1, not restarted",
            ["ended", "ended"],
        ),
        (("interrupted", {"signal": "SIGINT", "exit_code": 130}), "interrupted by SIGINT after 2 min", ["ended"] * 2),
        (
            ("interrupted", {"signal": "SIGTERM", "exit_code": 74}),
            "interrupted by SIGTERM after 2 min: it could not save",
            ["ended"] * 2,
        ),
        (
            ("preempted", {"exit_code": 77}),
            "preempted after 2 min: saved, to be started again",
            ["ended"] * 2,
        ),
    ],
)
def test_the_ends_of_a_run(last: tuple[str, dict], ending: str, states: list[str]) -> None:
    run = run_of(*TWO, event("launcher", last[0], 0, **last[1]))
    assert status_of(run, True, NOW) == (ending, False)
    assert [rank.state for rank in run.ranks.values()] == states
    # A worker that is preempted does not end the run, and progress that comes late does not bring it to life.
    run.add(progress("worker 0", 0, 0))
    assert [rank.state for rank in run.ranks.values()] == states
    assert status_of(run_of(*TWO, event("worker 0", "preempted", 0, step=3)), True, NOW) == ("running for 2 min", True)


def test_a_log_without_a_launcher_that_says_nothing_more() -> None:
    run = run_of(progress("worker 0", 0, 1790))
    assert status_of(run, True, NOW) == ("running for 30 min", True)
    run = run_of(progress("worker 0", 0, 1900))
    assert status_of(run, True, NOW) == (
        "silent for 32 min, and it has no launcher that would say whether it goes on",
        False,
    )


def test_an_engine_that_cannot_be_asked_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfdist.jobs.monitor._ASK_EVERY", 0.0)
    answers = [Status(RUNNING, started=NOW), SubmitError("squeue: timed out"), Status(FAILED, "exit code 3")]

    def ask() -> Status:
        answer = answers.pop(0)
        if isinstance(answer, SubmitError):
            raise answer
        return answer

    followed = Watch(Source("slurm-1", write(tmp_path, *TWO), ask))
    assert followed.goes_on and len(answers) == 1  # the second look has no answer
    followed.look()
    assert not followed.goes_on
    assert plain_text(followed.view()).startswith("slurm-1: failed")
    with pytest.raises(SubmitError, match="no such job"):
        answers.append(SubmitError("no such job"))
        Watch(Source("slurm-2", tmp_path, ask))


def test_a_launcher_that_was_killed() -> None:
    run = run_of(*TWO)
    assert status_of(run, False, NOW) == (
        "lost: its launcher is gone, and has not said how the run ended",
        False,
    )
    assert [line.split()[-1] for line in shown(run, "lost", is_running=False)[-2:]] == ["ended", "ended"]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = Identity.of(child.pid)
    assert identity is not None and lives(identity) and lives(None)
    child.communicate(b"\n", timeout=60)
    assert not lives(identity)
    # What becomes of processes on another machine cannot be known here.
    assert lives(dataclasses.replace(identity, boot="another"))
    # In another container on this machine, the same id is another process'.
    assert lives(dataclasses.replace(identity, boot=re.sub(r"\d+$", "4026530000", identity.boot)))


def write(folder: Path, *events: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in events)
    return folder


def test_the_run_that_is_meant(tmp_path: Path) -> None:
    env = {VARIABLE: str(tmp_path / "jobs")}
    old = write(tmp_path / "tfdist-logs" / "b", *TWO)
    new = write(tmp_path / "tfdist-logs" / "a", *TWO)
    os.utime(old / "events.jsonl", (1, 1))
    (tmp_path / "tfdist-logs" / "c").mkdir()
    assert find(None, tmp_path, env) == Source("tfdist-logs/a", new)
    assert find("tfdist-logs", tmp_path, env) == Source("tfdist-logs/a", new)
    assert find("tfdist-logs/b", tmp_path, env) == Source("tfdist-logs/b", old)
    for what, expected in (
        ("tfdist-logs/c", "in which no run has logged. Expected: the folder that `tfdist run` names at its start"),
        ("local-9", "job 'local-9', which is not in"),
    ):
        with pytest.raises(SubmitError) as caught:
            find(what, tmp_path, env)
        assert str(caught.value).startswith("Received: ") and expected in str(caught.value)


def record(jobs: Path, scheduler: str, **details: Any) -> Path:
    request = Request(scheduler, Target("script", ("t.py",)), image="x" * (scheduler == "kubernetes"))
    return Records(jobs).add(request, grace=60, **details).event_log.parent


def test_jobs_have_the_state_that_their_engine_tells(tmp_path: Path) -> None:
    env = {VARIABLE: str(tmp_path / "jobs")}
    final = {"state": "failed", "detail": "exit code 3", "started": 1.0, "ended": 31.0}
    logs = record(tmp_path / "jobs", "slurm", job="1", cluster="", final=final)
    source = find("slurm-1", tmp_path, env)
    assert (source.title, source.folder) == ("slurm-1", logs)
    assert source.ask is not None and str(source.ask()) == "failed after 30 s: exit code 3"
    # There is no launcher, and it was the same for all processes.
    write(logs, progress("worker 0", 0, 9), progress("worker 1", 1, 9))
    result = CliRunner().invoke(main, ["monitor", "slurm-1"], env={**env, "COLUMNS": "120"})
    assert result.exit_code == 0
    lines = [line for line in result.output.splitlines() if line.strip()]
    assert lines[0] == "slurm-1: failed after 30 s: exit code 3"
    assert [line.split()[-1] for line in lines[-2:]] == ["ended", "ended"]
    record(tmp_path / "jobs", "kubernetes", job="t", namespace="n", context=None)
    with pytest.raises(SubmitError, match="a job of Kubernetes, whose events are in the output of its pods"):
        find("kubernetes-1", tmp_path, env)
    assert len(Records.of_user(env).all()[0]) == 2


def test_a_run_that_goes_on_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "logs", *TWO[:2])
    later = [[progress("worker 0", 0, 0, step=31)], [event("launcher", "complete", 0, restarts=0)]]
    # Not for all: threads that other tests have left may sleep, too.
    clock = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: write(folder, *later.pop(0))})
    monkeypatch.setattr("tfdist.jobs.monitor.time", clock)
    monkeypatch.setattr("tfdist.jobs.monitor._SILENCE", float("inf"))  # these events are old
    console = Console(file=io.StringIO(), force_terminal=True, width=110, height=40, color_system=None)
    watch(Source("logs", folder), console)
    text = console.file.getvalue()
    assert later == []
    assert text.index("running for") < text.index("31/40") < text.index("complete after 2 min")


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize(
    ("kind", "field"),
    [("training-again", "seconds"), ("restart", "workers"), ("search", "max_trials"), ("trial-ended", "score")],
)
def test_integers_that_nobody_has_measured(tmp_path: Path, digits: int, kind: str, field: str) -> None:
    """JSON has integers of any length, Python's conversions have not."""
    first = {"time": 5.0, "name": "launcher", "event": "start", "processes": {"worker 0": 7}}
    more = {"status": "COMPLETED", "counts": {"done": 1, "running": 0, "best": 0}}
    last = json.dumps({"time": 6.0, "name": "launcher", "event": kind, **more, field: -1}).replace("-1", "9" * digits)
    (tmp_path / "events.jsonl").write_text(f"{json.dumps(first)}\n{last}\n{last.replace('0}', '9' * 400 + '}')}\n")
    for command in ("monitor", "goodput"):
        done = CliRunner().invoke(main, [command, str(tmp_path)])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert "Traceback" not in done.output and done.output
