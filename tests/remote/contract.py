"""What every storage promises, as functions of one and of a folder that is empty."""

from __future__ import annotations

import os
import tempfile

import pytest

from tfdist.storage.base import Storage


def what_was_written_is_read(storage: Storage, root: str) -> None:
    storage.write(f"{root}/a/one", b"1")
    assert (storage.read(f"{root}/a/one"), storage.names(f"{root}/a")) == (b"1", ["one"])
    storage.write(f"{root}/a/empty", b"")
    assert storage.read(f"{root}/a/empty") == b""


def another_content_takes_the_place_of_the_first(storage: Storage, root: str) -> None:
    for content in (b"long content", b"short", b"a much longer content than the first"):
        storage.write(f"{root}/a/one", content)
        assert storage.read(f"{root}/a/one") == content


def what_is_not_there(storage: Storage, root: str) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read(f"{root}/a/absent")
    with tempfile.TemporaryDirectory() as folder, pytest.raises(FileNotFoundError):
        storage.download(f"{root}/a/absent", f"{folder}/file")
    storage.remove(f"{root}/a/absent")
    storage.remove_all(f"{root}/absent")
    assert storage.names(f"{root}/absent") == storage.names(f"{root}/absent", levels=2) == []
    assert storage.folders_with(f"{root}/absent", "manifest") == {}


def large_files_are_copied(storage: Storage, root: str) -> None:
    content = os.urandom(3_000_000)
    with tempfile.TemporaryDirectory() as folder:
        for name, data in (("one", content), ("two", b"")):
            with open(f"{folder}/{name}", "wb") as file:
                file.write(data)
            storage.upload(f"{folder}/{name}", f"{root}/a/{name}")
            storage.download(f"{root}/a/{name}", f"{folder}/back")
            with open(f"{folder}/back", "rb") as file:
                assert file.read() == data


def all_names_are_listed(storage: Storage, root: str) -> None:
    expected = [f"folder-{number}/{name}" for number in range(7) for name in ("manifest", "state")]
    for path in [*expected[1:], "beside", "folder-1/deeper/file"]:
        storage.write(f"{root}/{path}", b"x")
    # Where there are folders, they may be listed, too.
    assert sorted(name for name in storage.names(root, levels=2) if "deeper" not in name) == sorted(expected[1:])
    found = storage.folders_with(root, "manifest")
    assert {name: found[name] for name in sorted(found) if name != "beside"} == {
        f"folder-{number}": number > 0 for number in range(7)
    }
    assert "beside" in storage.names(root)


LIKE_PATTERNS = ("run[1]", "run1", "lr=*", "lr=0.1", "what?")


def a_name_is_no_pattern(storage: Storage, root: str) -> None:
    for folder in LIKE_PATTERNS:
        storage.write(f"{root}/{folder}/{folder}-file", b"x")
    for folder in LIKE_PATTERNS:
        assert storage.names(f"{root}/{folder}") == [f"{folder}-file"]
    assert storage.folders_with(root, "lr=*-file").items() >= {name: name == "lr=*" for name in LIKE_PATTERNS}.items()
    storage.remove_all(f"{root}/lr=*")
    assert [storage.names(f"{root}/{folder}") for folder in ("lr=*", "lr=0.1")] == [[], ["lr=0.1-file"]]


def a_folder_is_removed(storage: Storage, root: str) -> None:
    for path in ("a/one", "a/two", "ab/three"):
        storage.write(f"{root}/{path}", b"x")
    storage.remove(f"{root}/a/one")
    assert storage.names(f"{root}/a") == ["two"]
    storage.remove_all(f"{root}/a")
    assert (storage.names(f"{root}/a"), storage.names(f"{root}/ab")) == ([], ["three"])


CONTRACT = [
    what_was_written_is_read,
    another_content_takes_the_place_of_the_first,
    what_is_not_there,
    large_files_are_copied,
    all_names_are_listed,
    a_name_is_no_pattern,
    a_folder_is_removed,
]
