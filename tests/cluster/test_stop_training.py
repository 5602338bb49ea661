"""`model.stop_training` set on all processes, or on one: nobody is left behind in a step that others do not take."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.attempt import found_on
from tests.cluster.stops import DAILY, STEPS, STOPS, Stop, assert_same_end, build, fit, stops
from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]


@functools.cache
def results(daily: bool) -> list[dict[str, Any]]:
    names = DAILY if daily else tuple(STEPS)
    return run_local(stops, workers=2, args=("MultiWorkerMirroredStrategy", names), timeout=180)


@pytest.mark.parametrize("name", daily(STEPS, *DAILY))
def test_all_leave_after_the_same_step(name):
    assert_same_end(results(name in DAILY), name)


@pytest.mark.exhaustive
def test_who_does_not_stop_changes_nothing():
    weights = [found_on(results(False), 1, name)["weights"] for name in ("nobody", "other, later than it trains")]
    np.testing.assert_array_equal(*weights)


def test_all_that_stop_together_do_as_one_process_does():
    expected = fit(build(tf.distribute.get_strategy()), [Stop(*STOPS["all"][1:])])
    found = found_on(results(True), 0, "all")
    assert found["steps"] == expected["steps"] == 6
    np.testing.assert_allclose(found["weights"], expected["weights"], atol=1e-6)
    assert found["history"].keys() == expected["history"].keys()
    for metric, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][metric], values, atol=1e-6)
    # One step more shows.
    assert np.abs(found_on(results(True), 0, "chief")["weights"] - expected["weights"]).max() > 1e-4
