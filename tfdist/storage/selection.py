"""Which storage a path belongs to, and what is wrong with a path that belongs to none."""

from __future__ import annotations

import os
import re

from tfdist.storage.base import Storage
from tfdist.storage.fsspec_files import FsspecStorage, check_scheme
from tfdist.storage.local import LocalStorage
from tfdist.storage.tensorflow_files import TensorFlowStorage, is_known

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_WILDCARDS = "*?[]"
# A name, and what comes after it up to "@", if that is no port: secret keys may have slashes, too.
_PASSWORD = re.compile(r":/+[^@/]*:(?!\d{2,5}/)[^@]*@")
# What pathlib makes of them: it would be a local folder of that name.
_ONE_SLASH = re.compile(r"(gs|gcs|s3|s3a|abfs|abfss|az|hdfs):/(?!/)")


def scheme_of(path: str) -> str:
    """The scheme of a path; empty for a local one.

    Example:
        >>> scheme_of("gs://bucket/run"), scheme_of("file:///tmp/run"), scheme_of("/tmp/run")
        ('gs', '', '')
    """
    match = _SCHEME.match(path)
    return match[1] if match and match[1] != "file" else ""


def absolute(path: str | os.PathLike[str]) -> str:
    """The path of a folder as it is also called in another working directory; a remote one has no / at its end.

    Example:
        >>> absolute("file:///tmp/run/"), absolute("gs://bucket/run/")
        ('/tmp/run', 'gs://bucket/run')
    """
    path = os.fspath(path).removeprefix("file://")
    return path.rstrip("/") if scheme_of(path) else os.path.abspath(path)


def check_remote_path(name: str, path: str) -> None:
    """Refuses a path that no storage can take; sends no request.

    Args:
        name: of the argument that it was given as.
        path: local paths pass.

    Raises:
        ImportError: if the package for its scheme is not installed.
        ValueError: if nothing knows the scheme, or the path holds a password, wildcards, or one slash for two.
    """
    if not may_be_remote(path):
        return
    if _PASSWORD.search(path):
        rest = path.rpartition("@")[2].partition("/")[0].partition("?")[0]
        raise ValueError(
            f"Received: {name} with a password in it, {path.partition(':')[0]}://***@{rest}. Expected: a path "
            "without one, since paths are logged. Give credentials where the library of the storage looks for them: in "
            "its environment variables or its file of settings."
        )
    # What follows may be a signature, which is as good as a password.
    shown = path.partition("?")[0]
    if _ONE_SLASH.match(path):
        raise ValueError(
            f"Received: {name} {shown!r}, with one slash, as pathlib.Path makes it. Expected: "
            f"{shown.replace(':/', '://', 1)!r}, as text."
        )
    scheme = scheme_of(path)
    if found := sorted(set(path) & set(_WILDCARDS)):
        raise ValueError(
            f"Received: {name} {shown!r}, which has {found[0]!r} in it. Expected: a remote path without any of "
            f"{_WILDCARDS}, by which files are searched there."
        )
    if is_known(scheme):
        return
    try:
        check_scheme(scheme)
    except ImportError as error:
        raise ImportError(
            f"Received: {name} {path!r}. TensorFlow has no file system for {scheme}://, and the package by which "
            f"fsspec has one is not installed on this machine: {error}"
        ) from None
    except ValueError:
        raise ValueError(
            f"Received: {name} {path!r}. Expected: a local path, or one whose scheme TensorFlow has (gs://), or fsspec "
            f"(s3://, abfs://, ...). Neither knows {scheme}://."
        ) from None


def may_be_remote(path: str) -> bool:
    """Whether `check_remote_path` has something to say about a path."""
    return bool(scheme_of(path) or _ONE_SLASH.match(path))


def storage_of(path: str) -> Storage:
    """The storage of a path that `check_remote_path` accepts.

    Example:
        >>> storage_of("/tmp/backup").is_local
        True
    """
    scheme = scheme_of(path)
    if not scheme:
        return LocalStorage()
    return TensorFlowStorage() if is_known(scheme) else FsspecStorage(path)


def is_tensorflows(path: str) -> bool:
    """Whether TensorFlow can open a path by itself."""
    return is_known(scheme_of(path))  # also that of a local path, which is empty


def advice_for(path: str) -> str:
    """What to do about a remote path that cannot be used, as the end of a message."""
    return (
        f"See that {'/'.join(path.split('/')[:3])} exists, that this machine reaches it, and that its credentials may "
        "list, read, write and delete there."
    )
