from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests import small_disks
from tests.fault_tolerance.numbered import write_numbers
from tests.fault_tolerance.test_store_read_errors import failing
from tfdist.checkpoint.store import CheckpointStore

VALUES = {
    "half": np.array([1.5, -2], np.float16),
    "brain/half": np.array([[1.5], [3.25]], ml_dtypes.bfloat16),
    "single scalar": np.float32(0.1),
    "double": np.array([np.nan, np.inf, 5e-324]),
    "int8": np.array([-128, 127], np.int8),
    "int64": np.array([-(2**63), 2**63 - 1]),
    "uint32": np.array([0, 2**32 - 1], np.uint32),
    "uint64": np.array(2**64 - 1, np.uint64),
    "bool": np.array([[True], [False]]),
    "empty": np.zeros([0, 3], np.float32),
    "strings": np.array([b"ends with zero\0", b"", "é".encode()], object),
    "string scalar": np.array(b"\0\0", object),
    "not contiguous": np.arange(12).reshape(3, 4).T[::2],
    "complex": np.array([1 + 2j]),
}


def test_values_come_back_equal(tmp_path: Path) -> None:
    kinds = [lambda value: value, tf.constant, tf.Variable]
    values = {name: kinds[i % 3](value) for i, (name, value) in enumerate(VALUES.items())}
    store = CheckpointStore(tmp_path)
    name = store.write({"epoch": 3, "nested": {"list": [1, 0.1, None, "é"]}}, values)
    checkpoint = CheckpointStore(tmp_path, writer=False).newest()
    assert checkpoint is not None
    assert checkpoint.name == name == "checkpoint-00000001"
    assert checkpoint.meta == {"epoch": 3, "nested": {"list": [1, 0.1, None, "é"]}}
    assert list(checkpoint.tensors) == list(VALUES)
    for key, expected in VALUES.items():
        found = checkpoint.tensors[key]
        assert (found.dtype, found.shape) == (np.asarray(expected).dtype, np.shape(expected)), key
        np.testing.assert_array_equal(found, expected, err_msg=key)


def test_folder_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "new").newest() is None
    reader = CheckpointStore(tmp_path / "absent", writer=False)
    assert (reader.newest(), reader.names(), (tmp_path / "absent").exists()) == (None, [], False)


def test_relative_folder_stays_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore("backup")
    monkeypatch.chdir("/")
    assert (store.write({}, {}), os.listdir(tmp_path / "backup")) == ("checkpoint-00000001", ["checkpoint-00000001"])


def test_what_else_is_in_the_folder_is_nobodys_business(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lost+found of a disk, which its owner alone may enter."""
    (tmp_path / "lost+found").mkdir()
    forbidden = PermissionError("Permission denied")
    for name in ("stat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, failing(getattr(os, name), f"{tmp_path}/lost+found", float("inf"), forbidden))
    names = write_numbers(CheckpointStore(tmp_path, max_to_keep=1), 2)
    store = CheckpointStore(tmp_path)
    assert (store.names(), store.newest().name) == (names[1:], names[1])
    store.clear()
    assert (os.listdir(tmp_path), store.newest()) == (["lost+found"], None)


def test_all_is_on_the_disk_before_the_checkpoint_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that loses its power keeps what was synced only: all files first, then the manifest, then its name."""
    happened: list[str] = []
    wait, rename = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        wait(descriptor)
        happened.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def replace(source: Path, target: Path) -> None:
        happened.append(f"renamed to {target}")
        rename(source, target)

    store = CheckpointStore(tmp_path / "backup")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    folder = tmp_path / "backup" / store.write({}, VALUES)
    data = {str(file) for file in folder.iterdir() if file.name != "manifest.json"}
    counts = happened.index(f"renamed to {folder}/manifest.json")
    *before, manifest = happened[:counts]
    assert data and data <= set(before)
    assert manifest.startswith(f"{folder}/.manifest.json.")
    assert happened[counts + 1 :] == [str(folder), str(folder.parent)]


@pytest.mark.parametrize("keep", [1, 3])
def test_last_checkpoints_stay(tmp_path: Path, keep: int) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=keep)
    names = write_numbers(store, 5)
    assert names == [f"checkpoint-{number:08d}" for number in range(1, 6)]
    assert store.names() == sorted(os.listdir(tmp_path)) == names[-keep:]
    assert [store.open(name).meta["number"] for name in store.names()] == list(range(5 - keep, 5))


def test_only_a_writer_writes_and_cleans_up(tmp_path: Path) -> None:
    write_numbers(CheckpointStore(tmp_path), 1)
    killed = tmp_path / "checkpoint-00000002"
    killed.mkdir()
    (killed / "state.data-00000-of-00001.tempstate1").write_bytes(b"half")
    reader = CheckpointStore(tmp_path, writer=False)
    assert (killed.exists(), reader.names()) == (True, ["checkpoint-00000001"])
    assert (CheckpointStore(tmp_path).names(), killed.exists()) == (["checkpoint-00000001"], False)


@pytest.mark.filterwarnings("error")
def test_reading_while_checkpoints_are_written_and_removed(tmp_path: Path) -> None:
    writer = CheckpointStore(tmp_path, max_to_keep=1)
    writer.write({"number": 0}, {"value": tf.zeros([1000])})
    thread = threading.Thread(target=write_numbers, args=(writer, 40))
    thread.start()
    reader = CheckpointStore(tmp_path, writer=False)
    reads = 0
    try:
        while thread.is_alive():
            checkpoint = reader.newest()
            np.testing.assert_array_equal(checkpoint.tensors["value"], np.full([1000], checkpoint.meta["number"]))
            reads += 1
    finally:
        thread.join()
    assert reads >= 5
    assert reader.newest().meta == {"number": 39}


# --- What cannot be written -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "tensors", "error", "message"),
    [
        ({"names": {1}}, {}, TypeError, "not JSON serializable"),
        ({}, {"object": np.array([object()])}, ValueError, "object"),
    ],
)
def test_what_cannot_be_saved_leaves_nothing(
    tmp_path: Path, meta: dict, tensors: dict, error: type[Exception], message: str
) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(error, match=message):
        store.write(meta, tensors)
    assert os.listdir(tmp_path) == []


def assert_failed_write_is_undone(store: CheckpointStore, reason: str) -> None:
    """Writes 8 MB where 8 MB cannot be written."""
    first = store.write({"number": 1}, {"value": tf.ones([1000])})
    with pytest.raises(OSError) as caught:
        store.write({}, {"value": tf.ones([2_000_000])})
    message = str(caught.value)
    assert message.startswith(f"The checkpoint {store.directory}/checkpoint-00000002 cannot be written: ")
    assert reason in message and "function_node" not in message and "[Op:" not in message
    assert "unharmed: make room there, or choose another folder." in message
    assert os.listdir(store.directory) == [first]
    assert store.newest().meta == {"number": 1}


@pytest.fixture
def limited_file_size() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_too_large_file_leaves_the_previous_checkpoint(tmp_path: Path, limited_file_size: None) -> None:
    store = CheckpointStore(tmp_path)
    assert_failed_write_is_undone(store, "File too large")
    assert store.write({}, {"value": tf.ones([1000])}) == "checkpoint-00000002"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    with small_disks.small_disk(folder, "4m"):
        yield folder


@pytest.mark.mount
def test_full_disk_leaves_the_previous_checkpoint(small_disk: Path) -> None:
    store = CheckpointStore(small_disk)
    assert_failed_write_is_undone(store, "No space left on device")
    # What the failed one took is free again.
    assert store.write({}, {"value": tf.ones([900_000])}) == "checkpoint-00000002"


def test_half_removed_checkpoint_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise tf.errors.PermissionDeniedError(None, None, f"{path}; Permission denied")

    store = CheckpointStore(tmp_path, max_to_keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(tf.io.gfile, "rmtree", refuse)
        with pytest.warns(UserWarning) as caught:
            names = write_numbers(store, 2)
    old = tmp_path / names[0]
    assert [str(warning.message) for warning in caught] == [
        f"Old checkpoints in {tmp_path} cannot be removed now: {old}; Permission denied"
    ]
    assert sorted(os.listdir(old)) == ["state.data-00000-of-00001", "state.index"]
    assert (store.names(), store.newest().name) == (names[1:], names[1])
    CheckpointStore(tmp_path)
    assert os.listdir(tmp_path) == names[1:]
