"""What one process computes for a row of the feature table: the same for every strategy, so it is computed once.

Every test run computes it anew; within one, the tables of the other strategies read what the first one has written.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
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

    path = place / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.pickle"
    known = pickle.loads(path.read_bytes()) if path.exists() else []
    computed: list[dict[str, np.ndarray]] = []
    original = transparency.train_and_observe

    def train_and_observe(strategy: Any, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        if strategy is not tf.distribute.get_strategy():
            return original(strategy, *args, **kwargs)
        computed.append(known[len(computed)] if len(computed) < len(known) else original(strategy, *args, **kwargs))
        return computed[-1]

    with mock.patch.object(transparency, "train_and_observe", train_and_observe):
        yield
    if not known:
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(pickle.dumps(computed))
        partial.replace(path)


@contextlib.contextmanager
def only_fit() -> Iterator[None]:
    """Within the block, `evaluate` and `predict` do nothing: tracing them takes as long as `fit`."""
    results = {"evaluate": lambda *_, **__: {}, "predict": lambda *_, **__: []}
    with mock.patch.multiple("keras.Model", **results):
        yield
