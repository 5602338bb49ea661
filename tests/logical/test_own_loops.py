"""Custom training loops on two devices equal one; the same loop on processes: tests/cluster/test_own_loops.py."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.own_loops import OPTIMIZERS, masks, train
from tests.tiers import daily


@pytest.mark.parametrize("compiled", daily([True, False], "True"))
@pytest.mark.parametrize("optimizer", daily(OPTIMIZERS, "clipnorm"))
def test_equals_one_device(mirrored, optimizer, compiled):
    expected = train(tf.distribute.get_strategy(), optimizer, compiled=True)
    np.testing.assert_allclose(train(mirrored, optimizer, compiled), expected, atol=2e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["SGD", "clipnorm"])
def test_clipping_is_noticed(optimizer):
    """The negative control: `tf.distribute` alone clips what each replica has."""
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    expected = train(tf.distribute.get_strategy(), optimizer, compiled=True)
    equal = np.allclose(train(stock, optimizer, compiled=True), expected, atol=2e-6)
    assert equal == (optimizer == "SGD")


@pytest.mark.parametrize("compiled", [True, False])
def test_replicas_drop_other_rows(mirrored, compiled):
    first, second = masks(mirrored, compiled)
    assert first != second
    assert first == masks(tf.distribute.get_strategy(), compiled)[0], "replica 0 draws what one process draws"
