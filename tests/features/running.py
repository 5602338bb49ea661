"""Runs rows of the feature table one after the other on a process of a cluster: one start of TensorFlow for all."""

from __future__ import annotations

import contextlib
import functools
import traceback
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import pytest
import tensorflow as tf

from tests.features import reference
from tests.features.selection import WHOLE
from tests.features.table import FEATURES
from tests.models import in_scope

# By row: the largest differences by name, why it was skipped, or the traceback.
Found = dict[str, dict[str, float] | str]


# What people call inside of the scope as well as outside.
_METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch", "reset_metrics")


@contextlib.contextmanager
def inside_scope() -> Iterator[None]:
    """Within the block, models are trained, evaluated and asked for predictions in their strategy's scope."""

    def within(method: Callable) -> Callable:
        @functools.wraps(method)
        def called(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            return in_scope(model.distribute_strategy, lambda: method(model, *args, **kwargs))

        return called

    with mock.patch.multiple(keras.Model, **{name: within(getattr(keras.Model, name)) for name in _METHODS}):
        yield


def differences_of(strategy: tf.distribute.Strategy, name: str, place: Path, turn: int = 0) -> dict[str, float]:
    """What a row finds. Every other row trains inside of the scope; with a `turn` of 1, those that with 0 do not.

    Args:
        strategy: the strategy.
        name: of the row.
        place: where what one process computes is kept for other runs.
        turn: 0 or 1.
    """
    with contextlib.ExitStack() as within:
        if name not in WHOLE:
            within.enter_context(reference.only_fit())
        within.enter_context(reference.remembered(name, place))
        if (list(FEATURES).index(name) + turn) % 2 == 0:
            within.enter_context(inside_scope())
        return FEATURES[name](strategy)


def run_rows(strategy: tf.distribute.Strategy, names: list[str], place: Path, turn: int = 0) -> Found:
    """Runs rows under a strategy.

    Args:
        strategy: the strategy.
        names: of the rows.
        place: where what one process computes is kept for other runs.
        turn: see `differences_of`.
    """
    found: Found = {}
    for name in names:
        print("feature:", name, flush=True)
        try:
            found[name] = differences_of(strategy, name, place, turn)
        except unittest.SkipTest as reason:
            found[name] = f"skipped: {reason}"
        except Exception:
            found[name] = traceback.format_exc()
    return found


def gaps_of(found: Found, name: str, rank: int = 0) -> dict[str, float]:
    """The differences of a row; fails, or skips, with the reason if nothing was compared."""
    gaps = found[name]
    if str(gaps).startswith("skipped"):
        pytest.skip(str(gaps))
    assert isinstance(gaps, dict), f"rank {rank}: {gaps}"
    assert gaps, f"rank {rank}: nothing was compared"
    return gaps
