"""Metrics whose state is set outside of a step hold what they were given."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfdist
from tests import metric_sums


@pytest.mark.parametrize("name", metric_sums.WAYS)
def test_no_count_is_lost(mirrored, name, tmp_path):
    metric_sums.read_back(mirrored, name, tmp_path)


def test_a_metric_of_keras_that_a_callback_fills(four_devices):
    strategy = tfdist.MirroredStrategy(four_devices[:3])
    expected = metric_sums.iou_of_a_callback(tf.distribute.get_strategy())
    assert metric_sums.iou_of_a_callback(strategy) == expected == pytest.approx((7 / 8 + 3 / 4) / 2)
