"""`tfdist goodput`: each second of a run belongs to exactly one kind, whatever is in its log."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from click.testing import CliRunner
from hypothesis import strategies as st

from tfdist.jobs.goodput import KINDS, account_of
from tfdist.launcher.command import main
from tfdist.supervision.events import EventLog, events_in
from tfdist.supervision.time_spent import BETWEEN, SAVING, STEPS, VALIDATION, TimeSpent
from tfdist.supervision.time_spent import KINDS as SPENT

NOON = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))


class Log:
    """Writes the events of a run that is made up; each method returns the log, for the next one."""

    def __init__(self, begin: float = NOON) -> None:
        self.now, self.begin = begin, begin
        self.events: list[dict[str, Any]] = []
        self.spent: dict[str, float] = {}
        self.trained = self.pid = 0

    def add(self, name: str, what: str, after: float = 0.0, **more: Any) -> Log:
        self.now += after
        self.events.append({"time": self.now, "name": name, "event": what, **more})
        return self

    def launcher(self, what: str, after: float = 0.0, **more: Any) -> Log:
        return self.add("launcher", what, after, **more)

    def process(self) -> Log:
        """What follows is written by another process, which begins at nothing."""
        self.pid, self.trained, self.spent = self.pid + 1, 0, {}
        return self

    def start(self, after: float = 0.0) -> Log:
        """The launcher starts processes."""
        return self.launcher("start", after, processes={"worker 0": 1, "worker 1": 2}).process()

    def report(self, after: float, new: int = 0, name: str = "worker 0", fit: int = 1, **spent: float) -> Log:
        """The chief tells what it has done since its last line, so many steps among it."""
        self.trained += new
        self.spent = {kind: self.spent.get(kind, 0.0) + spent.get(kind, 0.0) for kind in (*SPENT, "waiting_for_data")}
        who = {"rank": 0, "host": "a", "pid": self.pid}
        return self.add(name, "progress", after, fit=fit, trained=self.trained, spent=dict(self.spent), **who)

    def first(self, after: float = 20.0, name: str = "worker 0") -> Log:
        """Start and first step of a process: of the time, three seconds are known to be its fit's."""
        return self.report(after, 1, name, preparing=1.0, first_step=2.0)

    def hundred(self) -> Log:
        """A hundred steps, in ten seconds."""
        return self.report(10, 100, steps=10)

    def begun(self) -> Log:
        return self.start().first().hundred()

    def resumed(self, after: float, step: int, name: str = "worker 0") -> Log:
        return self.add(name, "resumed", after, step=step)

    def failure(self, after: float, step: int) -> Log:
        return self.launcher("failure", after, task="worker 1", cause="worker 1 was killed", step=step)


COSTS = ("stopped", "restart", "redone", "steps_redone")
OTHER_WAITS = {"rank": 1, "host": "b", "pid": 7, "trained": 50, "spent": {"steps": 5.0, "waiting_for_data": 2.0}}
# What has happened; the kinds that took time, until so many seconds after noon or the last event; and of each
# interruption the cause, the seconds without a process, of the restart and of repeated steps, and their number.
RUNS: dict[str, tuple[Log, float | None, dict[str, float], list[tuple[str, float, float, float, int]]]] = {
    "nothing disturbs it": (
        Log().begun().report(10, 60, steps=6, validation=3, saving=0.75, between_epochs=0.25).launcher("complete", 4),
        None,
        {"training": 16.0, "start": 20.0, "validation": 3.0, "saving": 0.75, "other": 4.25},
        [],
    ),
    "the process that waits longest holds up all": (
        Log().start().first().add("worker 1", "progress", **OTHER_WAITS).report(10, 99, steps=10, waiting_for_data=1),
        None,
        {"training": 6.0, "data": 4.0, "start": 20.0},
        [],
    ),
    # Twenty steps after the last line, and a hang of three seconds. Of the hundred steps, 29 had been done before; the
    # thirtieth is the first step.
    "a failure": (
        Log().begun().failure(5, 121).launcher("restart", 0.5).start(0.5).resumed(11, 91).first(1).hundred(),
        None,
        {"training": 17.1, "redone": 2.9, "restart": 18.0, "start": 20.0},
        [("worker 1 was killed", 0.0, 18.0, 2.9, 30)],
    ),
    "a failure without a backup": (
        Log().begun().failure(0, 101).start(1).first(4).hundred(),
        None,
        {"training": 10.0, "redone": 10.0, "restart": 5.0, "start": 20.0},
        [("worker 1 was killed", 0.0, 5.0, 10.0, 101)],
    ),
    "a failure after which nothing is done again": (
        Log().begun().failure(0, 101).start(1).resumed(3, 101).first(1).hundred(),
        None,
        {"training": 20.0, "restart": 5.0, "start": 20.0},
        [("worker 1 was killed", 0.0, 5.0, 0.0, 0)],
    ),
    "lines of processes that are being ended": (
        Log().start().first().failure(0, 1).report(1, 5, steps=1).start(1).first(5),
        None,
        {"start": 20.0, "restart": 7.0},
        [("worker 1 was killed", 0.0, 7.0, 0.0, 1)],
    ),
    "a preemption": (
        Log()
        .begun()
        .add("worker 1", "preempted", 2, step=111)
        .add("worker 0", "preempted", 1, step=111)
        .launcher("preempted", 1, exit_code=77)
        .start(3600)
        .resumed(11, 111)
        .first(1)
        .hundred(),
        None,
        {"training": 20.0, "saving": 3.0, "start": 20.0, "restart": 12.0, "stopped": 3601.0},
        [("preempted at step 111", 3601.0, 12.0, 0.0, 0)],
    ),
    "it grows": (
        Log()
        .begun()
        .add("worker 0", "preempted", 2, step=101)
        .launcher("restart", 1, restart=2, workers=3, delay=0.0)
        .start()
        .resumed(5, 101)
        .first(1),
        None,
        {"training": 10.0, "saving": 2.0, "start": 20.0, "restart": 6.0, "stopped": 1.0},
        [("preempted at step 101", 1.0, 6.0, 0.0, 0)],
    ),
    "the launcher is killed": (
        Log().begun().start(500).resumed(5, 51).first(1).hundred(),
        None,
        {"training": 15.1, "redone": 4.9, "start": 20.0, "restart": 6.0, "stopped": 500.0},
        [("it ended without a word, as when its launcher is killed", 500.0, 6.0, 4.9, 50)],
    ),
    "the launcher is killed before the first step": (
        Log().start().start(500).first(),
        None,
        {"stopped": 500.0, "restart": 20.0},
        [("it ended without a word, as when its launcher is killed", 500.0, 20.0, 0.0, 0)],
    ),
    "it starts": (Log().start(), 30, {"start": 30.0}, []),
    "it goes on": (Log().start().first(), 30, {"start": 20.0, "other": 10.0}, []),
    "the present is before the last event": (Log().start().first(), -30, {"start": 20.0}, []),
    "it restarts": (
        Log().start().first().failure(0, 1),
        30,
        {"start": 20.0, "restart": 10.0},
        [("worker 1 was killed", 0.0, 10.0, 0.0, 0)],
    ),
    "it gives up": (
        Log().start().failure(7, 0).launcher("gave-up", 1, exit_code=1, reason=""),
        None,
        {"start": 7.0, "restart": 1.0},
        [("worker 1 was killed", 0.0, 1.0, 0.0, 0)],
    ),
    "a worker is replaced": (
        Log()
        .start()
        .first()
        .launcher("replacement", 4, task="worker 1", cause="killed by SIGKILL")
        .report(6, 99, steps=6),
        None,
        {"training": 6.0, "start": 20.0, "other": 4.0},
        [("killed by SIGKILL", 0.0, 0.0, 0.0, 0)],
    ),
    "another process becomes the chief": (
        Log()
        .begun()
        .resumed(0, 101, "worker 1")
        .process()
        .report(10, 51, "worker 1", preparing=2, first_step=1, steps=5),
        None,
        {"training": 15.0, "start": 20.0, "restart": 5.0},
        [("another process goes on", 0.0, 5.0, 0.0, 0)],
    ),
    "another fit": (
        Log().begun().report(10, 0, fit=2, preparing=1, first_step=1, steps=5),
        None,
        {"training": 15.0, "start": 22.0, "other": 3.0},
        [],
    ),
    "another training in the same folder": (
        Log().begun().launcher("complete", 1).start(100).first().hundred().launcher("complete", 1),
        None,
        {"training": 20.0, "start": 40.0, "stopped": 100.0, "other": 2.0},
        [],
    ),
    # As on Slurm, where each process is started by srun.
    "without a launcher": (
        Log()
        .process()
        .first(0)
        .hundred()
        .add("worker 0", "preempted", 1, step=101)
        .process()
        .resumed(600, 101)
        .first(1),
        None,
        {"training": 10.0, "start": 3.0, "saving": 1.0, "restart": 3.0, "stopped": 598.0},
        [("preempted at step 101", 598.0, 3.0, 0.0, 0)],
    ),
    "without a launcher, and killed": (
        Log().process().first(0).hundred().process().resumed(601, 101).first(1),
        None,
        {"training": 10.0, "start": 3.0, "restart": 602.0},
        [("another process goes on", 0.0, 602.0, 0.0, 0)],
    ),
    "the parts are longer than the whole": (
        Log().start().first().report(10, 100, steps=30, saving=10),
        None,
        {"training": 7.5, "saving": 2.5, "start": 20.0},
        [],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_the_time_of_a_run_went_into(name: str) -> None:
    log, until, kinds, interruptions = RUNS[name]
    account = account_of(log.events, None if until is None else NOON + until)
    assert {kind: round(value, 6) for kind, value in account.seconds.items() if value > 1e-9} == kinds
    assert sum(kinds.values()) == pytest.approx(account.end - account.begin)
    found = [[round(one[part], 6) for part in COSTS] for one in account.interruptions]
    assert [(one["cause"], *costs) for one, costs in zip(account.interruptions, found, strict=True)] == interruptions
    assert account.has_trained == any(event["event"] == "progress" for event in log.events)


# --- Whatever is in a log ---------------------------------------------------------------------------------------------

NUMBERS = st.floats(allow_nan=True) | st.integers(-(10**40), 10**40) | st.floats(0, 100) | st.integers(0, 100)
ANYTHING = st.none() | st.booleans() | NUMBERS | st.text(max_size=3) | st.lists(st.integers(), max_size=1)
SPENT_TIMES = st.dictionaries(st.sampled_from([*SPENT, "waiting_for_data", "x"]), ANYTHING | st.floats(0, 50))
SENSIBLE = st.fixed_dictionaries(
    {"rank": st.sampled_from([0, 0, 0, 1, None, "0"])},
    optional={
        "spent": SPENT_TIMES,
        "trained": st.integers(0, 50),
        "fit": st.integers(0, 3),
        "step": st.integers(0, 60),
        "host": st.sampled_from(["a", "b"]),
        "pid": st.integers(1, 2),
        "steps_redone": st.integers(0, 5),
        "cause": st.text(max_size=3),
        "task": st.just("worker 1"),
    },
)
FOREIGN = st.dictionaries(
    st.sampled_from(["rank", "spent", "trained", "fit", "step", "host", "pid", "steps_redone", "exit_code"]),
    ANYTHING | SPENT_TIMES,
)
EVENT_KINDS = [
    *["start", "progress", "progress", "progress", "failure", "restart", "training-again", "replacement", "loss"],
    *["resumed", "saved", "preempted", "unsaved", "complete", "gave-up", "interrupted", "not saved", "\x1b[2J"],
]
EVENTS = st.lists(
    st.tuples(
        st.one_of(st.floats(-5, 60), st.floats(-1e5, 1e5)),
        st.sampled_from(["launcher", "worker 0", "worker 1", "chief"]),
        st.sampled_from(EVENT_KINDS),
        SENSIBLE | FOREIGN,
    ),
    max_size=25,
)


@hypothesis.settings(max_examples=100, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@hypothesis.given(EVENTS, st.none() | st.floats(-100, 1000))
def test_each_second_belongs_to_exactly_one_kind(written: list, later: float | None) -> None:
    now, lines = NOON, []
    for after, name, kind, fields in written:
        now = max(now + after, 0.0)
        lines.append(json.dumps({"time": now, "name": name, "event": kind, **fields}))
    # As it is read from a file, in which other things are as well.
    events = events_in("no event\n" + "\n".join(lines) + '\n{"time": 5.0, "na')
    assert len(events) == len(written)
    account = account_of(events, None if later is None else now + later)
    seconds, total = account.seconds, account.end - account.begin
    assert set(seconds) == set(KINDS) and all(value >= 0 for value in seconds.values())
    assert sum(seconds.values()) == pytest.approx(total, abs=1e-3)
    assert sum(account.shares.values()) == pytest.approx(1.0 if total > 0 else 0.0, abs=1e-6)
    assert all(one[part] >= 0 for one in account.interruptions for part in COSTS)
    interrupted = sum(one[part] for one in account.interruptions for part in COSTS[:-1])
    assert interrupted <= seconds["stopped"] + seconds["restart"] + seconds["redone"] + 1e-3


# --- The command ------------------------------------------------------------------------------------------------------


def run_with_a_failure(folder: Path) -> Path:
    log = Log().start().first().report(100, 1000, steps=100)
    log.launcher("failure", 0, task="worker 1", cause="worker 1 was\x1b[2J killed", step=1001)
    log.start(1).resumed(5, 901).first(4).report(70, 700, steps=70).launcher("complete", 10)
    folder.mkdir(parents=True)
    lines = [json.dumps(event) for event in log.events]
    text = "\n".join([*lines[:3], "\x1b]0;title\x07 not JSON", *lines[3:], '{"time": 1e5, "name": 3}', '{"ti'])
    (folder / "events.jsonl").write_text(text + "\n")
    return folder


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["goodput", *arguments], env={"COLUMNS": "130"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with_a_failure(tmp_path / "tfdist-logs" / "run")
    monkeypatch.chdir(tmp_path)
    output = shown()
    lines = [line.split() for line in output.splitlines()]
    assert output.startswith("tfdist-logs/run: complete after 4 min\n  goodput: 76.2% of 4 min went into new training")
    assert "new training steps 0:02:40 76.2%".split() in lines  # noqa: SIM905
    assert "steps done again 0:00:10 4.7%".split() in lines  # noqa: SIM905
    assert "total 0:03:30 100.0%".split() in lines  # noqa: SIM905
    assert "2026-11-22" not in output
    failures = shown("tfdist-logs", "--per-failure")
    words = ["0:00:00", "0:00:10", "0:00:10", "100", "0:00:20", "worker", "1", "was\\x1b[2J", "killed"]
    assert words in [line.split()[2:] for line in failures.splitlines()]
    assert "\x1b" not in output + failures


def test_json_for_programs(tmp_path: Path) -> None:
    facts = json.loads(shown(str(run_with_a_failure(tmp_path / "run")), "--json"))
    assert facts["goodput"] == pytest.approx(160.1 / 210, abs=1e-3)
    assert sum(facts["shares"].values()) == pytest.approx(1.0)
    assert list(facts["seconds"]) == list(KINDS)
    assert facts["end"] - facts["begin"] == facts["total_seconds"] == 210
    (failure,) = facts["interruptions"]
    assert (failure["steps_redone"], failure["restart"]) == (100, 10.0) and failure["redone"] == pytest.approx(9.9)


def test_a_run_without_fit(tmp_path: Path) -> None:
    for what in ("start", "complete"):
        EventLog(str(tmp_path), "launcher").write(what)
    assert "no training steps reported" in shown(str(tmp_path))


def test_runs_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDIST_JOBS_DIR", str(tmp_path))
    for arguments in ([str(tmp_path)], ["local-7"]):
        result = CliRunner().invoke(main, ["goodput", *arguments])
        assert result.exit_code == 1 and "Received: " in result.output


def test_a_search_is_refused(tmp_path: Path) -> None:
    """Its trials run side by side: no second belongs to one kind."""
    events = [{"time": NOON, "name": "launcher", "event": "start", "processes": {"tuner 0": 1}}]
    events += [{"time": NOON, "name": "tuner 0", "event": "search", "objective": "loss", "max_trials": 3}]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    result = CliRunner().invoke(main, ["goodput", str(tmp_path)])
    assert result.exit_code == 1
    assert "a search of `tfdist tune`. Expected: a training" in result.output


# --- What processes count ---------------------------------------------------------------------------------------------


def test_what_the_time_of_a_process_goes_into() -> None:
    now = [0.0]
    spent = TimeSpent(lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    passes(50)
    spent.fit_begins()
    passes(1)
    spent.goes_into(STEPS)
    passes(2)
    with spent.during(VALIDATION):
        passes(4)
        with pytest.raises(SystemExit), spent.during(SAVING):
            passes(8)
            raise SystemExit(77)
    passes(16)
    spent.goes_into(BETWEEN)
    passes(32)
    assert spent.goes_into(None) == BETWEEN
    passes(64)
    found = {kind: seconds for kind, seconds in spent.read().items() if seconds}
    assert found == {"preparing": 1, "steps": 18, "validation": 4, "saving": 8, "between_epochs": 32}
    spent.fit_begins()
    passes(128)
    assert spent.read()["preparing"] == 129 and spent.fits == 2


def test_the_calendar_of_the_tests() -> None:
    assert datetime.datetime.fromtimestamp(NOON).isoformat() == "2026-11-22T12:00:00"
