"""Files of the file systems of fsspec: `s3://` with s3fs, `abfs://` with adlfs, and many more. Uses no TensorFlow."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tfdist.cluster.foreign_text import cleaned
from tfdist.storage.base import MOST, Storage

_T = TypeVar("_T")
# Where there are no folders, and making one might make a bucket.
_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "ocilake", "oss"}

_ANSWERS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


class FsspecStorage(Storage):
    """Paths with a scheme that fsspec knows. It reads its own settings and credentials, as everywhere.

    Args:
        path: one of them; another scheme needs another object.

    Raises:
        ImportError: if fsspec is not installed.
        OSError: if its file system cannot be made: its package is missing, its server is not reached, ...
    """

    def __init__(self, path: str) -> None:
        core = importlib.import_module("fsspec.core")
        # A listing that is kept would hide what other processes write. Others take no such option: sftp:// hands all
        # that it is given to its client.
        options = {"use_listings_cache": False} if path.partition("://")[0] in _BUCKETS else {}
        with _os_errors(path):
            self.files: Any = core.url_to_fs(path, **options)[0]

    def names(self, folder: str, levels: int = 1) -> list[str]:
        root = self._path(folder).rstrip("/")
        with _os_errors(folder):
            self.files.invalidate_cache()
            return self._names(root, levels)

    def _names(self, folder: str, levels: int) -> list[str]:
        try:
            # Not `find`, which leaves out what cannot be listed.
            entries = self.files.ls(folder, detail=True)
        except FileNotFoundError:
            return []
        names: list[str] = []
        for entry in entries:
            path, is_folder = entry["name"].rstrip("/"), entry["type"] == "directory"
            name = os.path.basename(path)
            if path == folder:
                continue  # a bucket may have an empty object of the folder's own name
            if levels == 1 and not is_folder:
                names.append(name)
            elif levels > 1 and is_folder:
                names += [f"{name}/{below}" for below in self._names(path, levels - 1)]
        return names

    def exists(self, path: str) -> bool:
        """Whether there is a file or a folder of this path."""
        with contextlib.suppress(FileNotFoundError), _os_errors(path):
            self.files.invalidate_cache()
            # Its own `exists` answers no for whatever goes wrong.
            self.files.info(self._path(path))
            return True
        return False

    def download(self, path: str, local: str) -> None:
        with _os_errors(path):
            self.files.get_file(self._path(path), local)

    def upload(self, local: str, path: str) -> None:
        with _os_errors(path):
            self._in_folder(path, lambda: self.files.put_file(local, self._path(path)))

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _os_errors(path):
            self.files.rm_file(self._path(path))

    def read(self, path: str) -> bytes:
        with _os_errors(path):
            return self.files.cat_file(self._path(path))

    def write(self, path: str, content: bytes) -> None:
        with _os_errors(path):
            self._in_folder(path, lambda: self.files.pipe_file(self._path(path), content))

    def _in_folder(self, path: str, write: Callable[[], _T]) -> _T:
        """Writes a file, whose folder is made if that is missing."""
        try:
            return write()
        except FileNotFoundError:
            if self._is_bucket:
                raise
        self.make_folder(os.path.dirname(self._path(path)))
        return write()

    def make_folder(self, path: str) -> None:
        """Makes a folder, where there are folders."""
        if not self._is_bucket:
            with _os_errors(path):
                self.files.makedirs(self._path(path), exist_ok=True)

    @property
    def _is_bucket(self) -> bool:
        protocol = self.files.protocol
        return not _BUCKETS.isdisjoint([protocol] if isinstance(protocol, str) else protocol)

    def _path(self, path: str) -> str:
        return self.files._strip_protocol(path)


def check_scheme(scheme: str) -> None:
    """Looks for the file system of a scheme.

    Raises:
        ImportError: if fsspec or the package for the scheme is not installed; it names that package.
        ValueError: if fsspec does not know the scheme.
    """
    importlib.import_module("fsspec.registry").get_filesystem_class(scheme)


@contextlib.contextmanager
def _os_errors(path: str) -> Iterator[None]:
    """Turns what the libraries of clouds raise (missing credentials, a host that is not found) into an `OSError`.

    What a server says in it is made fit to be printed.
    """
    try:
        yield
    except OSError as error:
        if (text := cleaned(error, MOST)) == str(error):
            raise
        kind = next((kind for kind in _ANSWERS if isinstance(error, kind)), OSError)
        raise kind(text) from error
    except Exception as error:
        raise OSError(cleaned(f"{path}: {type(error).__name__}: {error}", MOST)) from error
