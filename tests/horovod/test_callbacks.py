"""Callbacks of tfdist over Horovod, as in tests/cluster: what runs where, and one set of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_on_chief import assert_logs, recorded
from tests.cluster.test_tensorboard import ROWS, Written, fit
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(230)]


def on_each(folder: Path) -> dict[str, Any]:
    """Runs on every process."""
    import tfdist

    strategy = tfdist.HorovodStrategy(start_timeout=60, peer_timeout=300)
    history = fit(strategy, folder)["history"]
    written = Written(strategy, folder)
    written.assert_metrics(history)
    written.assert_counts(ROWS, 1)
    return recorded(strategy)


def test_two_processes(tmp_path):
    chief, other = run_local(on_each, args=(tmp_path,), timeout=200)
    assert (chief["made"], other["made"], other["calls"]) == (1, 0, [])
    assert {"on_epoch_end 0", "on_epoch_end 1", "on_train_end ", "on_predict_end "} <= set(chief["calls"])
    assert other["history"] == chief["history"]
    assert_logs(chief)
