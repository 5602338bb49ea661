"""Every row of the feature table, on two processes, and on two processes with two devices each."""

from __future__ import annotations

import functools
import traceback
import unittest
from pathlib import Path

import pytest

from tests.features import reference
from tests.features.table import FEATURES
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

# One start of TensorFlow for the whole table, and one deadline for all of its rows.
_DEADLINE = 540


def whole_table(names: list[str], devices: int, place: Path) -> dict[str, dict[str, float] | str]:
    """Runs on every process: the largest differences, or the traceback, of every row."""
    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=60)
    assert strategy.num_replicas_in_sync == 2 * devices
    results: dict[str, dict[str, float] | str] = {}
    for name in names:
        print("feature:", name, flush=True)
        try:
            with reference.remembered(name, place):
                results[name] = FEATURES[name](strategy)
        except unittest.SkipTest as reason:
            results[name] = f"skipped: {reason}"
        except Exception:
            results[name] = traceback.format_exc()
    return results


@functools.cache
def results(devices: int) -> list[dict[str, dict[str, float] | str]]:
    return run_local(
        whole_table,
        workers=2,
        devices_per_worker=devices,
        timeout=_DEADLINE,
        args=(list(FEATURES), devices, reference.folder()),
    )


@pytest.mark.timeout(_DEADLINE + 60)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", FEATURES)
def test_equals_one_process(name, devices):
    for rank, table in enumerate(results(devices)):
        if str(table[name]).startswith("skipped"):
            pytest.skip(table[name])
        assert isinstance(table[name], dict), f"rank {rank}: {table[name]}"
        assert table[name], f"rank {rank}: nothing was compared"
