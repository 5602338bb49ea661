"""What one process of a job cannot read ends all of them, in words, and none waits for ever. Ranks are threads here."""

from __future__ import annotations

import errno
import io
import os
import tarfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.fault_tolerance.numbered import write_numbers
from tests.fault_tolerance.test_store_read_errors import failing, with_format
from tfdist.checkpoint import fit_identity, manifest, shared_store
from tfdist.checkpoint.manifest import DamagedBackupsError, UnknownFormatError
from tfdist.checkpoint.shared_store import SharedStore, unpack
from tfdist.checkpoint.store import Checkpoint, CheckpointStore
from tfdist.storage import patience

_SECONDS = 60.0


class Meeting:
    """Where the ranks of a job exchange values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.arrivals = threading.Barrier(size, timeout=_SECONDS)
        self.values: dict[int, Any] = {}

    def gather(self, rank: int, value: Any) -> list:
        self.values[rank] = value
        self.arrivals.wait()
        found = [self.values[r] for r in range(self.size)]
        self.arrivals.wait()
        return found


class FakePeers:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self._meeting = rank, meeting
        self.names = [f"worker {r}" for r in range(meeting.size)]

    def gather(self, topic: str, value: Any, purpose: str) -> list:
        return [found for _, found in self.exchange(topic, value)]

    def exchange(self, topic: str, value: Any) -> list:
        found = self._meeting.gather(self.rank, (topic, value))
        assert {other for other, _ in found} == {topic}, found
        return found

    def acknowledge(self, topic: str, purpose: str) -> None:
        self.exchange(topic, None)


def broadcast(strategy: Any, peers: FakePeers, data: bytes | None) -> bytes:
    return peers.gather("broadcast", data, "take over")[0]


# How the ranks open files, by their threads, where that is not as usual.
_opens: dict[int, Callable] = {}


def _open(*args: Any, **options: Any) -> Any:
    return _opens.get(threading.get_ident(), open)(*args, **options)


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSES", (0.001, 0.001))
    monkeypatch.setattr(shared_store, "broadcast_bytes", broadcast)
    monkeypatch.setattr(manifest, "open", _open, raising=False)
    monkeypatch.setattr(fit_identity.sys, "excepthook", fit_identity.sys.excepthook)  # `is_final` replaces it


def begin(folders: list[Path], change: Callable[[int, SharedStore], None]) -> list[Checkpoint | BaseException | None]:
    """What each rank gets when it begins: a checkpoint, none, or an error."""
    meeting = Meeting(len(folders))

    def run(rank: int) -> Checkpoint | BaseException | None:
        store = SharedStore(str(folders[rank]), 3, SimpleNamespace(_peers=FakePeers(meeting, rank)))
        try:
            change(rank, store)
            return store.newest(lambda meta: True)
        except Exception as error:
            return error
        finally:
            store.release()

    _opens.clear()
    with ThreadPoolExecutor(len(folders)) as ranks:
        return list(ranks.map(run, range(len(folders)), timeout=_SECONDS))


def read_by(rank: int, part: str, times: float = float("inf")) -> Callable[[int, SharedStore], None]:
    """One rank's disk fails."""
    error = OSError(errno.EIO, "Input/output error")

    def change(other: int, store: SharedStore) -> None:
        if other == rank:
            _opens[threading.get_ident()] = failing(open, part, times, error)

    return change


def nothing(rank: int, store: SharedStore) -> None:
    """All goes well."""


def assert_all(found: list, kind: type[Exception], text: str) -> None:
    assert [type(error) for error in found] == [kind] * len(found), found
    assert {text in str(error) for error in found} == {True}, found


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder with backups that all ranks see."""
    write_numbers(CheckpointStore(tmp_path / "shared"), 2)
    return tmp_path / "shared"


def test_the_chiefs_disk_fails_for_all(shared: Path) -> None:
    found = begin([shared] * 3, read_by(0, "00000002/state.index"))
    assert_all(found, OSError, "checkpoint-00000002 cannot be read, also after 3 attempts: state.index: [Errno 5]")


def test_a_moments_error_on_any_rank_changes_nothing(shared: Path) -> None:
    for rank in range(2):
        found = begin([shared] * 2, read_by(rank, "00000002/", times=1))
        assert [checkpoint.name for checkpoint in found] == ["checkpoint-00000002"] * 2


def test_who_cannot_read_is_sent_it(shared: Path) -> None:
    found = begin([shared] * 3, read_by(1, f"{shared}/checkpoint-"))
    assert [checkpoint.meta for checkpoint in found] == [{"number": 1}] * 3
    for checkpoint in found:
        np.testing.assert_array_equal(checkpoint.tensors["value"], np.full([1000], 1, np.float32))


def test_a_later_format_refuses_all(shared: Path) -> None:
    path = shared / "checkpoint-00000002" / "manifest.json"
    path.write_bytes(with_format(path.read_bytes(), 2))
    for size in (1, 2):
        found = begin([shared] * size, nothing)
        assert_all(found, UnknownFormatError, "checkpoint-00000002 is of another version of tfdist")
    assert sorted(entry.name for entry in shared.glob("checkpoint-*")) == ["checkpoint-00000001", "checkpoint-00000002"]


def test_all_damaged_for_all(shared: Path) -> None:
    for path in shared.glob("*/state.index"):
        path.unlink()
    assert_all(begin([shared] * 2, nothing), DamagedBackupsError, "holds 2 checkpoint(s), but none that is complete")


def test_nobody_begins_anew_beside_a_folder_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "listdir", failing(os.listdir, f"{tmp_path}/other", float("inf")))
    found = begin([tmp_path / "mine", tmp_path / "other"], nothing)
    assert_all(found, OSError, f"{tmp_path}/other of worker 1, which may have one, cannot be read: ")


def test_what_cannot_be_sent_or_taken_over_ends_all(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [shared, tmp_path / "elsewhere"]
    with monkeypatch.context() as patch:
        patch.setattr(shared_store, "packed", failing(shared_store.packed, "checkpoint-", float("inf")))
        assert_all(
            begin(folders, nothing), OSError, "checkpoint-00000002 cannot be read: [Errno 116] Stale file handle"
        )
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(
        shared_store, "unpack", failing(shared_store.unpack, "checkpoint-", float("inf"), full, where=1)
    )
    text = "worker 1 cannot take over the backup of the chief: [Errno 28] No space left on device"
    assert_all(begin(folders, nothing), OSError, text)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "..", "link"])
def test_unpacking_writes_plain_files_into_its_folder_alone(tmp_path: Path, name: str) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(ValueError, match="which is not a plain file"):
        unpack(content.getvalue(), str(tmp_path / "folder"))
    assert list((tmp_path / "folder").iterdir()) == []
    with pytest.raises(ValueError, match="is not whole"):
        unpack(b"not an archive", str(tmp_path / "another"))
