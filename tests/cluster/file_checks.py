"""Checks of files on two processes: what each check returned, which files it wrote, and how long it took."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
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


class FileChecks:
    """The checks of one process, all in the same folder.

    Attributes:
        strategy: that of all processes.
        folder: the folder, the same on all processes.
        seen: what the checks returned, by name; what they wrote, by name and " writes"; "timings" and "pid".
    """

    def __init__(self, folder: str):
        import tfdist

        self.strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=40)
        self.folder = Path(folder)
        self.seen: dict[str, Any] = {"pid": os.getpid(), "timings": {}}
        self._writes = Writes(folder)
        self._inside = False

    def note(self, name: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Runs one check: every other one inside of the strategy's scope, as most scripts are written."""
        before, began = len(self._writes.paths), time.monotonic()
        is_of_strategy = self.strategy in arguments
        self._inside = is_of_strategy and not self._inside
        with self.strategy.scope() if self._inside else contextlib.nullcontext():
            self.seen[name] = attempt(name, function, *arguments)
        self.seen["timings"][name] = time.monotonic() - began
        self.seen[f"{name} writes"] = self._writes.paths[before:]


def on_two_processes(everything: Callable[[FileChecks], None]) -> list[dict[str, Any]]:
    """Returns what the processes have `seen`, by rank."""

    def run(folder: str) -> dict[str, Any]:
        checks = FileChecks(folder)
        everything(checks)
        return checks.seen

    with tempfile.TemporaryDirectory(prefix="tfdist-files-") as folder:
        return run_local(run, args=(folder,), timeout=DEADLINE)


def gap(first: list, second: list) -> float:
    assert len(first) == len(second)
    return max((float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(first, second, strict=True)))


def built(strategy: object, build: object = None) -> keras.Model:
    with strategy.scope():
        keras.utils.set_random_seed(7)
        build = build or mlp(layers.BatchNormalization, optimizer=lambda: keras.optimizers.Adam(0.01))
        return build()
