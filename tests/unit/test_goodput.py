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

from tfdist.jobs.goodput import report
from tfdist.jobs.goodput.account import Account, account_of
from tfdist.jobs.goodput.kinds import KINDS, PUBLISHED
from tfdist.jobs.goodput.report import by_day, shares
from tfdist.jobs.goodput.times import corrected_times, without_the_future
from tfdist.launcher.command import main
from tfdist.supervision.events import EventLog, events_in
from tfdist.supervision.time_spent import BETWEEN, SAVING, STEPS, VALIDATION, TimeSpent
from tfdist.supervision.time_spent import KINDS as SPENT

NOON = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))


class Log:
    """Writes the events of a run that is made up."""

    def __init__(self, begin: float = NOON) -> None:
        self.now, self.begin = begin, begin
        self.events: list[dict[str, Any]] = []
        self.spent: dict[str, float] = {}
        self.trained = self.pid = 0

    def add(self, name: str, what: str, after: float = 0.0, **more: Any) -> None:
        self.now += after
        self.events.append({"time": self.now, "name": name, "event": what, **more})

    def launcher(self, what: str, after: float = 0.0, **more: Any) -> None:
        self.add("launcher", what, after, **more)

    def start(self, after: float = 0.0) -> None:
        """The launcher starts processes, in which everything begins anew."""
        self.launcher("start", after, processes={"worker 0": 1, "worker 1": 2})
        self.pid, self.trained, self.spent = self.pid + 1, 0, {}

    def report(self, after: float, new: int = 0, name: str = "worker 0", fit: int = 1, **spent: float) -> None:
        """The chief tells what it has done since its last line, so many steps among it."""
        self.trained += new
        self.spent = {kind: self.spent.get(kind, 0.0) + spent.get(kind, 0.0) for kind in (*SPENT, "waiting_for_data")}
        who = {"rank": 0, "host": "a", "pid": self.pid, "clock": self.now + after - self.begin}
        self.add(name, "progress", after, fit=fit, trained=self.trained, spent=dict(self.spent), **who)

    def first(self, after: float = 20.0) -> None:
        """Start and first step of a process: of the time, three seconds are known to be its fit's."""
        self.report(after, 1, preparing=1.0, first_step=2.0)

    def account(self, until: float | None = None) -> Account:
        return account_of(self.events, until)

    def kinds(self, until: float | None = None) -> dict[str, float]:
        """The kinds that took time."""
        seconds = self.account(until).seconds
        assert sum(seconds.values()) == pytest.approx(self.account(until).total)
        return {kind: round(value, 6) for kind, value in seconds.items() if value > 1e-9}


def test_a_run_that_nothing_disturbs() -> None:
    log = Log()
    log.start()
    log.first(20)
    log.report(10, 100, steps=10)
    log.report(10, 60, steps=6, validation=3, saving=0.75, between_epochs=0.25)
    log.launcher("complete", 4)
    assert log.kinds() == {
        **{"training": 16.0, "start": 20.0, "validation": 3.0, "saving": 0.75, "other": 4.25},
    }
    assert log.account().interruptions == [] and log.account().has_trained


def test_the_process_that_waits_longest_holds_up_all() -> None:
    log = Log()
    log.start()
    log.first(20)
    log.report(10, 100, steps=10, waiting_for_data=1)
    assert log.kinds() == {"training": 9.0, "data": 1.0, "start": 20.0}
    # What another process tells is a share of its own time.
    spent = {"steps": 5.0, "waiting_for_data": 2.0}
    log.add("worker 1", "progress", 0, rank=1, host="b", pid=7, spent=spent, trained=50, fit=1)
    log.report(10, 100, steps=10, waiting_for_data=1)
    assert log.kinds() == {"training": 15.0, "data": 5.0, "start": 20.0}


def test_a_failure_costs_a_restart_and_steps_that_are_done_again() -> None:
    log = Log()
    log.start()
    log.first(20)
    log.report(10, 100, steps=10)
    # Twenty steps after the last line, and a hang of three seconds.
    log.launcher("failure", 5, task="worker 1", cause="worker 1 was killed", step=121)
    log.launcher("restart", 0.5)
    log.start(0.5)
    log.add("worker 0", "resumed", 11, step=91)
    log.first(1)
    log.launcher("training-again", 0, restart=1, seconds=13.0, resumed_step=91, steps_redone=30)
    log.report(10, 100, steps=10)
    log.launcher("complete", 1)
    # 29 of the hundred steps had been done before; the thirtieth is the first step.
    assert log.kinds() == {"training": 19.1, "redone": 2.9, "restart": 16.0, "start": 20.0, "other": 1.0}
    (one,) = log.account().interruptions
    assert (one.cause, one.steps_redone, round(one.redone, 6), one.stopped) == ("worker 1 was killed", 30, 2.9, 0.0)
    assert (one.time, round(one.restart, 6), round(one.lost, 6)) == (NOON + 32, 16.0, 18.9)


def test_without_a_backup_everything_is_done_again() -> None:
    log = Log()
    log.start()
    log.first(20)
    log.report(10, 100, steps=10)
    log.launcher("failure", 0, task="worker 1", step=101)
    log.start(1)
    log.first(4)
    log.report(10, 100, steps=10)
    assert log.kinds() == {"training": 10.0, "redone": 10.0, "restart": 5.0, "start": 20.0}
    assert log.account().interruptions[0].steps_redone == 101
    # The same, but that the steps are new.
    log.events.insert(-2, {"time": log.events[-2]["time"], "name": "worker 0", "event": "resumed", "step": 101})
    assert log.kinds() == {"training": 20.0, "restart": 5.0, "start": 20.0}


def test_after_a_preemption_it_is_started_again_later() -> None:
    log = Log()
    log.start()
    log.first(20)
    log.report(10, 100, steps=10)
    log.add("worker 1", "preempted", 2, step=111)
    log.add("worker 0", "preempted", 1, step=111)
    log.launcher("preempted", 1, exit_code=77)
    log.start(3600)
    log.add("worker 0", "resumed", 11, step=111)
    log.first(1)
    log.report(10, 100, steps=10)
    log.launcher("complete")
    assert log.kinds() == {
        **{"training": 21.0, "saving": 2.0, "start": 20.0, "restart": 12.0, "stopped": 3600.0, "other": 1.0},
    }
    (one,) = log.account().interruptions
    assert (one.cause, one.stopped, one.restart, one.redone) == ("preempted at step 111", 3600.0, 12.0, 0.0)


def test_a_launcher_that_was_killed_has_said_nothing() -> None:
    log = Log()
    log.start()
    log.first(20)
    log.report(10, 100, steps=10)
    assert log.kinds() == {"training": 10.0, "start": 20.0}
    log.start(500)
    log.add("worker 0", "resumed", 5, step=51)
    log.first(1)
    log.report(10, 100, steps=10)
    assert log.kinds() == {"training": 15.1, "redone": 4.9, "start": 20.0, "restart": 6.0, "stopped": 500.0}
    (one,) = log.account().interruptions
    assert one.cause.startswith("it ended without a word") and one.steps_redone == 50


def test_a_launcher_that_was_killed_before_the_first_step() -> None:
    log = Log()
    log.start()
    log.start(500)
    log.first(20)
    assert log.kinds() == {"stopped": 500.0, "restart": 20.0}


def test_a_run_that_goes_on_is_counted_up_to_now() -> None:
    log = Log()
    log.start()
    assert log.kinds(until=NOON + 30) == {"start": 30.0}
    log.first(20)
    assert log.kinds(until=NOON + 30) == {"start": 20.0, "other": 10.0}
    log.launcher("failure", 0, task="worker 1", step=1)
    assert log.kinds(until=NOON + 30) == {"start": 20.0, "restart": 10.0}
    # A clock may have been set back since.
    assert log.kinds(until=NOON - 30) == {"start": 20.0}


def test_lines_of_processes_that_are_being_ended_count_for_nothing() -> None:
    log = Log()
    log.start()
    log.first(20)
    log.launcher("failure", 0, task="worker 1", step=1)
    log.report(1, 5, steps=1)
    log.start(1)
    log.first(5)
    assert log.kinds() == {"start": 20.0, "restart": 7.0}


def test_a_run_that_gives_up() -> None:
    log = Log()
    log.start()
    log.launcher("failure", 7, task="worker 1", cause="worker 1 ended with exit code 1", step=0)
    log.launcher("gave-up", 1, exit_code=1, reason="")
    assert log.kinds() == {"start": 7.0, "restart": 1.0}
    assert not log.account().has_trained and len(log.account().interruptions) == 1


def test_a_worker_that_is_replaced_stops_nobody() -> None:
    log = Log()
    log.start()
    log.report(20, 1, name="chief", preparing=1.0, first_step=2.0)
    log.launcher("replacement", 4, task="worker 1", cause="worker 1 was killed by SIGKILL", number=1)
    log.report(6, 100, name="chief", steps=10)
    assert log.kinds() == {"training": 10.0, "start": 20.0}
    (one,) = log.account().interruptions
    assert (one.cause, one.lost) == ("worker 1 was killed by SIGKILL", 0.0)


def test_an_elastic_fit_is_called_again_in_the_same_process() -> None:
    log = Log()
    log.start()
    log.first(20)
    log.report(10, 100, steps=10)
    log.add("worker 0", "resumed", 0, step=96)
    log.trained = 0
    log.report(10, 51, preparing=2, first_step=1, steps=5)
    # The lost process was noticed in two seconds. Of 51 steps, five had been done before.
    again = round(5 * 5 / 51, 6)
    assert log.kinds() == {"training": 15.0 - again, "redone": again, "start": 20.0, "restart": 5.0}
    (one,) = log.account().interruptions
    assert (one.cause, one.restart) == ("processes have come or gone", 5.0)


def test_another_process_may_become_the_chief() -> None:
    log = Log()
    log.start()
    log.first(20)
    log.report(10, 100, steps=10)
    log.add("worker 1", "resumed", 0, step=101)
    log.pid, log.spent, log.trained = 9, {}, 0
    log.report(10, 51, name="worker 1", preparing=2, first_step=1, steps=5)
    assert log.kinds() == {"training": 15.0, "start": 20.0, "restart": 5.0}


def test_the_steps_of_another_fit_are_new() -> None:
    log = Log()
    log.start()
    log.first(20)
    log.report(10, 100, steps=10)
    log.trained = 0
    log.report(10, 51, fit=2, preparing=1, first_step=1, steps=5)
    assert log.kinds() == {"training": 15.0, "start": 22.0, "other": 3.0}
    assert log.account().interruptions == []


def test_another_training_in_the_same_folder_is_new() -> None:
    log = Log()
    for _ in range(2):
        log.start(100)
        log.first(20)
        log.report(10, 100, steps=10)
        log.launcher("complete", 1)
    assert log.kinds() == {"training": 20.0, "start": 40.0, "stopped": 100.0, "other": 2.0}
    assert log.account().interruptions == []


def test_without_a_launcher() -> None:
    """As on Slurm, where each process is started by srun."""
    log = Log()
    log.pid = 1
    log.first(0)
    log.report(10, 100, steps=10)
    log.add("worker 0", "preempted", 1, step=101)
    log.pid, log.spent, log.trained = 2, {}, 0
    log.add("worker 0", "resumed", 600, step=101)
    log.first(1)
    log.report(10, 100, steps=10)
    assert log.kinds() == {"training": 20.0, "start": 3.0, "saving": 1.0, "restart": 3.0, "stopped": 598.0}
    # It was killed: nobody knows how long it was not running.
    log.events = [event for event in log.events if event["event"] != "preempted"]
    assert log.kinds() == {"training": 20.0, "start": 3.0, "restart": 602.0}


def test_a_log_of_an_older_version() -> None:
    log = Log()
    log.start()
    for after in (20, 10, 10):
        log.add("worker 0", "progress", after, rank=0, host="a", pid=7, epoch=1, step=3, steps=5)
    log.launcher("complete", 1)
    assert log.kinds() == {"training": 20.0, "start": 20.0, "other": 1.0}


def test_nothing_is_counted_twice_if_the_parts_are_longer_than_the_whole() -> None:
    log = Log()
    log.start()
    log.first(20)
    log.report(10, 100, steps=30, saving=10)
    assert log.kinds() == {"training": 7.5, "saving": 2.5, "start": 20.0}


@pytest.mark.parametrize("jump", [-7200.0, 7200.0])
def test_a_clock_that_is_set_changes_nothing(jump: float) -> None:
    log = Log()
    log.start()
    log.first(20)
    log.report(10, 100, steps=10)
    expected = dict(log.kinds(), training=20.0, other=1.0, saving=1.0)
    log.report(11, 100, steps=10, saving=1)
    log.launcher("complete", 1)
    assert log.kinds() == expected
    for number in (3, 4):
        log.events[number]["time"] += jump
    assert log.kinds() == expected
    # A line that somebody else has written in between happened in between.
    log.events.insert(3, {"time": log.events[1]["time"] + jump, "name": "worker 1", "event": "saved"})
    assert log.kinds() == expected
    # Without the other clock, one cannot know.
    for event in log.events:
        event.pop("clock", None)
    assert log.kinds() != expected


def test_times_never_go_back() -> None:
    times = [5.0, 3.0, 7.0, 1.0, 8.0]
    events = [{"time": time, "name": "launcher", "event": "x"} for time in times]
    assert corrected_times(events) == [5.0, 5.0, 7.0, 7.0, 8.0]
    assert without_the_future([*events, {"time": 9e9}], now=10.0) == events


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
        "clock": st.floats(0, 300),
        "host": st.sampled_from(["a", "b"]),
        "pid": st.integers(1, 2),
        "steps_redone": st.integers(0, 5),
        "cause": st.text(max_size=3),
        "task": st.just("worker 1"),
    },
)
FOREIGN = st.dictionaries(
    st.sampled_from(["rank", "spent", "trained", "fit", "step", "clock", "host", "pid", "steps_redone", "exit_code"]),
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
    seconds = account.seconds
    assert all(value >= 0 for value in seconds.values())
    assert sum(seconds.values()) == pytest.approx(account.total, abs=1e-3)
    assert sum(shares(seconds).values()) == pytest.approx(1.0 if account.total > 0 else 0.0)
    # Segments follow each other without gaps, from the first event on; only fits that nobody has started are older.
    for before, after in zip(account.segments, account.segments[1:], strict=False):
        assert before.end == after.begin
    for segment in account.segments:
        assert sum(segment.seconds.values()) == pytest.approx(segment.end - segment.begin, abs=1e-3)
        assert set(segment.seconds) <= set(KINDS) and min(segment.seconds.values()) >= 0
    if events:
        times = corrected_times(events)
        assert times == sorted(times)
        assert account.total >= times[-1] - times[0] - 1e-3
        assert account.segments[-1].end == pytest.approx(max(times[-1], now + later if later is not None else 0.0))
    of_days = by_day(account)
    assert sum(sum(day.values()) for day in of_days.values()) == pytest.approx(account.total, abs=1e-3)
    assert all(sum(day.values()) <= 25 * 3600 + 1 for day in of_days.values())
    for one in account.interruptions:
        assert min(one.stopped, one.restart, one.redone, one.steps_redone) >= 0
    interrupted = sum(one.lost for one in account.interruptions)
    assert interrupted <= seconds["stopped"] + seconds["restart"] + seconds["redone"] + 1e-3


def test_days_are_those_of_the_calendar() -> None:
    log = Log(NOON + 11.5 * 3600)
    log.start()
    log.report(3600, 100, steps=3600)
    first, second = by_day(log.account()).items()
    assert [first[0], second[0]] == ["2026-11-22", "2026-11-23"]
    assert first[1]["training"] == second[1]["training"] == pytest.approx(1800)
    log.launcher("complete", 86400)
    days = by_day(log.account())
    assert list(days) == ["2026-11-22", "2026-11-23", "2026-11-24"]
    assert days["2026-11-23"]["other"] == pytest.approx(86400 - 1800)


# --- The command ------------------------------------------------------------------------------------------------------


def run_with_a_failure(folder: Path) -> Path:
    log = Log()
    log.start()
    log.first(20)
    log.report(100, 1000, steps=100)
    log.launcher("failure", 0, task="worker 1", cause="worker 1 was\x1b[2J killed", step=1001)
    log.start(1)
    log.add("worker 0", "resumed", 5, step=901)
    log.first(4)
    log.report(70, 700, steps=70)
    log.launcher("complete", 10)
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
    assert "beside others" not in output, "the run is of minutes"
    monkeypatch.setattr(report, "_COMPARED_FROM", 60.0)
    compared = shown()
    for one in PUBLISHED:
        assert one.figure in compared and one.source.partition(",")[0] in compared
    assert "2026-11-22" not in output
    assert "2026-11-22" in shown("tfdist-logs/run", "--per-day")
    failures = shown("tfdist-logs", "--per-failure")
    words = ["0:00:00", "0:00:10", "0:00:10", "100", "0:00:20", "worker", "1", "was\\x1b[2J", "killed"]
    assert words in [line.split()[2:] for line in failures.splitlines()]
    assert "\x1b" not in output + failures


def test_json_for_programs(tmp_path: Path) -> None:
    facts = json.loads(shown(str(run_with_a_failure(tmp_path / "run")), "--json"))
    assert facts["goodput"] == facts["goodput_while_running"] == pytest.approx(160.1 / 210, abs=1e-3)
    assert sum(facts["shares"].values()) == pytest.approx(1.0)
    assert list(facts["seconds"]) == list(KINDS)
    assert facts["end"] - facts["begin"] == facts["total_seconds"] == 210
    (failure,) = facts["interruptions"]
    assert (failure["steps_redone"], failure["restart"]) == (100, 10.0) and failure["redone"] == pytest.approx(9.9)
    (day,) = facts["days"].values()
    assert day["goodput"] == pytest.approx(facts["goodput"])
    assert {one["who"] for one in facts["published"]} == {one.who for one in PUBLISHED}


def test_a_run_without_fit(tmp_path: Path) -> None:
    for what in ("start", "complete"):
        EventLog(str(tmp_path), "launcher").write(what)
    assert "no process has told of training steps" in shown(str(tmp_path))


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
    assert "a search of `tfdist tune`. Expected: a training." in result.output


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
    spent.begin(VALIDATION)
    passes(4)
    with pytest.raises(SystemExit), spent.during(SAVING):
        passes(8)
        raise SystemExit(77)
    spent.end(VALIDATION)
    spent.end(VALIDATION)
    passes(16)
    spent.goes_into(BETWEEN)
    passes(32)
    spent.goes_into(None)
    passes(64)
    found = {kind: seconds for kind, seconds in spent.read().items() if seconds}
    assert found == {"preparing": 1, "steps": 18, "validation": 4, "saving": 8, "between_epochs": 32}
    # A fit that has failed is over, whatever it was in.
    spent.goes_into(STEPS)
    spent.begin(VALIDATION)
    spent.fit_ends()
    passes(128)
    assert {kind: seconds for kind, seconds in spent.read().items() if seconds} == found
    # A validation that has failed is over when the next fit begins.
    spent.begin(VALIDATION)
    spent.fit_begins()
    passes(128)
    assert spent.read()["preparing"] == 129 and spent.fits == 2
    spent.fit_is_called_again()
    spent.fit_begins()
    assert spent.fits == 2


def test_the_calendar_of_the_tests() -> None:
    assert datetime.datetime.fromtimestamp(NOON).isoformat() == "2026-11-22T12:00:00"
