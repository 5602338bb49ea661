"""Saving a model that belongs to a strategy of several processes.

The same path is given on every worker, and written by the chief; steps that are not done yet are waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdist.compat.patch import Patch
from tfdist.strategies.chief_files import files_of
from tfdist.strategies.pending_steps import settle


def _by_chief(original: Callable) -> Callable:
    @functools.wraps(original)
    def save(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        settle(model)
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
