"""What one process computes for a row of the feature table: the same for every strategy, so it is computed once.

Every test run computes it anew; within one, the tables of the other strategies read what the first one has written.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import itertools
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

# Set in the process that starts the test run, and found by those that share its tests.
_VARIABLE = "TESTS_REFERENCE_FOLDER"


def folder() -> Path:
    """A folder of this test run, removed when it ends."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="tfdist-reference-")
        atexit.register(shutil.rmtree, os.environ[_VARIABLE], ignore_errors=True)
    return Path(os.environ[_VARIABLE])


@contextlib.contextmanager
def remembered(name: str, place: Path) -> Iterator[None]:
    """Within the block, trainings without a strategy are read from `place`, or computed and written there."""
    import tensorflow as tf

    from tfdist.testing import transparency

    numbers = itertools.count()
    original = transparency.train_and_observe

    def train_and_observe(strategy: Any, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        if strategy is not tf.distribute.get_strategy():
            return original(strategy, *args, **kwargs)
        path = place / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}-{next(numbers)}.pickle"
        with path.open("ab+") as file:
            # Who comes while another one computes it waits.
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.seek(0, os.SEEK_END) == 0:
                pickle.dump(original(strategy, *args, **kwargs), file)
                file.flush()
            file.seek(0)
            return pickle.load(file)

    with mock.patch.object(transparency, "train_and_observe", train_and_observe):
        yield


@contextlib.contextmanager
def only_fit() -> Iterator[None]:
    """Within the block, `evaluate` and `predict` do nothing: tracing them takes as long as `fit`."""
    results = {"evaluate": lambda *_, **__: {}, "predict": lambda *_, **__: []}
    with mock.patch.multiple("keras.Model", **results):
        yield
