"""`tfdist.callbacks.on_chief` over Horovod: what runs, and where, as in tests/cluster/test_on_chief.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.test_on_chief import recorded
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.exhaustive, pytest.mark.timeout(180)]


def on_each() -> dict[str, Any]:
    """Runs on every process."""
    import tfdist

    return recorded(tfdist.HorovodStrategy(start_timeout=60, peer_timeout=60))


def test_the_first_process_has_the_callback():
    chief, other = run_local(on_each, workers=2, timeout=150)
    assert (chief["made"], other["made"], other["calls"]) == (1, 0, [])
    assert {"on_epoch_end 0", "on_epoch_end 1", "on_train_end ", "on_predict_end "} <= set(chief["calls"])
    assert other["history"] == chief["history"]
    for name, values in chief["history"].items():
        assert [epoch[name] for epoch in chief["epochs"][:2]] == values
