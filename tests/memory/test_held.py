"""What devices hold in a step whose activations or weights are on the host, followed through a traced run."""

from __future__ import annotations

import functools

import pytest

from tests.memory.programs import printed_by

# What is kept where is looked at daily in tests/logical. Peaks depend on the order in which TensorFlow computes.
pytestmark = [pytest.mark.slow, pytest.mark.timing, pytest.mark.timeout(1820)]

_FEW, _MANY = 4, 12
# Of a block: rows and width of the program's model, in bytes.
_INPUT = 2048 * 64 * 4
# What a block makes and keeps: four results of the inner layer and the uniform numbers of Dropout, each four times as
# large as its input.
_INSIDE = 16 * _INPUT
_WEIGHTS_OF_A_LAYER = 256 * 256 * 4


@functools.cache
def held(where: str, count: int, *modes: str) -> dict[str, dict[str, list[int]]]:
    """Bytes at the peak, and all the time, by mode and device."""
    return printed_by("held_program", where, str(count), *modes, deadline=900)


def test_swapping_makes_the_device_independent_of_the_number_of_blocks():
    few, many = (held("swap", count, "none", "recompute+swap", "swap") for count in (_FEW, _MANY))
    growth = {mode: {place: many[mode][place][0] - few[mode][place][0] for place in few[mode]} for mode in few}
    more_blocks = _MANY - _FEW
    for mode in ("recompute+swap", "swap"):
        # What operations make that follow each other within a microsecond is counted as there together: in a block
        # these are a few. The inputs of more blocks, which "recompute" keeps, would be more.
        assert growth[mode]["CPU:1"] <= _INSIDE / 2 <= more_blocks * _INPUT
        # Less than a block would mean that something is not counted.
        assert _INSIDE / 2 < many[mode]["CPU:1"][0] < 0.3 * many["none"]["CPU:1"][0]
    # The host has it instead.
    assert more_blocks * _INPUT <= growth["recompute+swap"]["CPU:0"] <= 1.1 * more_blocks * _INPUT
    assert growth["swap"]["CPU:0"] > 0.9 * growth["none"]["CPU:1"]
    assert growth["none"]["CPU:0"] < _INPUT
    assert growth["none"]["CPU:1"] > 2 * few["swap"]["CPU:1"][0]


def test_swapping_makes_a_stage_independent_of_the_number_of_micro_batches():
    modes = ["none", "recompute", "recompute+swap", "swap"]
    few, many = (held("pipeline", count, *modes) for count in (4, 8))
    for stage in ("CPU:1", "CPU:2"):
        assert many["swap"][stage][0] < 1.15 * few["swap"][stage][0]
        assert many["swap"][stage][0] < 0.35 * many["none"][stage][0]
        # Without it, a stage keeps all micro-batches.
        assert many["none"][stage][0] > 1.9 * few["none"][stage][0]
    more = many["swap"]["CPU:0"][0] - few["swap"]["CPU:0"][0]
    assert more > 0.8 * sum(many["none"][stage][0] - few["none"][stage][0] for stage in ("CPU:1", "CPU:2"))
    assert many["recompute"]["CPU:0"][0] < 1000 < many["recompute+swap"]["CPU:0"][0]
    # Of the first stage's inputs, which are cut from a batch, each counts as a whole one here.
    last = {mode: many[mode]["CPU:2"][0] for mode in modes}
    assert last["recompute+swap"] < 0.9 * last["recompute"]
    assert last["recompute"] < 0.05 * last["none"]


def test_a_device_needs_no_more_for_more_layers_if_weights_are_on_the_host():
    few, many = (held("offload", count, "stream", "none") for count in (_FEW, _MANY))
    peak, resident = many["stream"]["CPU:1"]
    assert peak <= 1.15 * few["stream"]["CPU:1"][0]
    # There are two layers' weights at a time, one that is used and one that comes, and gradients.
    assert 2 * _WEIGHTS_OF_A_LAYER < peak < 8 * _WEIGHTS_OF_A_LAYER
    assert resident < 0.01 * _WEIGHTS_OF_A_LAYER
    more = (_MANY - _FEW) * _WEIGHTS_OF_A_LAYER
    assert many["stream"]["CPU:0"][1] - few["stream"]["CPU:0"][1] >= more
    assert many["none"]["CPU:1"][1] - few["none"]["CPU:1"][1] >= more
    assert many["none"]["CPU:1"][0] > 2 * few["none"]["CPU:1"][0]
