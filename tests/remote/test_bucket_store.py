"""A store whose files are objects: whatever moment its process ends at, what counts as a checkpoint can be loaded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tests.fault_tolerance.numbered import write_numbers
from tests.remote.storages import Disturbed, Killed, ManifestFirst, MemoryStorage
from tfdist.checkpoint import store as module
from tfdist.checkpoint.manifest import DamagedBackupsError, UnreadableCheckpointError
from tfdist.checkpoint.store import CheckpointStore
from tfdist.storage import patience

ROOT = "test://bucket/run"
Make = Callable[..., CheckpointStore]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a store on a storage."""
    monkeypatch.setattr(patience, "PAUSES", (0.001, 0.001))

    def made(storage: MemoryStorage, keep: int = 2, **options: object) -> CheckpointStore:
        with monkeypatch.context() as patch:
            patch.setattr(module, "storage_of", lambda path: storage)
            return CheckpointStore(ROOT, keep, **options)

    return made


def test_remote_folder() -> None:
    directory = "ram://test_remote_folder/backup"
    store = CheckpointStore(directory, max_to_keep=2)
    assert store.newest() is None
    names = write_numbers(store, 3)
    assert CheckpointStore(directory, writer=False).newest().meta == {"number": 2}
    assert store.names() == tf.io.gfile.listdir(directory) == names[1:]
    np.testing.assert_array_equal(store.newest().tensors["value"], np.full([1000], 2))
    [index] = tf.io.gfile.glob(f"{directory}/{names[2]}/state-*.index")
    with tf.io.gfile.GFile(index, "ab") as file:
        file.write(b"garbage")
    with pytest.warns(UserWarning, match=rf"{directory}/{names[2]} is damaged: state-.*.index has .* bytes instead of"):
        assert store.newest().meta == {"number": 1}
    tf.io.gfile.remove(f"{directory}/{names[2]}/manifest.json")
    assert CheckpointStore(directory, max_to_keep=2).names() == tf.io.gfile.listdir(directory) == [names[1]]
    [index] = tf.io.gfile.glob(f"{directory}/{names[1]}/state-*.index")
    tf.io.gfile.remove(index)
    with pytest.raises(DamagedBackupsError, match=f"{names[1]}: state-.*.index is missing"):
        store.newest()
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


def changes_of_a_write(make: Make, kind: type[Disturbed] = Disturbed) -> list[tuple[str, str]]:
    """What the third write of a store with two checkpoints does."""
    storage = kind({})
    store = make(storage)
    write_numbers(store, 2)
    storage.changes.clear()
    write_numbers(store, 1)
    return storage.changes


def loadable_after_a_kill_at(make: Make, kind: type[Disturbed], number: int, moment: str) -> None:
    """Ends a process at its `number`-th change, before or after it; asserts what the next one finds."""
    storage = kind({})
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


def test_the_manifest_is_the_last_that_is_written(make: Make) -> None:
    changes = changes_of_a_write(make)
    uploads = [name for what, name in changes if what == "upload"]
    assert len(uploads) == 3 and uploads[-1] == "manifest.json"
    first = next(name for what, name in changes if what == "remove")
    assert first == "manifest.json"
    assert len(changes) == 3 + 1 + 2, "two objects of tensors and the manifest come, and as many go"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_each_moment(make: Make, moment: str) -> None:
    for number in range(1, len(changes_of_a_write(make)) + 1):
        loadable_after_a_kill_at(make, Disturbed, number, moment)


def test_the_wrong_order_is_noticed(make: Make) -> None:
    """The negative control of the test before."""
    with pytest.raises(ValueError, match=r"is damaged: state-.* is missing"):
        loadable_after_a_kill_at(make, ManifestFirst, 2, "before")


def test_half_an_object_is_never_loaded(make: Make) -> None:
    storage = MemoryStorage()
    names = write_numbers(make(storage), 2)
    for path in [path for path in storage.objects if names[1] in path]:
        whole = storage.objects[path]
        storage.objects[path] = whole[: len(whole) // 2]
        with pytest.warns(UserWarning, match=f"{names[1]} is damaged: .* {names[0]} is used instead"):
            assert make(storage).newest().meta == {"number": 0}
        storage.objects[path] = whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make(storage).newest().meta == {"number": 1}


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


def test_a_lasting_failure_leaves_the_checkpoints_before(make: Make) -> None:
    storage = Disturbed({})
    store = make(storage)
    names = write_numbers(store, 2)

    def fail(number: int, what: str, path: str) -> None:
        raise OSError("503 Service Unavailable")

    storage.before = fail
    with pytest.raises(OSError, match=rf"{ROOT}/checkpoint-00000003 cannot be written: 503.*before it are unharmed"):
        store.write({}, {"value": np.ones(3)})
    assert store.names() == names
    storage.before = lambda *args: None
    assert (write_numbers(store, 1), len(store.names())) == (["checkpoint-00000003"], 2)


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
        with pytest.raises(UnreadableCheckpointError, match=f"{ROOT}/{names[1]} cannot be read.*manifest.json: 503"):
            store.newest()
    assert store.newest().meta == {"number": 1}


def test_a_checkpoint_that_one_listing_leaves_out_stays(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is removed as incomplete has to be incomplete in the very listing that it is found in."""
    storage = MemoryStorage()
    names = write_numbers(make(storage), 2)
    calls = 0

    def listed(folder: str, levels: int = 1) -> list[str]:
        nonlocal calls
        calls += 1
        found = MemoryStorage.names(storage, folder, levels)
        return found if calls == 1 else [name for name in found if names[1] not in name]

    monkeypatch.setattr(storage, "names", listed)
    make(storage)
    monkeypatch.undo()
    assert make(storage, writer=False).newest().name == names[1]


def test_a_download_that_is_cut_short_once_is_no_damage(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    names = write_numbers(make(storage), 2)
    for part in ("manifest.json", ".index", ".data"):
        left = [1]

        def download(path: str, local: str, part: str = part, left: list[int] = left) -> None:
            MemoryStorage.download(storage, path, local)
            if names[1] in path and part in path and left[0]:
                left[0] -= 1
                os.truncate(local, os.path.getsize(local) // 2)

        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("error")
            patch.setattr(storage, "download", download)
            assert make(storage, writer=False).newest().meta == {"number": 1}
        assert left == [0]


def test_what_a_failed_write_has_left_goes_with_the_next_backup(make: Make) -> None:
    storage = Disturbed({})
    store = make(storage, keep=1)
    write_numbers(store, 1)

    def fail(number: int, what: str, path: str) -> None:
        if what == "remove" or path.endswith("manifest.json"):
            raise OSError("503 Service Unavailable")

    storage.before = fail
    with pytest.raises(OSError, match="checkpoint-00000002 cannot be written"):
        store.write({}, {"value": np.ones(3)})
    storage.before = lambda *args: None
    folders = {path.split("/")[4] for path in storage.objects}
    assert folders == {"checkpoint-00000001", "checkpoint-00000002"}, "it has left something"
    assert write_numbers(store, 1) == ["checkpoint-00000003"]
    assert {path.split("/")[4] for path in storage.objects} == {"checkpoint-00000003"}


def test_who_has_lost_the_folder_changes_nothing_there(make: Make) -> None:
    storage = MemoryStorage()
    lost = [False]

    def guard() -> None:
        if lost[0]:
            raise OSError("process 7 has taken over")

    store = make(storage, guard=guard)
    write_numbers(store, 2)
    successor = make(MemoryStorage(storage.objects))
    [name] = write_numbers(successor, 1)
    lost[0] = True
    # It has another number in mind, or the same.
    with pytest.raises(OSError, match="process 7 has taken over"):
        store.write({"number": 99}, {"value": np.full([1000], 99, np.float32)})
    with pytest.raises(OSError, match="process 7 has taken over"):
        store.clear()
    assert (successor.names()[-1], successor.newest().meta) == (name, {"number": 0})
    for kept in successor.names():
        successor.open(kept)
