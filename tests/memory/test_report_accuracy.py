"""What a report estimates, against what TensorFlow's allocator counts in real steps."""

from __future__ import annotations

import functools
import statistics

import pytest

from tests.memory.programs import printed_by

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(280)]

_DEADLINE = 260
_MODELS = ("blocks", "dense", "resnet", "transformer", "written", "unet")


@functools.cache
def found() -> dict[str, dict[str, dict[str, int]]]:
    """Bytes by model and policy."""
    return printed_by("report_program", *_MODELS, deadline=_DEADLINE)


def test_what_is_estimated_is_near_what_is_measured():
    ratios = {
        (model, policy): values["total"] / values["measured total"]
        for model, policies in found().items()
        for policy, values in policies.items()
    }
    # The order of TensorFlow's executor differs from run to run, and with it the peak: by up to a tenth, and on a busy
    # machine once by a third for one of the models.
    assert {key: ratio for key, ratio in ratios.items() if not 0.65 < ratio < 1.35} == {}
    assert sorted(abs(ratio - 1) for ratio in ratios.values())[len(ratios) * 3 // 4] < 0.15
    assert 0.9 < statistics.median(ratios.values()) < 1.1


@pytest.mark.parametrize("model", _MODELS)
def test_it_tells_what_a_policy_saves(model):
    plain, recomputed = found()[model]["none"], found()[model]["recompute"]
    # A report that did not look at the policy would be far off.
    assert recomputed["least step"] < 0.9 * plain["least step"]
    assert recomputed["step"] < 0.75 * plain["step"]


@pytest.mark.parametrize("model", _MODELS)
def test_measuring_changes_no_weights(model):
    assert not any(values["changed"] for values in found()[model].values())
