"""`mixed_float16` where gradients are near 65504, float16's largest number: which steps are left out."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.tiers import daily
from tfdist.optimizers import ShardedOptimizer, sharded_optimizer


def leaves_out(strategy: Any, scale: float, y: np.ndarray, sharded: bool = False) -> bool:
    """Whether a step is left out whose gradients are `scale` in each row of which y is -1, and its negative for 1."""
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="mixed_float16")
        model = keras.Sequential([keras.Input((32,)), dense])
        inner = keras.optimizers.SGD(0.0)
        optimizer = keras.optimizers.LossScaleOptimizer(ShardedOptimizer(inner) if sharded else inner, scale)
        model.compile(optimizer, keras.losses.MeanAbsoluteError())
    # All gradients are 0 but that of the last weight: it is in the part of the last replica, if each has a part.
    model.train_on_batch(np.pad(np.ones_like(y), [[0, 0], [31, 0]]), y)
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


def left_out(strategy: Any, sharded: bool = False) -> list[bool]:
    """Which of these steps are left out."""
    rows = np.arange(8)[:, None]
    signs = [np.where(rows < negative, -1.0, 1.0).astype("f") for _, negative, *_ in CASES]
    return [leaves_out(strategy, scale, y, sharded) for (scale, *_), y in zip(CASES, signs, strict=True)]


@pytest.mark.parametrize("sharded", daily([False, True], "False"))
def test_overflow_is_that_of_the_batch(mirrored: Any, sharded: bool) -> None:
    assert left_out(tf.distribute.get_strategy(), sharded) == [one_process for *_, one_process, _ in CASES]
    assert left_out(mirrored, sharded) == [two_parts for *_, two_parts in CASES]


@pytest.mark.nightly
def test_each_replica_for_itself(mirrored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the first replica decides, and sees its own part only."""
    monkeypatch.setattr(sharded_optimizer, "are_finite", lambda check, grads: check(grads))
    assert left_out(mirrored, sharded=True) == [False] * len(CASES)
