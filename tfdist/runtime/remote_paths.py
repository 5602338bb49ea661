"""The remote paths of Keras' callbacks: tried before a fit begins, for they are first written hours later."""

from __future__ import annotations

import os
from typing import Any

import keras

from tfdist.storage.probe import check_writable
from tfdist.storage.selection import advice_for, check_remote_path, is_tensorflows, may_be_remote, storage_of

_PATHS = {"ModelCheckpoint": "filepath", "CSVLogger": "filename", "TensorBoard": "log_dir"}
_LOCAL_INSTEAD = "Let it write to a local path, and copy that when the training has ended."


class RemotePaths(keras.callbacks.Callback):
    """Raises at the beginning of a fit if a callback could not write to its remote path.

    Args:
        paths: the class, the attribute and the path of each.
    """

    def __init__(self, paths: list[tuple[str, str, str]]) -> None:
        super().__init__()
        self._paths = paths

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Tries all paths.

        Raises:
            OSError: if one cannot be written.
        """
        tried: dict[str, str] = {}
        for kind, attribute, path in self._paths:
            tried.setdefault(_folder_of(path), f"{kind}({attribute}={path!r})")
        for folder, received in tried.items():
            _try(folder, received)


def check_paths(callbacks: list[keras.callbacks.Callback]) -> None:
    """Refuses paths that nothing can write to; on every process of a job, so that none waits for the others.

    Raises:
        ImportError: if the package for the scheme of a path is not installed.
        ValueError: if a path is none that its callback can write to.
    """
    for kind, attribute, path in _all_remote_paths(callbacks):
        check_remote_path(f"{kind}'s {attribute}", path)
        if kind == "CSVLogger":
            raise ValueError(
                f"Received: {kind}({attribute}={path!r}). Expected: a local path: this callback asks its file whether "
                "it is closed, which TensorFlow's files cannot tell, and fails at the end of the training. "
                f"{_LOCAL_INSTEAD}"
            )
        if kind == "TensorBoard" and not is_tensorflows(path):
            raise ValueError(
                f"Received: {kind}({attribute}={path!r}). Expected: a local path, or one that TensorFlow opens by "
                f"itself (gs://), which writes these files. {_LOCAL_INSTEAD}"
            )


def add_path_check(callbacks: list[keras.callbacks.Callback], model: Any) -> None:
    """Lets the process that writes try the paths of its callbacks when it trains."""
    paths = _all_remote_paths(callbacks)
    is_chief = getattr(getattr(model, "distribute_strategy", None), "is_chief", True)
    if paths and is_chief and not any(isinstance(callback, RemotePaths) for callback in callbacks):
        callbacks.insert(0, RemotePaths(paths))


def _all_remote_paths(callbacks: list[keras.callbacks.Callback]) -> list[tuple[str, str, str]]:
    return [path for callback in callbacks for path in _remote_paths(callback)]


def _remote_paths(callback: Any) -> list[tuple[str, str, str]]:
    """Which of Keras' classes a callback is of, which attribute is its path, and the path, if that is remote."""
    found = []
    for kind, attribute in _PATHS.items():
        if isinstance(callback, getattr(keras.callbacks, kind)):
            path = getattr(callback, attribute, None)
            if isinstance(path, (str, os.PathLike)) and may_be_remote(os.fspath(path)):
                found.append((kind, attribute, os.fspath(path)))
    return found


def _folder_of(path: str) -> str:
    """The folder of a path, as far as it has no places for numbers that are not known yet.

    Example:
        >>> _folder_of("gs://bucket/run/epoch-{epoch:02d}/best.keras")
        'gs://bucket/run'
        >>> _folder_of("gs://bucket/logs")
        'gs://bucket'
    """
    fixed = path.partition("{")[0]
    folder = fixed.rpartition("/")[0]
    return fixed if folder.endswith(":/") else folder


def _try(folder: str, received: str) -> None:
    try:
        check_writable(storage_of(folder), folder)
    except OSError as error:
        text = f"Received: {received}, but {error}. Expected: a place to write to. {advice_for(folder)}"
        raise OSError(text) from error
