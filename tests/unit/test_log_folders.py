"""Where logs go by default: to no folder, and through no link, that another user could have made."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfdist.launcher.process import Process
from tfdist.launcher.run_plan import ProcessPlan
from tfdist.log_folders import default_log_dir
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


@pytest.fixture(params=["refuses", "says nothing"])
def without_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A folder on a file system without modes, such as vfat or CIFS: all folders below it are everybody's."""
    folder = tmp_path / "without modes"
    folder.mkdir()
    folder.chmod(0o777)
    mkdir, fchmod = os.mkdir, os.fchmod

    def mkdir_of_all(path: str | Path, *arguments: int, **more: int) -> None:
        mkdir(path, *arguments, **more)
        if folder in Path(path).parents:
            os.chmod(path, 0o777)

    def fchmod_in_vain(descriptor: int, mode: int) -> None:
        if folder not in Path(f"/proc/self/fd/{descriptor}").resolve().parents:
            fchmod(descriptor, mode)
        elif request.param == "refuses":
            raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "mkdir", mkdir_of_all)
    monkeypatch.setattr(os, "fchmod", fchmod_in_vain)
    return folder


def test_where_no_modes_are_kept_the_logs_go_to_the_folder_for_temporary_files(
    without_modes: Path, shared: Path
) -> None:
    folder = default_log_dir("run", str(without_modes), str(shared))
    assert folder == shared / f"tfdist-logs-{os.geteuid()}" / "run" and mode_of(folder.parent) == 0o700


def test_where_no_modes_are_kept_for_temporary_files_either_there_are_logs_all_the_same(without_modes: Path) -> None:
    folders = [default_log_dir("run", str(without_modes), str(without_modes)) for _ in range(2)]
    # Nobody can have put something into a folder with a random name.
    assert len(set(folders)) == 2
    for folder in folders:
        assert folder.parent.parent == without_modes
        assert folder.parent.name.startswith(f"tfdist-logs-{os.geteuid()}-")
        folder.mkdir()
        EventLog(str(folder), "worker 0").write("saved", step=1)
        assert (folder / "events.jsonl").read_text()


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
