"""`model.stop_training` set on one of two processes, under Horovod."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.cluster.attempt import found_on
from tests.cluster.stops import stops
from tests.cluster.test_stop_training import STEPS
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]


@functools.cache
def results() -> list[dict[str, Any]]:
    return run_local(stops, workers=2, args=("HorovodStrategy",), timeout=180)


@pytest.mark.parametrize("name", STEPS)
def test_all_leave_after_the_same_step(name):
    one, other = (found_on(results(), rank, name) for rank in (0, 1))
    assert (one["steps"], other["steps"]) == (STEPS[name], STEPS[name])
    np.testing.assert_array_equal(one["weights"], other["weights"])
