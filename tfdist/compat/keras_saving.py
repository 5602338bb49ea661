"""Saving a model that belongs to a strategy of several processes.

The same path is given on every worker, and written by the chief; steps that are not done yet are waited for, and what
other workers hold of the optimizer is fetched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdist.compat.patch import Patch
from tfdist.optimizers.collected_slots import collect_slots
from tfdist.strategies.chief_files import files_of
from tfdist.strategies.pending_steps import settle


def _by_chief(has_optimizer: Callable[..., bool], original: Callable) -> Callable:
    @functools.wraps(original)
    def save(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        settle(model)
        files = files_of(model)
        if files is None:
            return original(model, filepath, *args, **kwargs)
        if has_optimizer(*args, **kwargs):
            collect_slots(model)
        return files.save(filepath, lambda: original(model, filepath, *args, **kwargs))

    return save


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


def _if_included(overwrite: bool = True, include_optimizer: bool = True) -> bool:
    return include_optimizer


PATCHES = [
    Patch(
        target,
        functools.partial(_by_chief, has_optimizer),
        "keras",
        "tensorflow issue 38635: all workers write one file",
    )
    for target, has_optimizer in (
        ("keras.src.saving.saving_lib:save_model", _always),
        ("keras.src.saving.saving_lib:save_weights_only", _always),
        ("keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5", _if_included),
        ("keras.src.models.model:Model.export", _never),
    )
]
