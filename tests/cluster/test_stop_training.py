"""`model.stop_training` set on all processes, or on one: nobody is left behind in a step that others do not take."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.attempt import found_on
from tests.cluster.stops import PATIENCE, STOPS, Stop, fit, stops
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

# Steps of the fit, where each epoch has 4 and the fit 12 without an end.
STEPS = {
    "all": 6,
    "chief": 7,
    "other": 7,
    "other, last batch of an epoch": 8,
    "other, end of an epoch": 8,
    "other, beginning of an epoch": 6,
    "chief, beginning of the fit": 1,
    "nobody": 12,
    "all, one of them late": 7,
    "nobody, again": 12,
}


@functools.cache
def results() -> list[dict[str, Any]]:
    return run_local(stops, workers=2, args=("MultiWorkerMirroredStrategy",), timeout=180)


@functools.cache
def one_process(name: str) -> dict[str, Any]:
    return fit(tf.distribute.get_strategy(), [Stop(*STOPS[name][1:])])


@pytest.mark.parametrize("name", STEPS)
def test_all_leave_after_the_same_step(name):
    one, other = (found_on(results(), rank, name) for rank in (0, 1))
    assert (one["steps"], other["steps"]) == (STEPS[name], STEPS[name])
    np.testing.assert_array_equal(one["weights"], other["weights"])


def test_all_that_stop_together_do_as_one_process_does():
    found, expected = found_on(results(), 0, "all"), one_process("all")
    assert found["steps"] == expected["steps"] == 6
    np.testing.assert_allclose(found["weights"], expected["weights"], atol=1e-6)
    assert found["history"].keys() == expected["history"].keys()
    for metric, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][metric], values, atol=1e-6)
    assert found["seconds"] < PATIENCE, "it has waited for processes that were there"
    # One step more shows.
    assert np.abs(found_on(results(), 0, "chief")["weights"] - expected["weights"]).max() > 1e-4
