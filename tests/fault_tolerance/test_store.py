from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

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


@pytest.mark.parametrize(
    "convert", [lambda value: value, tf.constant, tf.Variable], ids=["array", "tensor", "variable"]
)
def test_values_come_back_equal(tmp_path: Path, convert: Callable[[np.ndarray], object]) -> None:
    values = {name: convert(value) for name, value in VALUES.items()}
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


def test_checkpoint_without_tensors(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.write({"epoch": 1}, {})
    assert (store.newest().meta, store.newest().tensors) == ({"epoch": 1}, {})


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
    assert os.listdir(tmp_path) == ["lost+found"]


@pytest.mark.parametrize("keep", [1, 3])
def test_last_checkpoints_stay(tmp_path: Path, keep: int) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=keep)
    names = write_numbers(store, 5)
    assert names == [f"checkpoint-{number:08d}" for number in range(1, 6)]
    assert store.names() == sorted(os.listdir(tmp_path)) == names[-keep:]
    assert [store.open(name).meta["number"] for name in store.names()] == list(range(5 - keep, 5))


def test_keeping_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Received: max_to_keep=0\. Expected: 1 or more"):
        CheckpointStore(tmp_path, max_to_keep=0)


def test_clear_removes_checkpoints_only(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write_numbers(store, 2)
    (tmp_path / "notes.txt").write_text("mine")
    store.clear()
    assert (os.listdir(tmp_path), store.newest()) == (["notes.txt"], None)


def test_only_a_writer_writes_and_cleans_up(tmp_path: Path) -> None:
    write_numbers(CheckpointStore(tmp_path), 1)
    killed = tmp_path / "checkpoint-00000002"
    killed.mkdir()
    (killed / "state.data-00000-of-00001.tempstate1").write_bytes(b"half")
    reader = CheckpointStore(tmp_path, writer=False)
    assert (killed.exists(), reader.names()) == (True, ["checkpoint-00000001"])
    with pytest.raises(ValueError, match=r"is a reader: make the one that writes with writer=True"):
        reader.write({}, {})
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
