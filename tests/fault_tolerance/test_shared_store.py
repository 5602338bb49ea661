"""What one process of a job cannot read ends all of them, in words, and none waits for ever. Ranks are threads here."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.fault_tolerance.numbered import write_numbers
from tests.fault_tolerance.test_store_read_errors import altered, failing
from tfdist.checkpoint import manifest, store
from tfdist.checkpoint.backup_and_restore import BackupAndRestore
from tfdist.checkpoint.manifest import UnknownFormatError
from tfdist.checkpoint.store import Checkpoint, CheckpointStore, SharedStore
from tfdist.compat.keras import StrategyTraits
from tfdist.runtime.chief import SyncCallback, _files_of
from tfdist.storage import base

_SECONDS = 60.0


class Meeting:
    """Where the ranks of a job exchange values."""

    def __init__(self, size: int) -> None:
        self.arrivals = threading.Barrier(size, timeout=_SECONDS)
        self.values: list[Any] = [None] * size

    def exchange(self, rank: int, topic: str, value: Any) -> list:
        self.values[rank] = topic, value
        self.arrivals.wait()
        found = list(self.values)
        self.arrivals.wait()
        assert {other for other, _ in found} == {topic}, found
        return [value for _, value in found]


class FakePeers:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self._meeting = rank, meeting
        self.names = [f"worker {r}" for r in range(len(meeting.values))]

    def gather(self, topic: str, value: Any, purpose: str) -> list:
        return self._meeting.exchange(self.rank, topic, value)

    def acknowledge(self, topic: str, purpose: str) -> None:
        self.gather(topic, None, purpose)


def _strategy(meeting: Meeting, rank: int) -> SimpleNamespace:
    hooks = StrategyTraits()
    hooks.peers = FakePeers(meeting, rank)
    return SimpleNamespace(_keras_hooks=hooks)


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PAUSES", (0.001, 0.001))
    monkeypatch.setattr(
        store, "broadcast_bytes", lambda strategy, peers, data: peers.gather("broadcast", data, "take over")[0]
    )
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # `is_final` replaces it


def begin(folders: list[Path]) -> list[Checkpoint | BaseException | None]:
    """What each rank gets when it begins: a checkpoint, none, or an error."""
    meeting = Meeting(len(folders))

    def run(rank: int) -> Checkpoint | BaseException | None:
        store = SharedStore(str(folders[rank]), 3, _strategy(meeting, rank))
        try:
            return store.newest(lambda meta: True)
        except Exception as error:
            return error
        finally:
            store.release()

    with ThreadPoolExecutor(len(folders)) as ranks:
        return list(ranks.map(run, range(len(folders)), timeout=_SECONDS))


def assert_all(found: list, kind: type[Exception], text: str) -> None:
    assert [type(error) for error in found] == [kind] * len(found), found
    assert {text in str(error) for error in found} == {True}, found


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder with backups that all ranks see."""
    write_numbers(CheckpointStore(tmp_path / "shared"), 2)
    return tmp_path / "shared"


def test_the_chiefs_disk_fails_for_all(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EIO, "Input/output error")
    failing_open = failing(open, "00000002/state.index", float("inf"), error)
    monkeypatch.setattr(manifest, "open", failing_open, raising=False)
    found = begin([shared] * 3)
    assert_all(found, OSError, "checkpoint-00000002 cannot be read, also after 3 attempts: state.index: [Errno 5]")


def test_all_get_what_the_chief_reads(shared: Path, tmp_path: Path) -> None:
    """An earlier job may have left another one of the same name; two processes see the chief's, or nothing."""
    another = CheckpointStore(tmp_path / "another")
    assert [another.write({"number": 7}, {}) for _ in range(2)][1] == "checkpoint-00000002"
    found = begin([shared, shared, tmp_path / "another", tmp_path / "absent"])
    assert [checkpoint.meta for checkpoint in found] == [{"number": 1}] * 4
    for checkpoint in found:
        np.testing.assert_array_equal(checkpoint.tensors["value"], np.full([1000], 1, np.float32))


@pytest.mark.parametrize("name", ["_piece", "_append"])
def test_a_disk_that_fails_while_a_backup_is_sent_fails_for_all(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """That of the chief, or that of one of two others, which is full."""
    whole, failed = getattr(store, name), []

    def fail_once(*arguments: Any) -> Any:
        if not failed:
            failed.append(arguments)
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(*arguments)

    monkeypatch.setattr(store, name, fail_once)
    found = begin([shared, tmp_path / "absent", tmp_path / "absent as well"])
    assert_all(found, OSError, "The backup could not be sent to all processes. Received: worker ")


def test_a_chief_whose_disk_is_empty(shared: Path, tmp_path: Path) -> None:
    found = begin([tmp_path / "empty", shared])
    assert_all(found, ValueError, f"of worker 0, which writes them, but one of worker 1 in {shared}. ")


def test_nobody_begins_anew_beside_a_folder_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "listdir", failing(os.listdir, f"{tmp_path}/other", float("inf")))
    found = begin([tmp_path / "mine", tmp_path / "other"])
    assert_all(found, OSError, "worker 1, which may have one, cannot read its folder: [Errno 116]")


def test_a_later_format_refuses_all(shared: Path) -> None:
    path = shared / "checkpoint-00000002" / "manifest.json"
    path.write_bytes(altered(path.read_bytes(), format=2))
    for size in (1, 2):
        found = begin([shared] * size)
        assert_all(found, UnknownFormatError, "checkpoint-00000002 is of another version of tfdist")
    assert sorted(entry.name for entry in shared.glob("checkpoint-*")) == ["checkpoint-00000001", "checkpoint-00000002"]


def test_backups_that_cannot_be_removed_at_the_end_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, a file that somebody still reads stays in the folder under another name."""
    store = SharedStore(str(tmp_path), 1, tf.distribute.get_strategy())
    store.write({}, dict)

    def refuse(path: str) -> None:
        raise tf.errors.FailedPreconditionError(None, None, f"{path}; Directory not empty")

    monkeypatch.setattr(tf.io.gfile, "rmtree", refuse)
    with pytest.warns(RuntimeWarning) as caught:
        store.clear()
    assert [str(warning.message) for warning in caught] == [
        f"The backups in {tmp_path} cannot be removed: {tmp_path}/checkpoint-00000001; Directory not empty. Remove "
        "them before you train there again."
    ]
    store.release()
    assert os.listdir(tmp_path) == ["checkpoint-00000001"]


def test_another_fit_of_the_process_goes_on_with_the_folder(tmp_path: Path) -> None:
    """One that failed has released nothing."""
    first, second = (SharedStore(str(tmp_path / name), 1, tf.distribute.get_strategy()) for name in ("", "."))
    second.write({}, dict)
    second.release()
    first.release()
    assert os.listdir(tmp_path) == ["checkpoint-00000001"]


def test_folders_by_rank_are_named(tmp_path: Path) -> None:
    meeting, backups = Meeting(2), [BackupAndRestore(tmp_path / str(rank)) for rank in range(2)]

    def run(rank: int) -> None:
        together = SyncCallback(contextlib.ExitStack(), (), _files_of([backups[rank]]))
        strategy = _strategy(meeting, rank)
        together._model = SimpleNamespace(distribute_strategy=strategy, optimizer=None, _initial_epoch=None)
        together.on_train_begin()

    named = "of .*/1, on worker 1, which does not write it: .* has BackupAndRestore of .*/0"
    with pytest.warns(UserWarning, match=named), ThreadPoolExecutor(2) as ranks:
        list(ranks.map(run, range(2), timeout=_SECONDS))
