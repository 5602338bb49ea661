"""An optimizer that a `train_step` applies in a branch: two replicas equal one process, or are refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.branching_steps import DECISIONS, KINDS, Loops, X, Y, train
from tests.models import in_scope, ready, warned
from tests.tiers import daily


@pytest.mark.parametrize(
    "name", daily(KINDS, "LeavesOut", "DrawsInBranch", "a whole number of a mean", "how many rows")
)
def test_equals_one_process(mirrored, name):
    if name == "DrawsInBranch":
        keras.utils.clear_session()  # as k-folds do: Keras replaces what it keeps of a thread
    expected = train(tf.distribute.get_strategy(), name)
    np.testing.assert_allclose(train(mirrored, name), expected, atol=2e-6)
    if name.startswith(("LeavesOut", "Returns")):
        assert expected[-1] == 10  # of 12 batches
    if name in DECISIONS:
        assert 0 < expected[-1] < 12


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Accumulates", "LeavesOut"])
def test_one_replica(name):
    """The first thing that people try: a script of several GPUs on one, where nothing has to meet."""
    expected = train(tf.distribute.get_strategy(), name)
    np.testing.assert_allclose(train(tfdist.MirroredStrategy(["CPU:0"]), name), expected, atol=2e-6)


def test_a_loop_is_refused(mirrored):
    model = in_scope(mirrored, lambda: ready(Loops(), keras.optimizers.SGD(0.1), "mse"))
    with pytest.raises(NotImplementedError, match=r"Received: a loop .*Expected: a loop of Python, `for _ in range"):
        model.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.nightly
def test_one_warning_for_all_accumulators(mirrored):
    (message,) = warned(lambda: train(mirrored, "Accumulates"), "which each replica updates")
    assert "(and 1 like it)" in message
