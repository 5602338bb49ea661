"""Which gradients travel together, and in which order."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.steps import gradients
from tfdist.steps.gradients import GradientOptions, all_reduce_sum

MEGABYTE = 1 << 20


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each sum, in their order; every replica sends the same, as if there were three."""
    found: list[int] = []

    def all_reduce(value: tf.Tensor, differentiable: bool = True) -> tf.Tensor:
        found.append(int(tf.size(value)) * value.dtype.size)
        return 3 * value

    monkeypatch.setattr(gradients, "all_reduce", all_reduce)
    return found


def values(*sizes: int, dtype: str = "float32") -> list[tf.Tensor]:
    """Tensors of so many kilobytes."""
    width = tf.as_dtype(dtype).size
    return [tf.fill([size * 1024 // width], tf.cast(i + 1, dtype)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("bucket", "sizes", "expected"),
    [
        (None, [2048, 2048, 2048], [6144]),
        (6 * MEGABYTE, [2048, 2048, 2048], [6144]),
        # The first of several is small; a single tensor may be larger than a bucket.
        (5 * MEGABYTE, [2048, 2048, 2048], [2048, 4096]),
        (3 * MEGABYTE, [512, 4096, 1024, 512, 256], [768, 1024, 4096, 512]),
        (1, [1, 2, 3], [3, 2, 1]),
    ],
)
def test_buckets_begin_with_the_last(
    bucket: int | None, sizes: list[int], expected: list[int], sent: list[int]
) -> None:
    given = values(*sizes)
    sums = all_reduce_sum(given, GradientOptions(None, bucket))
    assert [size // 1024 for size in sent] == expected
    for value, total in zip(given, sums, strict=True):
        np.testing.assert_array_equal(total, 3 * value)


def test_dtypes_do_not_mix(sent: list[int]) -> None:
    given = [*values(1024, 1024), *values(512, 512, dtype="float64")]
    sums = all_reduce_sum(given, GradientOptions(None, MEGABYTE))
    assert [size // 1024 for size in sent] == [1024, 1024, 1024]
    assert [total.dtype for total in sums] == [value.dtype for value in given]


def test_a_weight_is_that_of_each_bucket(sent: list[int]) -> None:
    given = [tf.fill([1000], np.float32("nan")), tf.ones([1000])]
    for bucket in (None, 10):
        first, second = all_reduce_sum(given, GradientOptions(None, bucket), weight=tf.constant(0.0))
        assert not np.any(first) and not np.any(second)
    # Half of a replica's rows.
    (half,) = all_reduce_sum([tf.ones([1000])], GradientOptions(None, 10), weight=tf.constant(0.5))
    np.testing.assert_array_equal(half, 1.5)
