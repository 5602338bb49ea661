"""Custom training loops on two devices equal one; the same loop on processes: tests/cluster/test_as_one_process.py."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.own_loops import counted, drawn, made_on_replicas, masks, train
from tests.tiers import daily


@pytest.mark.parametrize(
    ("optimizer", "compiled"),
    [
        *(("clipnorm", True), ("loss scaling alone", True)),
        *daily([("global_clipnorm", True), ("loss scaling", True), ("Adam", False), ("accumulation", True)]),
        *daily([("EMA", True), ("accumulation", False), ("loss scaling", False)]),
        *daily([("EMA", False)]),
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


@pytest.mark.parametrize("compiled", [True, False])
def test_numbers_without_a_seed(mirrored, compiled):
    first, second, afterwards = drawn(mirrored, compiled)
    expected = drawn(tf.distribute.get_strategy(), compiled)
    assert [first[:1], second[:1], afterwards] == expected, "replica 0 draws what one process draws"
    assert first[0] != first[1] and second[0] != second[1]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_layer_that_a_step_makes(mirrored, compiled):
    expected = made_on_replicas(tf.distribute.get_strategy(), compiled)
    assert expected == ["bfloat16", "outer/dense_1/kernel", "dense_2"]
    assert made_on_replicas(mirrored, compiled) == expected
    # The negative control: in the threads of replicas Keras knows nothing of the program's.
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert made_on_replicas(stock, compiled) == ["float32", "dense/kernel", "dense_1"]


@pytest.mark.parametrize("is_argument", [True, False])
def test_a_loop_in_a_function(mirrored, is_argument):
    """As in TensorFlow's tutorial on custom training: the function is given the distributed dataset."""
    assert counted(mirrored, is_argument) == counted(tf.distribute.get_strategy(), is_argument)
