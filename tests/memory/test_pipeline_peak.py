"""What the devices of a pipeline hold at the peak of a step, where micro-batches keep what they need on the host."""

from __future__ import annotations

import functools

import pytest

from tests.memory.programs import printed_by

# What is kept where is looked at daily in tests/logical/test_pipeline_memory.py.
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(300)]

_DEADLINE = 280
_FEW, _MANY = 4, 8


@functools.cache
def peaks(microbatches: int) -> dict[str, dict[str, int]]:
    """Bytes by mode and device."""
    modes = ["none", "recompute", "recompute+swap", "swap"]
    return printed_by("pipeline_program", "gpipe", str(microbatches), *modes, deadline=_DEADLINE)


@pytest.mark.parametrize("stage", ["CPU:1", "CPU:2"])
def test_swapping_makes_a_stage_independent_of_the_number_of_micro_batches(stage):
    few, many = peaks(_FEW), peaks(_MANY)
    assert many["swap"][stage] < 1.15 * few["swap"][stage]
    assert many["swap"][stage] < 0.35 * many["none"][stage]
    # Without it, a stage keeps all micro-batches.
    assert many["none"][stage] > 1.9 * few["none"][stage]


def test_the_host_has_it_instead():
    more = peaks(_MANY)["swap"]["CPU:0"] - peaks(_FEW)["swap"]["CPU:0"]
    without = sum(peaks(_MANY)["none"][stage] - peaks(_FEW)["none"][stage] for stage in ("CPU:1", "CPU:2"))
    assert more > 0.8 * without
    assert peaks(_MANY)["recompute"]["CPU:0"] < 1000 < peaks(_MANY)["recompute+swap"]["CPU:0"]


def test_swapping_inputs_takes_less_than_keeping_inputs():
    # Of the first stage's inputs, which are cut from a batch, each counts as a whole one here.
    found = {mode: devices["CPU:2"] for mode, devices in peaks(_MANY).items()}
    assert found["recompute+swap"] < 0.9 * found["recompute"]
    assert found["recompute"] < 0.05 * found["none"]
