from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.remote.contract import CONTRACT, LIKE_PATTERNS
from tests.remote.storages import MemoryStorage
from tests.unit.pages import ROOT
from tfdist.storage.base import Storage, check_writable
from tfdist.storage.fsspec_files import FsspecStorage
from tfdist.storage.local import LocalStorage
from tfdist.storage.selection import check_remote_path, storage_of
from tfdist.storage.tensorflow_files import TensorFlowStorage

_numbers = itertools.count()


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("scheme", ["", "ram", "memory", "test"])
def test_contract(tmp_path: Path, scheme: str, check: Callable[[Storage, str], None]) -> None:
    root = f"{scheme}://contract-{next(_numbers)}/run" if scheme else str(tmp_path)
    if not scheme:
        for name in ("a", *(f"folder-{number}/deeper" for number in range(7)), "ab", *LIKE_PATTERNS):
            (tmp_path / name).mkdir(parents=True)
    storage = MemoryStorage() if scheme == "test" else storage_of(root)
    kinds = {"": LocalStorage, "ram": TensorFlowStorage, "memory": FsspecStorage, "test": MemoryStorage}
    assert type(storage) is kinds[scheme]
    check(storage, root)


@pytest.mark.parametrize("where", ["/listed/run", "/listed/run/checkpoint-00000001"])
@pytest.mark.parametrize("error", [PermissionError("Forbidden"), OSError("503")])
def test_a_listing_that_fails_is_not_empty(monkeypatch: pytest.MonkeyPatch, where: str, error: OSError) -> None:
    root = "memory://listed/run"
    storage = storage_of(root)
    storage.write(f"{root}/checkpoint-00000001/manifest.json", b"{}")
    original = storage.files.ls

    def ls(path: str, **options: Any) -> list:
        if path == where:
            raise error
        return original(path, **options)

    assert storage.folders_with(root, "manifest.json") == {"checkpoint-00000001": True}
    monkeypatch.setattr(storage.files, "ls", ls)
    with pytest.raises(type(error), match=str(error)):
        storage.folders_with(root, "manifest.json")


def test_a_folder_that_is_an_object_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consoles of clouds make such objects."""
    storage = storage_of("memory://marked/run")
    found = [{"name": f"/marked/{name}", "type": "file"} for name in ("run/", "run", "run/one")]
    monkeypatch.setattr(storage.files, "ls", lambda path, detail: found)
    assert storage.names("memory://marked/run") == ["one"]


@pytest.mark.parametrize("call", ["read('test://a')", "write('test://a', b'1')"])
def test_a_process_that_is_killed_leaves_nothing_on_the_disk(tmp_path: Path, call: str) -> None:
    text = f"""
import os
from tests.remote.storages import MemoryStorage
class Deadly(MemoryStorage):
    def upload(self, *paths): os.kill(os.getpid(), 9)
    download = upload
Deadly().{call}
"""
    result = subprocess.run([sys.executable, "-c", text], env={**os.environ, "TMPDIR": str(tmp_path)}, cwd=ROOT)
    assert result.returncode == -9 and os.listdir(tmp_path) == []


def _raise(error: Exception) -> Callable:
    def call(*args: Any, **options: Any) -> None:
        raise error

    return call


class NoCredentialsError(Exception):
    """As botocore has it: no `OSError`."""


def test_what_a_library_raises_as_it_is_made_is_an_error_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict] = []

    def make(path: str, **options: Any) -> None:
        given.append(options)
        raise NoCredentialsError("Unable to\x1b[2J locate credentials")

    monkeypatch.setattr(fsspec.core, "url_to_fs", make)
    for path in ("sftp://host/run", "s3://bucket/run"):
        with pytest.raises(OSError, match=rf"{path}: NoCredentialsError: Unable to\\x1b\[2J locate credentials"):
            FsspecStorage(path)
    assert given == [{}, {"use_listings_cache": False}], "the client of sftp takes no such option"


@pytest.mark.parametrize("kind", [PermissionError, FileNotFoundError, OSError])
def test_what_a_server_says_cannot_move_the_cursor(monkeypatch: pytest.MonkeyPatch, kind: type[OSError]) -> None:
    storage = storage_of("memory://bucket/run")
    monkeypatch.setattr(storage.files, "cat_file", _raise(kind("no\x1b[2J" + "!" * 5000)))
    with pytest.raises(kind, match=r"^no\\x1b\[2J!+\.\.\.$") as caught:
        storage.read("memory://bucket/run/a")
    assert type(caught.value) is kind and len(str(caught.value)) < 1100


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("nothing://b/run", ValueError, r"backup_dir 'nothing://b/run'.*fsspec.*Neither knows nothing://\."),
        (str(Path("gs://b/run")), ValueError, r"'gs:/b/run', with one slash.*Expected: 'gs://b/run', as text"),
        ("gs://b/a*b", ValueError, r"which has '\*' in it"),
        ("sftp://me:secret@host/run", ValueError, r"backup_dir with a password in it, sftp://\*\*\*@host"),
        ("s3://KEY:1/secret@bucket/run", ValueError, r"backup_dir with a password in it, s3://\*\*\*@bucket"),
        ("s3:/KEY:secret@bucket/run", ValueError, r"backup_dir with a password in it, s3://\*\*\*@bucket"),
        ("abfs://box/run?sig=secret", ValueError, r"backup_dir 'abfs://box/run', which has '\?' in it"),
        ("abfs://box/r*n?sig=secret", ValueError, r"backup_dir 'abfs://box/r\*n', which has '\*' in it"),
        ("abfs:/box/run?sig=secret", ValueError, r"Expected: 'abfs://box/run', as text"),
    ],
)
def test_refused_paths(path: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        check_remote_path("backup_dir", path)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("path", ["gs://bucket/time-12:30/me@here", "memory://host:8020/user/me@here"])
def test_no_password(path: str) -> None:
    check_remote_path("backup_dir", path)


@pytest.mark.parametrize("missing", ["s3fs", "fsspec.registry"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"'s3://bucket/run'.*not installed on this machine: .*{missing}"):
        check_remote_path("backup_dir", "s3://bucket/run")


@pytest.mark.parametrize(("method", "step"), [("upload", "written"), ("download", "read"), ("remove", "removed")])
def test_the_probe_says_what_fails(monkeypatch: pytest.MonkeyPatch, method: str, step: str) -> None:
    storage = MemoryStorage()
    monkeypatch.setattr(storage, method, _raise(PermissionError("403\n Forbidden")))
    with pytest.raises(OSError, match=f"^an object there cannot be {step}: 403 Forbidden$"):
        check_writable(storage, "test://bucket")
