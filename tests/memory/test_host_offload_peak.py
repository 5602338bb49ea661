"""What the device holds in a step of a model whose weights are on the host, followed through a traced run."""

from __future__ import annotations

import functools

import pytest

from tests.memory.programs import printed_by

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(400)]

_DEADLINE = 180
_FEW, _MANY = 4, 16
_WEIGHTS_OF_A_LAYER = 256 * 256 * 4


@functools.cache
def measured(depth: int, *ways: str) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes of each way to train, by step and device."""
    return printed_by("host_offload_program", str(depth), *(ways or ("offload", "plain")), deadline=_DEADLINE)


@pytest.mark.parametrize("step", ["train_step", "test_step"])
def test_the_device_needs_no_more_for_more_layers(step):
    few, many = (measured(depth)["offload"][f"{step} CPU:1"] for depth in (_FEW, _MANY))
    assert many["peak"] <= 1.15 * few["peak"]
    # There are two layers' weights at a time, one that is used and one that comes, and in training gradients as well.
    assert many["peak"] > 2 * _WEIGHTS_OF_A_LAYER
    assert many["peak"] < (8 if step == "train_step" else 4) * _WEIGHTS_OF_A_LAYER


def test_weights_and_slots_are_on_the_host():
    few, many = (measured(depth)["offload"] for depth in (_FEW, _MANY))
    for step in ("train_step", "test_step"):
        assert many[f"{step} CPU:1"]["resident"] < 0.01 * _WEIGHTS_OF_A_LAYER
    more = many["train_step CPU:0"]["resident"] - few["train_step CPU:0"]["resident"]
    assert more >= (_MANY - _FEW) * _WEIGHTS_OF_A_LAYER


def test_plain_training_needs_more_for_more_layers():
    few, many = (measured(depth)["plain"]["train_step CPU:1"] for depth in (_FEW, _MANY))
    assert many["peak"] > 2 * few["peak"]
    assert many["resident"] - few["resident"] >= (_MANY - _FEW) * _WEIGHTS_OF_A_LAYER


def test_the_device_needs_more_if_weights_do_not_wait():
    few, many = (measured(depth, "all at once")["all at once"]["test_step CPU:1"] for depth in (_FEW, _MANY))
    assert many["peak"] - few["peak"] >= (_MANY - _FEW - 1) * _WEIGHTS_OF_A_LAYER
