"""A disk that fails for a moment, or for longer, and backups of a later tfdist: nothing is lost by either."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fault_tolerance.numbered import write_numbers
from tfdist.checkpoint import manifest
from tfdist.checkpoint.manifest import DamagedCheckpointError, UnknownFormatError
from tfdist.checkpoint.store import CheckpointStore
from tfdist.storage import base

pytestmark = pytest.mark.filterwarnings("error::UserWarning")

STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
NEWEST = "checkpoint-00000003"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PAUSES", (0.001, 0.001))


def failing(
    original: Callable, part: str, times: float, error: Exception = STALE, where: int = 0
) -> Callable[..., Any]:
    """A function that fails so many times where its argument has a part."""
    left = [times]

    def call(*args: Any, **options: Any) -> Any:
        if len(args) > where and part in str(args[where]) and left[0] > 0:
            left[0] -= 1
            raise error
        return original(*args, **options)

    return call


def fail(patch: pytest.MonkeyPatch, store: CheckpointStore, what: str, times: float) -> None:
    """Lets one of the functions fail that a store calls where it reads."""
    if what == "list":
        patch.setattr(os, "listdir", failing(os.listdir, store.directory, times))
    elif what == "look":
        patch.setattr(os, "stat", failing(os.stat, f"{NEWEST}/manifest.json", times))
    elif what == "manifest.json":
        patch.setattr(Path, "read_bytes", failing(Path.read_bytes, f"{NEWEST}/{what}", times))
    else:
        patch.setattr(manifest, "open", failing(open, f"{NEWEST}/{what}", times), raising=False)


PLACES = ["list", "look", "manifest.json", "state.index", "state.data-00000-of-00001"]


@pytest.mark.parametrize("place", PLACES)
def test_one_error_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    writer = CheckpointStore(tmp_path, max_to_keep=3)
    names = write_numbers(writer, 3)
    with monkeypatch.context() as patch:
        fail(patch, writer, place, times=1)
        assert writer.newest().name == NEWEST == names[-1]
    assert writer.write({}, {}) == "checkpoint-00000004"
    assert writer.names() == [*names[1:], "checkpoint-00000004"]


@pytest.mark.parametrize("place", PLACES)
def test_a_disk_that_stays_away_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    store = CheckpointStore(tmp_path)
    names = write_numbers(store, 3)
    with monkeypatch.context() as patch:
        fail(patch, store, place, times=float("inf"))
        with pytest.raises(OSError, match="Stale file handle") as caught:
            store.newest()
    if place not in ("list", "look"):
        assert str(caught.value).startswith(
            f"The checkpoint {tmp_path}/{NEWEST} cannot be read, also after 3 attempts: "
        )
        assert "nothing is removed, and no older one is used in its place" in str(caught.value)
    assert store.newest().name == NEWEST
    store.write({}, {})
    assert store.names() == [*names[1:], "checkpoint-00000004"]


def fields_of(content: bytes) -> dict[str, Any]:
    """What is in a manifest, but for its checksum."""
    return {name: value for name, value in json.loads(content).items() if name != "crc32"}


def text_of(fields: dict[str, Any]) -> bytes:
    """A manifest with these fields, and the checksum that belongs to them."""
    body = json.dumps(fields)[:-1].encode()
    return b'%s,\n"crc32": "%08x"}\n' % (body, zlib.crc32(body))


def altered(content: bytes, **fields: Any) -> bytes:
    """A manifest with other fields and the checksum that belongs to it."""
    return text_of({**fields_of(content), **fields})


FORMS = {
    "the same checksum": lambda content: altered(content, format=2),
    "another checksum": lambda content: b'{"format": 3, "sha256": "00", "parts": []}',
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_later_format_is_refused_and_stays(tmp_path: Path, form: Callable[[bytes], bytes]) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=1)
    [name] = write_numbers(store, 1)
    path = tmp_path / name / "manifest.json"
    path.write_bytes(form(path.read_bytes()))
    content = path.read_bytes()
    store = CheckpointStore(tmp_path, max_to_keep=1)
    with pytest.raises(UnknownFormatError) as caught:
        store.newest()
    assert str(caught.value).startswith(f"The checkpoint {tmp_path}/{name} is of another version of tfdist: ")
    assert "this version of tfdist reads 1. It is left as it is. Use the version of tfdist" in str(caught.value)
    assert os.listdir(tmp_path) == [name]
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"files": {}}, "manifest.json does not list state.index"),
        ({"tensors": {"other": {"dtype": "float32", "shape": [1000]}}}, "lists a tensor 'other', which state.index"),
        ({"tensors": {"value": {"dtype": "variant", "shape": [1000]}}}, "lists a tensor 'value', which state.index"),
        ({"tensors": {"value": {"dtype": "float32", "shape": [10**30]}}}, "its tensors.value.shape is 1000"),
        ({"files": {"../../secret": {"size": 1, "crc32": 1}}}, "lists a file '../../secret', which is not the name"),
        ({"files": {"a" * 300: {"size": 1, "crc32": 1}}}, "which is not the name of one in its folder"),
        ({"files": {"state.index": {"size": "1", "crc32": 1}}}, "its files.state.index.size is '1'"),
        ({"meta": 1}, "its meta is 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_manifest_with_a_right_checksum_is_checked_nevertheless(tmp_path: Path, fields: dict, fault: str) -> None:
    store = CheckpointStore(tmp_path)
    [name] = write_numbers(store, 1)
    path = tmp_path / name / "manifest.json"
    path.write_bytes(altered(path.read_bytes(), **fields))
    with pytest.raises(DamagedCheckpointError) as caught:
        store.open(name)
    assert fault in caught.value.reason
