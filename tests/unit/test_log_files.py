"""What is written beside a training: no link of a stranger, whole lines, whole files, and no failure that costs it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfdist.atomic_files import write_atomically
from tfdist.folders import default_log_dir
from tfdist.launcher.plan import ProcessPlan
from tfdist.launcher.process import Process
from tfdist.supervision import events
from tfdist.supervision.events import EventLog

STRANGER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder as /tmp is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "elsewhere"
    folder.mkdir(mode=0o555)
    # Root may write everywhere.
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and access(path, mode))
    yield folder


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_below_the_current_folder(tmp_path: Path) -> None:
    assert default_log_dir("run", str(tmp_path), "/tmp") == tmp_path / "tfdist-logs" / "run"
    (tmp_path / "tfdist-logs").symlink_to(tmp_path)
    assert default_log_dir("run", str(tmp_path), "/tmp") == tmp_path / "tfdist-logs" / "run"


def test_where_the_current_folder_cannot_be_written_to(not_writable: Path, shared: Path) -> None:
    folder = default_log_dir("run", str(not_writable), str(shared))
    assert folder == shared / f"tfdist-logs-{os.geteuid()}" / "run"
    assert mode_of(folder.parent) == 0o700
    folder.parent.chmod(0o777)
    assert default_log_dir("other", str(not_writable), str(shared)).parent == folder.parent
    assert mode_of(folder.parent) == 0o700


@pytest.mark.parametrize("planted", ["link", "file", pytest.param("stranger", marks=needs_root)])
def test_what_somebody_has_planted_is_not_used(not_writable: Path, shared: Path, tmp_path: Path, planted: str) -> None:
    own = shared / f"tfdist-logs-{os.geteuid()}"
    if planted == "link":
        (tmp_path / "target").mkdir()
        own.symlink_to(tmp_path / "target")
    elif planted == "file":
        own.touch()
    else:
        own.mkdir()
        os.chown(own, STRANGER, STRANGER)
    folder = default_log_dir("run", str(not_writable), str(shared))
    assert folder.parent != own and folder.parent.name.startswith(own.name + "-")
    assert folder.parent.parent == shared and mode_of(folder.parent) == 0o700
    assert folder.parent.stat().st_uid == os.geteuid() and not folder.parent.is_symlink()


def test_in_a_folder_of_all_users_the_logs_are_ones_own(shared: Path, tmp_path: Path) -> None:
    folder = default_log_dir("run", str(shared), str(tmp_path))
    assert folder == shared / "tfdist-logs" / "run" and not mode_of(folder.parent) & 0o022
    folder.parent.chmod(0o777)
    assert default_log_dir("run", str(shared), str(tmp_path)) == folder and not mode_of(folder.parent) & 0o022


@pytest.mark.parametrize("says", ["refuses", "nothing"])
def test_where_no_modes_are_kept_the_logs_go_to_the_folder_for_temporary_files(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    """On vfat or CIFS, say: all folders below it are everybody's."""
    tmp_path.chmod(0o777)
    mkdir, fchmod = os.mkdir, os.fchmod

    def mkdir_of_all(path: str | Path, *arguments: int, **more: int) -> None:
        mkdir(path, *arguments, **more)
        if shared not in Path(path).parents:
            os.chmod(path, 0o777)

    def fchmod_in_vain(descriptor: int, mode: int) -> None:
        if shared in Path(f"/proc/self/fd/{descriptor}").resolve().parents:
            fchmod(descriptor, mode)
        elif says == "refuses":
            raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "mkdir", mkdir_of_all)
    monkeypatch.setattr(os, "fchmod", fchmod_in_vain)
    folder = default_log_dir("run", str(tmp_path), str(shared))
    assert folder == shared / f"tfdist-logs-{os.geteuid()}" / "run" and mode_of(folder.parent) == 0o700


@needs_root
def test_the_second_user_of_a_folder_of_all_users(shared: Path, tmp_path: Path) -> None:
    (shared / "tfdist-logs").mkdir()
    os.chown(shared / "tfdist-logs", STRANGER, STRANGER)
    assert default_log_dir("run", str(shared), str(tmp_path)).parent == tmp_path / f"tfdist-logs-{os.geteuid()}"


def test_a_log_and_events_follow_no_link(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("worker-0.log", "events.jsonl"):
        (logs / name).symlink_to(mine)
    for continues in ("", "restart 1"):
        with pytest.raises(OSError, match="is a link"):
            Process(ProcessPlan("worker", 0, ("true",), {}), logs, continues)
    EventLog(str(logs), "worker 0").write("saved", step=1)
    assert mine.read_text() == "precious"


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
    ],
)
def test_the_name_is_the_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, value: str, name: str
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("TFDIST_LOG_DIR", str(tmp_path))
    EventLog.from_environment().write("saved")
    assert lines(tmp_path)[0]["name"] == name


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom tfdist.supervision.events import EventLog\n"
        "log = EventLog(sys.argv[1], sys.argv[2])\n"
        "for number in range(300): log.write('e', number=number, text='x' * 500)"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in ("worker 0", "worker 1")
    ]
    assert [child.wait(60) for child in children] == [0, 0]
    found = lines(tmp_path)
    for name in ("worker 0", "worker 1"):
        assert [event["number"] for event in found if event["name"] == name] == list(range(300))


def test_a_line_waits_for_that_of_another_host(tmp_path: Path) -> None:
    """NFS has no append: without the lock, two hosts write to the same place."""
    path = tmp_path / "events.jsonl"
    code = (
        "import sys, time\nfrom tfdist.supervision import events\n"
        "def wait(seconds, sleep=time.sleep):\n  print('waits', flush=True)\n  sleep(seconds)\n"
        "time.sleep, events._LOCK_SECONDS = wait, 60.0\n"
        "events.EventLog(sys.argv[1], 'b').write('e')"
    )
    with path.open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None and child.stdout.readline() == "waits\n"
        assert path.stat().st_size == 0  # to open it, and to close it again, would end the lock
        file.write("first\n")
    child.communicate(timeout=60)
    assert child.returncode == 0
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


def test_a_durable_file_and_its_name_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    wait = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        wait(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_atomically(tmp_path / "file", "text", durable=True)
    content, folder = synced
    assert Path(content).name.startswith(".file.") and folder == str(tmp_path)
    write_atomically(tmp_path / "file", "other text")
    assert len(synced) == 2


def test_what_was_there_stays_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_atomically(file, "ä", mode=0o600)
    assert (file.read_text(), mode_of(file)) == ("ä", 0o600)

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(file, "after")
    assert file.read_text() == "ä"
    assert os.listdir(tmp_path) == ["file"]
