"""What the device holds in a step whose activations spend the time until the backward pass on the host."""

from __future__ import annotations

import functools

import pytest

from tests.memory.programs import printed_by

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(400)]

_DEADLINE = 180
_FEW, _MANY = 4, 16
# Of a block: rows and width of the program's model, in bytes.
_INPUT = 2048 * 64 * 4
# What a block makes and keeps: four results of the inner layer and the uniform numbers of Dropout, each four times as
# large as its input.
_INSIDE = 16 * _INPUT


@functools.cache
def peaks(blocks: int, kinds: tuple[str, ...] = ("none", "recompute+swap", "swap")) -> dict[str, dict[str, int]]:
    """Bytes of each kind, by device."""
    return printed_by("swap_program", str(blocks), *kinds, deadline=_DEADLINE)


def growth(kind: str, device: str, *kinds: tuple[str, ...]) -> int:
    """How many bytes more are held with many blocks than with few."""
    return peaks(_MANY, *kinds)[kind][device] - peaks(_FEW, *kinds)[kind][device]


@pytest.mark.parametrize("mode", ["recompute+swap", "swap"])
def test_the_device_needs_no_more_for_more_blocks(mode):
    many = peaks(_MANY)[mode]["CPU:1"]
    # What operations make that follow each other within a microsecond is counted as there together: in a block
    # these are a few. The inputs of twelve blocks, which "recompute" keeps, would be more.
    assert growth(mode, "CPU:1") <= _INSIDE / 2 < (_MANY - _FEW) * _INPUT
    assert many < 0.25 * peaks(_MANY)["none"]["CPU:1"]
    # Less than a block would mean that something is not counted.
    assert many > _INSIDE / 2


def test_the_host_has_it_instead():
    more_blocks = _MANY - _FEW
    assert more_blocks * _INPUT <= growth("recompute+swap", "CPU:0") <= 1.1 * more_blocks * _INPUT
    assert growth("swap", "CPU:0") > 0.9 * growth("none", "CPU:1")
    assert growth("none", "CPU:0") < _INPUT


def test_plain_training_needs_more_for_more_blocks():
    assert growth("none", "CPU:1") > 3 * peaks(_FEW)["swap"]["CPU:1"]


@pytest.mark.parametrize("mode", ["recompute+swap", "swap"])
def test_the_device_needs_more_if_all_is_fetched_at_once(mode):
    assert growth(f"{mode} at once", "CPU:1", ("recompute+swap at once", "swap at once")) > 0.5 * growth(mode, "CPU:0")
