"""`model.stop_training` set on one of two processes, under Horovod."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.cluster.stops import STEPS, assert_same_end, stops
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]


@functools.cache
def results() -> list[dict[str, Any]]:
    return run_local(stops, workers=2, args=("HorovodStrategy", tuple(STEPS)), timeout=180)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.exhaustive
def test_all_leave_after_the_same_step(name):
    assert_same_end(results(), name)
