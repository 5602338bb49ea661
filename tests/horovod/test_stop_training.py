"""`model.stop_training` set on one of two processes, under Horovod."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.cluster.stops import DAILY, STEPS, assert_same_end, stops
from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]


@functools.cache
def results(daily: bool) -> list[dict[str, Any]]:
    return run_local(stops, workers=2, args=("HorovodStrategy", DAILY if daily else tuple(STEPS)), timeout=180)


@pytest.mark.parametrize("name", daily(STEPS, *DAILY))
def test_all_leave_after_the_same_step(name):
    assert_same_end(results(name in DAILY), name)
