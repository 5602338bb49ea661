"""The event log: whole lines from several processes, and no failure that costs a training."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdist.supervision import events
from tfdist.supervision.events import EventLog


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_an_event_has_time_name_and_fields(tmp_path: Path) -> None:
    before = time.time()
    EventLog(str(tmp_path), "launcher").write("failure", task="worker 1", step=3, path=Path("a"))
    (event,) = lines(tmp_path)
    assert before <= event.pop("time") <= time.time()
    assert event == {"name": "launcher", "event": "failure", "task": "worker 1", "step": 3, "path": "a"}


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("TFDIST_CLUSTER", '{"task": {"type": "worker", "index": 1}}', "worker 1"),
        ("TF_CONFIG", '{"task": {"type": "chief", "index": 0}}', "chief 0"),
        pytest.param("TF_CONFIG", "no JSON", f"process {os.getpid()}", id="no JSON"),
        pytest.param("TF_CONFIG", "{}", f"process {os.getpid()}", id="no task"),
    ],
)
def test_the_name_is_the_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, value: str, name: str
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("TFDIST_LOG_DIR", str(tmp_path))
    EventLog.from_environment().write("saved")
    assert lines(tmp_path)[0]["name"] == name


def test_without_a_run_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    EventLog.from_environment().write("saved")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_gone_costs_the_event_only(tmp_path: Path) -> None:
    EventLog(str(tmp_path / "gone"), "worker 0").write("saved")
    assert os.listdir(tmp_path) == []


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom tfdist.supervision.events import EventLog\n"
        "log = EventLog(sys.argv[1], sys.argv[2])\n"
        "for number in range(300): log.write('e', number=number, text='x' * 500)"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in ("worker 0", "worker 1")
    ]
    assert [child.wait(30) for child in children] == [0, 0]
    found = lines(tmp_path)
    for name in ("worker 0", "worker 1"):
        assert [event["number"] for event in found if event["name"] == name] == list(range(300))


def test_a_line_waits_for_that_of_another_host(tmp_path: Path) -> None:
    """NFS has no append: without the lock, two hosts write to the same place."""
    path = tmp_path / "events.jsonl"
    code = "import sys\nfrom tfdist.supervision.events import EventLog\nEventLog(sys.argv[1], 'b').write('e')"
    with path.open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
        time.sleep(0.5)
        assert path.read_text() == ""
        file.write("first\n")
    assert child.wait(30) == 0
    assert path.read_text().startswith('first\n{"time": ')


def test_a_lock_that_is_kept_or_does_not_exist_costs_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def kept(*arguments: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(events, "_LOCK_SECONDS", 0.05)
    for lockf in (no_locks, kept):
        monkeypatch.setattr(fcntl, "lockf", lockf)
        EventLog(str(tmp_path), "a").write("e")
    assert len(lines(tmp_path)) == 2


def test_a_file_that_the_user_names_may_be_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    monkeypatch.setenv("TFDIST_EVENT_LOG", str(tmp_path / "link"))
    EventLog.from_environment().write("saved")
    assert (tmp_path / "file").read_text().endswith("}\n")


def test_another_file_where_there_is_no_folder_of_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TFDIST_EVENT_LOG", str(tmp_path / "job.jsonl"))
    EventLog.from_environment().write("saved", step=1)
    assert json.loads((tmp_path / "job.jsonl").read_text())["step"] == 1
    monkeypatch.setenv("TFDIST_EVENT_LOG", "-")
    EventLog.from_environment().write("saved", step=2)
    assert json.loads(capfd.readouterr().out)["step"] == 2
    monkeypatch.setenv("TFDIST_LOG_DIR", str(tmp_path))
    EventLog.from_environment().write("saved", step=3)
    assert lines(tmp_path)[0]["step"] == 3
