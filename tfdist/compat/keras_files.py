"""Keras' files on remote file systems that TensorFlow does not have, by fsspec.

Keras opens every remote path by `tf.io.gfile`. TensorFlow has `gs://`; its other file systems have moved into a package
(tensorflow-io) that has no release for TensorFlow 2.17 and later, so that `model.save("s3://...")` raises
`UnimplementedError`. What Keras does with such a path is written, read or copied as a whole file, which fsspec can do.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from tfdist.compat.patch import Patch
from tfdist.storage.base import Storage
from tfdist.storage.fsspec_files import FsspecStorage
from tfdist.storage.selection import check_remote_path, is_tensorflows, scheme_of, storage_of

# Keras itself talks to the Hugging Face Hub.
_KERAS_OWN = ("hf",)


class _Files:
    """`tf.io.gfile`, and fsspec for paths that it cannot open.

    Args:
        gfile: what Keras has in its place.
    """

    def __init__(self, gfile: Any) -> None:
        self._gfile = gfile

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._gfile, name)
        ours: Callable | None = getattr(_BySpec, name, None)
        if name.startswith("_") or ours is None:
            return found

        @functools.wraps(ours)
        def call(*paths: Any, **options: Any) -> Any:
            is_ours = any(map(_needs_fsspec, paths))
            return ours(*paths, **options) if is_ours else found(*paths, **options)

        return call


class _BySpec:
    """The functions of `tf.io.gfile` that Keras uses."""

    @staticmethod
    def GFile(path: Any, mode: str = "r") -> Any:
        return _storage(path).files.open(os.fspath(path), mode)

    @staticmethod
    def exists(path: Any) -> bool:
        return _storage(path).exists(os.fspath(path))

    @staticmethod
    def isdir(path: Any) -> bool:
        return _storage(path).files.isdir(os.fspath(path))

    @staticmethod
    def listdir(path: Any) -> list[str]:
        return _storage(path).names(os.fspath(path))

    @staticmethod
    def makedirs(path: Any) -> None:
        _storage(path).make_folder(os.fspath(path))

    @staticmethod
    def remove(path: Any) -> None:
        _storage(path).remove(os.fspath(path))

    @staticmethod
    def rmtree(path: Any) -> None:
        _storage(path).files.rm(os.fspath(path), recursive=True)

    @staticmethod
    def copy(source: Any, target: Any, overwrite: bool = False) -> None:
        source, target = os.fspath(source), os.fspath(target)
        if not scheme_of(source):
            _storage(target).upload(source, target)
        elif not scheme_of(target):
            _storage(source).download(source, target)
        else:
            of_target: Storage = storage_of(target)
            of_target.write(target, storage_of(source).read(source))


def _needs_fsspec(path: Any) -> bool:
    if not isinstance(path, (str, os.PathLike)):
        return False
    path = os.fspath(path)
    return scheme_of(path) not in _KERAS_OWN and not is_tensorflows(path)


def _storage(path: Any) -> FsspecStorage:
    check_remote_path("the path", os.fspath(path))
    return FsspecStorage(os.fspath(path))


PATCHES = [
    Patch(
        "keras.src.utils.file_utils:gfile",
        _Files,
        "keras",
        "no upstream issue: TensorFlow has no file systems but gs:// and local ones any more",
    ),
]
