"""Custom training loops on two devices equal one; the same loop on processes: tests/cluster/test_as_one_process.py."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.own_loops import masks, train
from tests.tiers import daily


@pytest.mark.parametrize(
    ("optimizer", "compiled"),
    [
        *(("clipnorm", True), ("loss scaling alone", True)),
        *daily([("global_clipnorm", True), ("loss scaling", True), ("Adam", False)]),
    ],
)
def test_equals_one_device(mirrored, optimizer, compiled):
    expected = train(tf.distribute.get_strategy(), optimizer, compiled=True)
    np.testing.assert_allclose(train(mirrored, optimizer, compiled), expected, atol=2e-6)


@pytest.mark.nightly
def test_clipping_is_noticed():
    """The negative control: `tf.distribute` alone clips what each replica has."""
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    expected = train(tf.distribute.get_strategy(), "clipnorm", compiled=True)
    assert not np.allclose(train(stock, "clipnorm", compiled=True), expected, atol=2e-6)


@pytest.mark.parametrize("compiled", [True, False])
def test_replicas_drop_other_rows(mirrored, compiled):
    first, second = masks(mirrored, compiled)
    assert first != second
    assert first == masks(tf.distribute.get_strategy(), compiled)[0], "replica 0 draws what one process draws"
