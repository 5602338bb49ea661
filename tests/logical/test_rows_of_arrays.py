"""Arrays as data: each worker takes its own rows only, and they are those of the whole batches."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.tiers import daily
from tfdist.compat.upstream import ArrayDataAdapter
from tfdist.inspection.datasets import glance_at_arrays
from tfdist.runtime.peers import near
from tfdist.strategies.data_parallel import dataset as shares
from tfdist.strategies.data_parallel.dataset import ReplicaBatch, array_source, cut_for_worker

ROWS = 37


def dataset(shuffle: Any = False, batch_size: int = 8, data: Any = None) -> tf.data.Dataset:
    """What Keras makes of arrays; the same order each time."""
    x = np.arange(ROWS * 3.0).reshape(ROWS, 3)
    tf.random.set_seed(3)
    return ArrayDataAdapter(
        data or {"a": x, "b": x[:, 0]}, x[:, 1], batch_size=batch_size, shuffle=shuffle
    ).get_tf_dataset()


def elements(of: tf.data.Dataset) -> list[Any]:
    return [tf.nest.map_structure(lambda leaf: np.array(leaf), one) for one in of]


def glance(x: Any, y: Any = None) -> list[float]:
    adapter = ArrayDataAdapter(x, x[:, 0] if y is None else y, batch_size=4)
    return glance_at_arrays(types.SimpleNamespace(data_adapter=adapter))


def test_a_glance_tells_other_rows_and_another_order():
    draw = np.random.default_rng(0)
    for x in (draw.normal(size=(12, 5)), draw.uniform(size=(40, 64, 64, 3)), draw.choice([-1.0, 1.0], size=(64, 1))):
        assert near(glance(x), glance(x * (1 + 1e-9)))
        between = np.concatenate([x[:16], -x[16:-16], x[-16:]])
        for other in (x[::-1], np.random.default_rng(1).permutation(x), x + 1, -x, *[between] * (len(x) > 32)):
            assert not near(glance(x), glance(other))
    labels = np.eye(10)[draw.integers(0, 10, 64)]
    assert not near(glance(labels), glance(labels[::-1]))


NUMBERS = np.random.default_rng(2).normal(size=40)
WORDS = [f"word {i}" for i in range(40)]
MISSING = np.column_stack([NUMBERS, [np.nan, np.inf] * 20])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda frame, part: frame({"a": NUMBERS, "b": WORDS, "c": [None, 1.5] * 20})[part], id="a frame"),
        pytest.param(lambda frame, part: frame({"a": NUMBERS})[part], id="a frame of numbers"),
        pytest.param(lambda frame, part: np.array(WORDS)[part, None], id="text"),
        pytest.param(lambda frame, part: MISSING[part], id="missing numbers"),
        pytest.param(lambda frame, part: tf.ragged.constant([[i] * (i % 4) for i in range(40)])[part], id="ragged"),
        pytest.param(lambda frame, part: tf.sparse.from_dense(np.diag(range(40))[part]), id="sparse"),
    ],
)
def test_a_glance_at_a_part_of_the_rows(make):
    """As a process has it that was given a part; the index of a frame begins with another number then."""
    frame = pytest.importorskip("pandas").DataFrame
    first, other, again = (make(frame, part) for part in (slice(0, 20), slice(20, 40), slice(0, 20)))
    same = np.zeros(20)
    assert near(glance(first, same), glance(again, same))
    assert not near(glance(first, same), glance(other, same))


@pytest.mark.parametrize("shuffle", daily([False, True, "batch"], "True"))
@pytest.mark.parametrize(("workers", "replicas"), [(3, 1), *daily([(9, 1), (2, 2)], "9")])
@pytest.mark.parametrize("count", daily([False, True], "True"))
def test_they_are_the_rows_of_whole_batches(monkeypatch, shuffle, workers, replicas, count):
    def of_all() -> list[list[Any]]:
        found = [elements(cut_for_worker(dataset(shuffle), workers, one, replicas, count)) for one in range(workers)]
        # What tells a batch from others is made of the numbers of its rows here, and there of the rows.
        return [[one._replace(sample=()) for one in of] for of in found] if count else found

    found = of_all()
    monkeypatch.setattr(shares, "array_source", lambda data: None)
    expected = of_all()
    assert len(found[0]) == len(expected[0]) == -(-ROWS // 8) * replicas
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


def test_the_rows_of_others_are_not_taken(monkeypatch):
    """How many each call takes: two of eight, and of the last five one, for worker 1 of four."""
    taken = []

    def watched(data: tf.data.Dataset) -> Any:
        source = array_source(data)

        def take(numbers: tf.Tensor, arrays: Any) -> Any:
            with tf.control_dependencies([tf.py_function(lambda n: taken.append(int(n)), [tf.size(numbers)], [])]):
                return source.take(tf.identity(numbers), arrays)

        return source._replace(take=take) if source else None

    monkeypatch.setattr(shares, "array_source", watched)
    found = elements(cut_for_worker(dataset(), 4, 1, 1, count=True))
    assert sorted(taken) == [1, 2, 2, 2, 2]  # several calls at a time
    assert isinstance(found[0], ReplicaBatch)
    assert [(int(one.rows), int(one.global_rows)) for one in found] == [(2, 8)] * 4 + [(1, 5)]
    np.testing.assert_array_equal(found[0].data[1], [7, 10])


@pytest.mark.parametrize("skipped", [0, 1, 3])
def test_after_some_steps_that_were_done_before(skipped):
    found = elements(cut_for_worker(dataset().skip(skipped), 2, 0, 1))
    whole = elements(dataset())[skipped:]
    assert len(found) == len(whole)
    for received, expected in zip(found, whole, strict=True):
        half = -(-len(expected[1]) // 2)
        np.testing.assert_array_equal(received[1], expected[1][:half])


def test_sparse_arrays():
    sparse = tf.sparse.from_dense(np.eye(ROWS, 5, dtype="float32"))
    (found, *_) = elements(cut_for_worker(dataset(data=sparse), 2, 1, 1).map(lambda x, y: (tf.sparse.to_dense(x), y)))
    np.testing.assert_array_equal(found[0], np.eye(ROWS, 5)[4:8])


@pytest.mark.parametrize(
    "other",
    [
        lambda: tf.data.Dataset.range(9).batch(2),
        lambda: tf.data.Dataset.zip((tf.data.Dataset.range(9), tf.data.Dataset.from_tensors(0).repeat())).map(
            lambda i, _: i
        ),
        lambda: dataset().take(2),
    ],
)
def test_other_datasets_are_cut(other):
    assert array_source(other()) is None
