from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests import small_disks
from tests.fault_tolerance.numbered import write_numbers
from tfdist.checkpoint.store import CheckpointStore


@pytest.mark.parametrize(
    ("meta", "tensors", "error", "message"),
    [
        ({"names": {1}}, {}, TypeError, "must be JSON"),
        ({}, {"": np.ones(2)}, ValueError, "name is ''"),
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


def test_manifest_that_cannot_be_written_leaves_the_previous_checkpoint(
    tmp_path: Path, limited_file_size: None
) -> None:
    store = CheckpointStore(tmp_path)
    name = store.write({}, {})
    with pytest.raises(OSError, match=r"cannot be written: \[Errno 27\] File too large"):
        store.write({"text": "x" * 2**20}, {"value": tf.ones([1000])})
    assert os.listdir(tmp_path) == store.names() == [name]


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
        f"The old checkpoint {old} cannot be removed: {old}; Permission denied"
    ]
    assert sorted(os.listdir(old)) == ["state.data-00000-of-00001", "state.index"]
    assert (store.names(), store.newest().name) == (names[1:], names[1])
    CheckpointStore(tmp_path)
    assert os.listdir(tmp_path) == names[1:]
