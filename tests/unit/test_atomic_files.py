"""Files that are replaced in one piece."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfdist.atomic_files import write_atomically


@pytest.mark.parametrize(("content", "expected"), [("ä", "ä".encode()), (b"\xff", b"\xff")])
def test_a_file_is_replaced(tmp_path: Path, content: str | bytes, expected: bytes) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    write_atomically(file, content, mode=0o600)
    assert file.read_bytes() == expected
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["file"]


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
    file.write_text("before")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(file, "after")
    assert file.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]
