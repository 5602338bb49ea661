"""`Dataset.cache(path)` in several processes, and after one was killed.

TensorFlow writes a lock file beside the cache, and refuses to read the dataset where there is one: of another process,
which uses the same path, or of one that was killed and will never remove it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import logging
import os
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat.keras import hooks_of
from tfdist.compat.patch import Patch

_log = logging.getLogger("tfdist")
# What TensorFlow puts behind the path of a cache while it writes it. Another cache may be at "<path>_validation".
_LEFT = re.compile(r"_\d+\.(lockfile|.*\.tempstate\d+)")
# By path: a file that this process has locked as long as it lives.
_own: dict[str, int] = {}


def _cache_of_process(cache: Callable) -> Callable:
    @functools.wraps(cache)
    def with_own_file(self: Any, filename: Any = "", name: str | None = None) -> Any:
        if isinstance(filename, (str, os.PathLike)) and os.fspath(filename):
            filename = hooks_of(tf.distribute.get_strategy()).file_of_cache(os.fspath(filename))
            _take_over(filename)
        return cache(self, filename, name)

    return with_own_file


def _take_over(path: str) -> None:
    """Removes what a process that was killed has left of its cache, unless a living one has it."""
    if path in _own or "://" in path:
        return
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return  # TensorFlow says what is wrong with the path
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return
    _own[path] = lock
    for left in glob.glob(glob.escape(path) + "_*"):
        if _LEFT.fullmatch(left.removeprefix(path)):
            with contextlib.suppress(OSError):
                os.remove(left)
            _log.warning("Removed %s, which a process that was killed has left: the cache is written again.", left)


PATCHES = [
    Patch(
        "tensorflow.python.data.ops.dataset_ops:DatasetV2.cache",
        _cache_of_process,
        "tensorflow",
        "no upstream issue: a cache belongs to one process",
    ),
]
