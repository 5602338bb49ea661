"""What a report estimates, against what TensorFlow's allocator counts in real steps."""

from __future__ import annotations

import statistics

import pytest

from tests.memory.programs import printed_by

# Peaks depend on the order in which TensorFlow computes.
pytestmark = [pytest.mark.slow, pytest.mark.timing, pytest.mark.timeout(920)]

_DEADLINE = 900
_MODELS = ("blocks", "resnet", "transformer")


def test_what_is_estimated_is_near_what_is_measured():
    found = printed_by("report_program", *_MODELS, deadline=_DEADLINE)
    steps = [step for policies in found.values() for step in policies.values()]
    ratios = [(step["rest"] + step["step"]) / (step["rest"] + step["measured"]) for step in steps]
    # The order of TensorFlow's executor differs from run to run, and with it the peak: by up to a tenth, and on a busy
    # machine once by a third for one of the models.
    assert [ratio for ratio in ratios if not 0.65 < ratio < 1.35] == []
    assert 0.9 < statistics.median(ratios) < 1.1
    for policies in found.values():
        # A report that did not look at the policy would be far off.
        assert policies["recompute"]["measured"] < 0.9 * policies["none"]["measured"]
        assert policies["recompute"]["step"] < 0.75 * policies["none"]["step"]
