"""`mixed_float16` where gradients are near 65504, float16's largest number: which steps are left out."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf


def leaves_out(strategy: Any, scale: float, y: np.ndarray) -> bool:
    """Whether a step is left out whose gradients are `scale` in each row of which y is -1, and its negative for 1."""
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="mixed_float16")
        model = keras.Sequential([keras.Input((1,)), dense])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=scale)
        model.compile(optimizer, keras.losses.MeanAbsoluteError())
    model.train_on_batch(np.ones_like(y), y)
    after = float(np.asarray(optimizer.dynamic_scale))
    assert after in (scale, scale / 2)
    return after < scale


@pytest.mark.parametrize(
    ("scale", "negative", "one_process", "two_replicas"),
    [
        # The mean over the rows is 98304: too large for the whole batch, while each of two parts is 49152.
        (98304.0, 8, True, False),
        # Of opposite signs: the mean is 0, and the parts are 65536 and -65536.
        (131072.0, 4, False, True),
    ],
)
def test_overflow_is_that_of_each_replicas_part(
    mirrored: Any, scale: float, negative: int, one_process: bool, two_replicas: bool
) -> None:
    y = np.where(np.arange(8) < negative, -1.0, 1.0).astype("f")[:, None]
    assert leaves_out(tf.distribute.get_strategy(), scale, y) == one_process
    assert leaves_out(mirrored, scale, y) == two_replicas
