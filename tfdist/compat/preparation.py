"""What all processes of a host would download or write at the same time: one after another, by `on_chief_first`.

TensorFlow Datasets prepares into a folder that it renames at the end, which fails where another process was faster.
`get_file` writes under the final name, so that another process takes a part of the file for the whole. Nothing here
imports these packages: they are changed when the program imports them.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import random
import sys
from collections.abc import Callable
from typing import Any

from tfdist.cluster.first import on_chief_first
from tfdist.compat.patch import Patch, after_import

_log = logging.getLogger("tfdist")
# A dataset may be prepared for long: only its own process tells that it does not end.
_DAYS = 7 * 86400.0


@functools.cache
def prepare_in_turn() -> None:
    """Lets the processes of a host prepare one after another, from now on or from the import of the packages on.

    Each strategy asks for it, and the imports are watched once.
    """
    for patch in PATCHES:
        after_import(patch.package, functools.partial(_install, patch))


def _install(patch: Patch) -> None:
    try:
        patch.install()
    except RuntimeError as error:  # a program that imports it need not use it under tfdist
        _log.warning("%s Until then: with tfdist.on_chief_first(): ...", error)
        return
    # Others have imported the function under its name.
    new, old = patch.current(), patch.original()
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old and new is not old:
                setattr(module, name, new)


def _dataset(prepare: Callable) -> Callable:
    import numpy as np  # not before TensorFlow Datasets is imported

    @functools.wraps(prepare)
    def download_and_prepare(self: Any, **options: Any) -> Any:
        with on_chief_first(f"{self.info.full_name} in {self.data_dir}", self.data_dir_root, _DAYS):
            is_prepared = self.data_path.exists()
            # Preparing draws names of files, say. Initial weights must not depend on which process has prepared.
            python, numbers = random.getstate(), np.random.get_state()
            try:
                result = prepare.__get__(self)(**options)  # a wrapper of theirs looks at what it is bound to
            finally:
                random.setstate(python)
                np.random.set_state(numbers)
            if is_prepared and not self.info.splits:
                # It was made before another process had prepared the data.
                self.info.read_from_directory(self.data_dir)
            return result

    return download_and_prepare


def _file(get: Callable) -> Callable:
    signature = inspect.signature(get)

    @functools.wraps(get)
    def get_file(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        folder = os.path.expanduser(given.get("cache_dir") or os.environ.get("KERAS_HOME") or "~/.keras")
        name = os.path.join(folder, given.get("cache_subdir", ""), str(given.get("fname") or given.get("origin")))
        with on_chief_first(name, folder, _DAYS):
            return get(*args, **options)

    return get_file


def _preset(get: Callable) -> Callable:
    @functools.wraps(get)
    def get_file(preset: Any, path: Any) -> Any:
        with on_chief_first(f"{preset}/{path}", timeout=_DAYS):
            try:
                return get(preset, path)
            except FileNotFoundError as error:
                missing = error
        # An answer, not a failure: KerasHub asks in this way whether a preset has a file, and those who wait ask next.
        raise missing

    return get_file


PATCHES = [
    Patch(
        "tensorflow_datasets.core.dataset_builder:DatasetBuilder.download_and_prepare",
        _dataset,
        "tensorflow_datasets",
        "no upstream issue: TensorFlow Datasets asks for data to be prepared before several processes start",
    ),
    Patch(
        "keras.src.utils.file_utils:get_file",
        _file,
        "keras",
        "no upstream issue: Keras knows no other process",
    ),
    Patch(
        "keras_hub.src.utils.preset_utils:get_file",
        _preset,
        "keras_hub",
        "no upstream issue: KerasHub knows no other process",
    ),
]
