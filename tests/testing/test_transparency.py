"""`differences` and `assert_transparent`: what is found, and how it is told."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.testing import run_local


class TestDifferences:
    def test_largest_by_name(self):
        from tfdist.testing import differences

        expected = {"a": np.array([1.0, 2.0]), "b": np.array(3.0), "gone": np.zeros(1), "shape": np.zeros(2)}
        received = {"a": np.array([1.5, 1.0]), "b": np.array(np.nan), "new": np.zeros(1), "shape": np.zeros(3)}
        inf = float("inf")
        assert differences(expected, received) == {"a": 1.0, "b": inf, "gone": inf, "new": inf, "shape": inf}

    @pytest.mark.filterwarnings("ignore:invalid value encountered")
    def test_equal_infinities_do_not_count_as_equal(self):
        from tfdist.testing import differences

        assert differences({"a": np.array(np.inf)}, {"a": np.array(np.inf)}) == {"a": float("inf")}


def transparency() -> tuple[dict, str]:
    """What `assert_transparent` returns for a right strategy, and its message for a model that is not."""
    import keras
    import tensorflow as tf

    from tests.features.table import mlp, rows
    from tfdist.testing import assert_transparent

    one = tf.distribute.get_strategy()
    gaps = assert_transparent(one, mlp(), rows(32), batch_size=16)
    calls = []

    def drifting() -> keras.Model:
        calls.append(None)
        return mlp(optimizer=lambda: keras.optimizers.SGD(0.1 * len(calls)))()

    try:
        assert_transparent(lambda: one, drifting, rows(32), batch_size=16)
    except AssertionError as error:
        return gaps, str(error)
    return gaps, "no error"


@pytest.mark.cluster
def test_assert_transparent():
    ((gaps, message),) = run_local(transparency, 1)
    assert set(gaps.values()) == {0.0}
    assert {"history 0", "evaluate 0", "predict 0", "weight 0", "optimizer iterations"} <= set(gaps)
    first, *listing = message.splitlines()
    assert first == (
        "_DefaultDistributionStrategy with 1 replicas does not equal one process. "
        "Largest absolute differences (tolerance 1e-05):"
    )
    sizes = [float(line.rpartition(": ")[2]) for line in listing]
    assert sizes == sorted(sizes, reverse=True) and min(sizes) > 1e-5
    assert any(line.startswith("  weight 0 (") and "kernel" in line for line in listing)
