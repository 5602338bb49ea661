"""Saving a model that belongs to a multi-worker strategy: the same path on every process, written by the chief."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdist.compat.patch import Patch
from tfdist.strategies.chief_files import files_of


def _by_chief(original: Callable) -> Callable:
    @functools.wraps(original)
    def save(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        files = files_of(model)
        if files is None:
            return original(model, filepath, *args, **kwargs)
        return files.save(filepath, lambda: original(model, filepath, *args, **kwargs))

    return save


PATCHES = [
    Patch(target, _by_chief, "keras", "tensorflow issue 38635: all workers write one file")
    for target in (
        "keras.src.saving.saving_lib:save_model",
        "keras.src.saving.saving_lib:save_weights_only",
        "keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5",
        "keras.src.models.model:Model.export",
    )
]
