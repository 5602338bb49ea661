"""A store whose files are objects: whatever moment its process ends at, what counts as a checkpoint can be loaded."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tests.fault_tolerance.numbered import write_numbers
from tests.remote.storages import Disturbed, Killed, MemoryStorage
from tfdist.checkpoint import store as module
from tfdist.checkpoint.manifest import UnreadableCheckpointError
from tfdist.checkpoint.store import CheckpointStore
from tfdist.storage import base
from tfdist.supervision import process_folders

ROOT = "test://bucket/run"
Make = Callable[..., CheckpointStore]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a store on a storage."""
    monkeypatch.setattr(base, "PAUSES", (0.001, 0.001))

    def made(storage: MemoryStorage, keep: int = 2, **options: object) -> CheckpointStore:
        with monkeypatch.context() as patch:
            patch.setattr(module, "storage_of", lambda path: storage)
            return CheckpointStore(ROOT, keep, **options)

    return made


def test_remote_folder() -> None:
    """One of TensorFlow's file systems."""
    directory = "ram://test_remote_folder/backup"
    store = CheckpointStore(directory, max_to_keep=2)
    assert store.newest() is None
    names = write_numbers(store, 3)
    assert store.names() == tf.io.gfile.listdir(directory) == names[1:]
    np.testing.assert_array_equal(store.newest().tensors["value"], np.full([1000], 2))
    [index] = tf.io.gfile.glob(f"{directory}/{names[2]}/state-*.index")
    with tf.io.gfile.GFile(index, "ab") as file:
        file.write(b"garbage")
    with pytest.warns(UserWarning, match=rf"{directory}/{names[2]} is damaged: state-.*.index has .* bytes instead of"):
        assert store.newest().meta == {"number": 1}
    tf.io.gfile.remove(f"{directory}/{names[2]}/manifest.json")
    assert CheckpointStore(directory, max_to_keep=2).names() == tf.io.gfile.listdir(directory) == [names[1]]
    store.clear()
    assert (store.names(), store.newest()) == ([], None)


def test_a_backup_moves_between_a_disk_and_a_bucket(make: Make, tmp_path: object) -> None:
    storage = MemoryStorage()
    [name] = write_numbers(CheckpointStore(tmp_path), 1)
    for path in (tmp_path / name).iterdir():
        storage.upload(str(path), f"{ROOT}/{name}/{path.name}")
    store = make(storage)
    assert store.newest().meta == {"number": 0}
    write_numbers(store, 1)
    for path in storage.objects:
        target = tmp_path / "back" / path.removeprefix(f"{ROOT}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        storage.download(path, str(target))
    assert CheckpointStore(tmp_path / "back").names() == [name, "checkpoint-00000002"]
    np.testing.assert_array_equal(CheckpointStore(tmp_path / "back").newest().tensors["value"], np.zeros(1000))


def changes_of_a_write(make: Make) -> list[tuple[str, str]]:
    """What the third write of a store with two checkpoints does."""
    storage = Disturbed({})
    store = make(storage)
    write_numbers(store, 2)
    storage.changes.clear()
    write_numbers(store, 1)
    return storage.changes


def loadable_after_a_kill_at(make: Make, number: int, moment: str) -> None:
    """Ends a process at its `number`-th change, before or after it; asserts what the next one finds."""
    storage = Disturbed({})
    store = make(storage)
    write_numbers(store, 2)
    done = len(storage.changes)

    def kill(change: int, what: str, path: str) -> None:
        if change >= done + number:  # from then on it does nothing
            raise Killed

    setattr(storage, moment, kill)
    with pytest.raises(Killed):
        store.write({"number": 2}, {"value": np.full([1000], 2, np.float32)})
    reader = make(MemoryStorage(storage.objects), writer=False)
    names = reader.names()
    assert names
    for name in names:
        checkpoint = reader.open(name)
        np.testing.assert_array_equal(checkpoint.tensors["value"], np.full([1000], checkpoint.meta["number"]))
    assert reader.newest().meta["number"] in (1, 2)
    successor = make(MemoryStorage(storage.objects))
    assert {path.split("/")[4] for path in storage.objects} == set(names)
    successor.write({"number": 3}, {})
    assert (len(successor.names()), successor.newest().meta) == (2, {"number": 3})


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_each_moment(make: Make, moment: str) -> None:
    for number in range(1, len(changes_of_a_write(make)) + 1):
        loadable_after_a_kill_at(make, number, moment)


def test_a_moments_failure_costs_no_backup(make: Make) -> None:
    storage = Disturbed({})
    store = make(storage)
    failed: set[str] = set()

    def fail_once(number: int, what: str, path: str) -> None:
        if (key := f"{what} {path}") not in failed:
            failed.add(key)
            raise OSError("503 Service Unavailable")

    storage.before = fail_once
    names = write_numbers(store, 3)
    assert len(failed) == 3 * 3 + 3
    assert (store.names(), store.newest().meta) == (names[1:], {"number": 2})


def test_a_bucket_that_cannot_be_read_is_not_empty(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    store = make(storage)
    names = write_numbers(store, 2)

    def fail(*args: object, **options: object) -> None:
        raise OSError("503 Service Unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "names", fail)
        with pytest.raises(OSError, match="503"):
            store.newest()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "download", fail)
        with pytest.raises(UnreadableCheckpointError, match=f"{names[1]} cannot be read.*it cannot be downloaded: 503"):
            store.newest()
    assert store.newest().meta == {"number": 1}


def test_what_a_killed_process_has_left_for_the_way_is_removed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large as a checkpoint, in the folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    storage = Disturbed({})

    def end(number: int, what: str, path: str) -> None:
        raise Killed

    storage.before = end
    store = make(storage)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        earlier = SimpleNamespace(of=lambda pid: SimpleNamespace(pid=pid, start=1))  # a process of this number
        patch.setattr(process_folders, "Identity", earlier)
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
        write_numbers(store, 1)
    assert [path.stat().st_size for path in tmp_path.glob("tfdist-backup-*/state*.data*")] == [4000]
    write_numbers(make(MemoryStorage()), 1)
    assert os.listdir(tmp_path) == []
