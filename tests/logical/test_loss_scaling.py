"""`mixed_float16` where gradients are near 65504, float16's largest number: which steps are left out."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
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


# Scale, rows of which y is -1, and whether a step is left out: in one process, and of two parts.
CASES = (
    # The mean over the rows is 98304: too large for the whole batch, while each of two parts is 49152.
    (98304.0, 8, True, True),
    # The parts are 49152 and -49152, if they have the size that they have in the whole batch.
    (98304.0, 4, False, False),
    # Of opposite signs: the mean is 0, and the parts are 65536 and -65536.
    (131072.0, 4, False, True),
)


def left_out(strategy: Any) -> list[bool]:
    """Which of these steps are left out."""
    rows = np.arange(8)[:, None]
    return [
        leaves_out(strategy, scale, np.where(rows < negative, -1.0, 1.0).astype("f")) for scale, negative, *_ in CASES
    ]


def test_overflow_is_that_of_the_batch(mirrored: Any) -> None:
    assert left_out(tf.distribute.get_strategy()) == [one_process for *_, one_process, _ in CASES]
    assert left_out(mirrored) == [two_parts for *_, two_parts in CASES]
