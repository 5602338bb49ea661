from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.fault_tolerance.numbered import write_numbers
from tests.fault_tolerance.test_store_read_errors import failing
from tfdist.checkpoint.manifest import DamagedBackupsError, DamagedCheckpointError
from tfdist.checkpoint.store import CheckpointStore


def flip_first_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def append_garbage(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"garbage")


DAMAGES = [flip_first_bit, truncate, empty, append_garbage]
FILES = ["state.index", "state.data-00000-of-00001", "manifest.json"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_damaged_newest_checkpoint_gives_way_to_the_previous(
    tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    store = CheckpointStore(tmp_path)
    names = write_numbers(store, 3)
    damage(tmp_path / names[2] / file)
    with pytest.warns(UserWarning) as caught:
        checkpoint = store.newest()
    assert [str(warning.message).split(": ")[0] for warning in caught] == [
        f"The checkpoint {tmp_path}/{names[2]} is damaged"
    ]
    assert file in str(caught[0].message)
    assert f"{names[1]} is used instead" in str(caught[0].message)
    assert (checkpoint.name, checkpoint.meta) == (names[1], {"number": 1})
    np.testing.assert_array_equal(checkpoint.tensors["value"], np.full([1000], 1, np.float32))
    with pytest.raises(DamagedCheckpointError, match=file):
        store.open(names[2])


def test_damaged_checkpoints_are_not_counted_and_go_after_the_next_write(tmp_path: Path) -> None:
    names = write_numbers(CheckpointStore(tmp_path, max_to_keep=3), 3)
    store = CheckpointStore(tmp_path, max_to_keep=3)
    for name in names[1:]:
        empty(tmp_path / name / "state.index")
    with pytest.warns(UserWarning, match="is damaged: state.index has 0 bytes") as caught:
        assert store.newest().name == names[0]
    assert len(caught) == 2
    assert store.write({}, {}) == "checkpoint-00000004"
    assert store.names() == [names[0], "checkpoint-00000004"]


def test_a_damaged_checkpoint_that_cannot_be_removed_yet_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = write_numbers(CheckpointStore(tmp_path), 2)
    store = CheckpointStore(tmp_path, max_to_keep=3)
    empty(tmp_path / names[1] / "state.index")
    with pytest.warns(UserWarning, match="is damaged"):
        store.newest()
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="cannot be removed now"):
        fail = failing(os.remove, f"{tmp_path}/{names[1]}", float("inf"), PermissionError("Permission denied"))
        patch.setattr(os, "remove", fail)
        names.append(store.write({}, {}))
    names.append(store.write({}, {}))
    assert store.names() == [names[0], *names[2:]]


def test_a_checkpoint_with_the_name_of_a_damaged_one_counts(tmp_path: Path) -> None:
    names = write_numbers(CheckpointStore(tmp_path), 2)
    store = CheckpointStore(tmp_path)
    empty(tmp_path / names[1] / "state.index")
    with pytest.warns(UserWarning, match="is damaged"):
        store.newest()
    shutil.rmtree(tmp_path / names[1])
    assert [store.write({}, {}), store.write({}, {})] == [names[1], "checkpoint-00000003"]
    assert store.names() == [*names, "checkpoint-00000003"]


@pytest.mark.filterwarnings("error")
def test_all_damaged_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    names = write_numbers(store, 2)
    empty(tmp_path / names[0] / "manifest.json")
    (tmp_path / names[1] / "state.index").unlink()
    with pytest.raises(DamagedBackupsError) as caught:
        store.newest()
    assert str(caught.value) == (
        f"{tmp_path} holds no checkpoint that is complete and unaltered:\n"
        f"  {names[1]}: state.index is missing\n"
        f"  {names[0]}: manifest.json (0 bytes) is incomplete or is not a manifest\n"
        "To start over, move the folder away, or use another one."
    )
