"""Runs rows of the feature table one after the other on a process of a cluster: one start of TensorFlow for all."""

from __future__ import annotations

import traceback
import unittest
from pathlib import Path

import pytest
import tensorflow as tf

from tests.features import reference
from tests.features.table import FEATURES

# By row: the largest differences by name, why it was skipped, or the traceback.
Found = dict[str, dict[str, float] | str]


def run_rows(strategy: tf.distribute.Strategy, names: list[str], place: Path) -> Found:
    """Runs rows under a strategy.

    Args:
        strategy: the strategy.
        names: of the rows.
        place: where what one process computes is kept for other runs.
    """
    found: Found = {}
    for name in names:
        print("feature:", name, flush=True)
        try:
            with reference.remembered(name, place):
                found[name] = FEATURES[name](strategy)
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
