"""Keras' callbacks that write files: on a multi-worker strategy only the chief's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.compat.patch import Patch
from tfdist.strategies.chief_files import ChiefFiles, files_of

# Nothing but writers: on the other processes they have nothing to do.
_WRITERS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
# These do other things, too; only what writes is silenced.
_SAVERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


class _FilesAreWritten(keras.callbacks.Callback):
    """Comes last: when `fit` returns, on any process, the chief's callbacks have written their files."""

    def __init__(self, files: ChiefFiles):
        super().__init__()
        self._files = files

    def on_train_end(self, logs: dict | None = None) -> None:
        self._files.catch_up("finish its callbacks at the end of fit")


def _set_model(original: Callable) -> Callable:
    def set_model(self: Any, model: Any) -> None:
        files = files_of(model) if model else None
        if files is not None:
            if not model.distribute_strategy.is_chief:
                self.callbacks = [c for c in self.callbacks if not isinstance(c, _WRITERS)]
                for callback in self.callbacks:
                    if isinstance(callback, _SAVERS):
                        callback._save_model = _save_nothing
                        callback.delete_checkpoint = False
            if not any(isinstance(c, _FilesAreWritten) for c in self.callbacks):
                self.callbacks.append(_FilesAreWritten(files))
        original(self, model)

    return set_model


def _save_nothing(*args: Any, **kwargs: Any) -> None:
    """In place of `_save_model` on every process but the chief."""


PATCHES = [
    Patch(
        "keras.src.callbacks.callback_list:CallbackList.set_model",
        _set_model,
        "keras",
        "tensorflow issue 38635: all workers write one file",
    )
]
