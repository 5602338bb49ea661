"""Scripts that do everything inside of `strategy.scope()`, as most tutorials: each reading is local, and the same."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.cluster.attempt import found_on
from tests.cluster.readings import READINGS
from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

STRATEGIES = ("MultiWorkerMirroredStrategy", "HorovodStrategy")


def read_everywhere(strategy_name: str) -> dict[str, dict[str, Any]]:
    """Runs on every process. Only rank 0 reads while the others wait: no reading may need them."""
    import keras

    import tfdist
    from tests.cluster.readings import readings, trained

    strategy = getattr(tfdist, strategy_name)(start_timeout=60, peer_timeout=60)
    alone = readings(trained())
    keras.utils.clear_session()  # names without a counter
    with strategy.scope():
        model = trained()
        inside = readings(model) if strategy.is_chief else {}
    outside = readings(model) if strategy.is_chief else {}
    strategy._peers.gather("test", None, "read")
    return {"alone": alone, "inside": inside, "outside": outside}


@functools.cache
def results(strategy_name: str) -> dict[str, dict[str, Any]]:
    return run_local(read_everywhere, args=(strategy_name,), timeout=150)[0]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", daily(STRATEGIES, "MultiWorkerMirroredStrategy"))
@pytest.mark.parametrize("name", READINGS)
def test_reading_is_local_and_the_same_inside_and_outside(strategy, name):
    alone, inside, outside = (found_on([results(strategy)[where]], 0, name) for where in ("alone", "inside", "outside"))
    assert inside == outside
    if isinstance(alone, str):
        assert inside == alone
        return
    assert [np.shape(value) for value in inside] == [np.shape(value) for value in alone]
    for value, expected in zip(inside, alone, strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-5)
