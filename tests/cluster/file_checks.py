"""Sections of tests of files on two processes, all in one folder; each asserts what it is about."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.cluster.attempt import attempt
from tests.cluster.writes import Writes
from tests.features.table import mlp
from tfdist.testing import run_local

DEADLINE = 200


def on_two_processes(*sections: Callable[[Any, Path, Writes], Any]) -> list[dict[str, Any]]:
    """What the sections return, by rank and name: every other one runs inside of the strategy's scope, as most scripts.

    Args:
        sections: take the strategy, a folder of their own, and what notes the files that this process writes there.
    """

    def run(folder: str) -> dict[str, Any]:
        import tfdist

        strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=300)
        writes, found = Writes(folder), {}
        for turn, section in enumerate(sections):
            own = Path(folder, section.__name__)
            own.mkdir(exist_ok=True)
            writes.paths.clear()
            with contextlib.nullcontext() if turn % 2 else strategy.scope():
                found[section.__name__] = attempt(section.__name__, section, strategy, own, writes)
        return found

    with tempfile.TemporaryDirectory(prefix="tfdist-files-") as folder:
        return run_local(run, args=(folder,), timeout=DEADLINE)


def gap(first: list, second: list) -> float:
    assert len(first) == len(second)
    return max((float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(first, second, strict=True)))


def built(strategy: Any, build: Callable[[], keras.Model] | None = None) -> keras.Model:
    """The same model each time, of a strategy or of none."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(7)
        build = build or mlp(layers.BatchNormalization, optimizer=lambda: keras.optimizers.Adam(0.01))
        return build()
