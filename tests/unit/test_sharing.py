"""Which rows belong to which replica."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from tfdist.strategies.data_parallel.dataset import (  # noqa: E402
    Pieces,
    _number_of,
    count_rows,
    cut_for_replica,
    cut_for_worker,
    cut_piece_or_stand_in,
    piece_bounds,
    rows_if,
    with_stand_in,
)
from tfdist.strategies.data_parallel.shares import ends_of_pieces, shares_by_speed  # noqa: E402


@pytest.mark.parametrize("pieces", [1, 2, 7])
@pytest.mark.parametrize("rows", [*range(0, 9), 97])
def test_shares_are_a_partition_in_order(rows, pieces):
    shares = [piece_bounds(rows, pieces, piece) for piece in range(pieces)]
    assert [begin for begin, _ in shares] == [sum(size for _, size in shares[:i]) for i in range(pieces)]
    sizes = [size for _, size in shares]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("shares", [[3, 1], [2, 1], [0.1, 7, 1.3], [1, 1, 1], [1e-9, 1]])
@pytest.mark.parametrize("rows", [*range(0, 9), 97, 1_000_003])
def test_unequal_shares_are_a_partition_in_order_and_the_same_in_a_graph(rows, shares):
    ends = ends_of_pieces(shares, len(shares), 1)
    pieces = [piece_bounds(rows, ends, piece) for piece in range(len(shares))]
    assert [begin for begin, _ in pieces] == [sum(size for _, size in pieces[:i]) for i in range(len(shares))]
    assert sum(size for _, size in pieces) == rows
    for (_, size), share in zip(pieces, shares, strict=True):
        assert abs(size - rows * share / sum(shares)) <= 1.5
        assert size > 0 or rows < len(shares)
    for count in (tf.constant(rows), tf.constant(rows, tf.int64)):
        found = [piece_bounds(count, ends, piece) for piece in range(len(shares))]
        assert [(int(begin), int(size)) for begin, size in found] == pieces
        assert {one.dtype for pair in found for one in pair} == {count.dtype}


def test_devices_of_a_worker_share_its_rows_equally():
    """Local replica `k` of worker `w` has piece `k * workers + w`."""
    ends = ends_of_pieces([1, 3], 2, 2)
    assert [piece_bounds(80, ends, piece)[1] for piece in range(4)] == [10, 30, 10, 30]
    assert ends_of_pieces([1, 3], 1, 2) == (0.25, 1.0)
    assert ends_of_pieces([1, 3], 1, 1) is None
    assert ends_of_pieces(None, 2, 2) is None


@pytest.mark.parametrize("fixed", [0.0, 0.2], ids=["time by rows", "and some for each step"])
@pytest.mark.parametrize("costs", [[1.0, 3.0], [1.0, 1.02], [5.0, 1.0, 1.0, 2.0], [1.0, 1000.0]])
def test_shares_by_speed_let_all_take_as_long(costs, fixed):
    """Beginning with equal ones; each epoch is measured with the shares that the one before has set."""
    shares = [1 / len(costs)] * len(costs)
    for _ in range(12):
        rows = [round(10_000 * share) for share in shares]
        before, times = shares, [fixed + count / 10_000 * cost for count, cost in zip(rows, costs, strict=True)]
        shares = shares_by_speed(shares, rows, times)
        assert abs(sum(shares) - 1) < 1e-12
        # Nobody gets less than a tenth of an equal share.
        assert min(shares) > 0.09 / len(costs)
    assert shares == before, "they do not settle"
    if max(costs) < 100:
        assert max(times) / min(times) < 1.12


@pytest.mark.parametrize(("batch", "workers"), [(16, 3), (32, 3), (32, 6), (8, 3)])
def test_equal_workers_keep_equal_shares_where_batches_do_not_divide(batch, workers):
    shares = [1 / workers] * workers
    ends = ends_of_pieces(shares, workers, 1)
    rows = [piece_bounds(batch, ends, piece)[1] for piece in range(workers)]
    assert len(set(rows)) > 1
    assert shares_by_speed(shares, rows, [0.001 * count for count in rows]) == shares


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(("rows", "pieces"), [(10, 4), (3, 4), (10, (0.75, 1.0)), (3, (0.5, 0.7, 1.0))])
def test_take_share_of_nested_batches(rows, pieces, static):
    dense = tf.range(rows)
    batch = {"a": dense[:, None] * tf.constant([1, 10]), "b": (dense, tf.constant(5.0), None)}

    def all_shares(batch: dict) -> list:
        return [cut_piece_or_stand_in(batch, pieces, piece) for piece in range(_number_of(pieces))]

    if static:
        shares = all_shares(batch)
    else:
        rank_only = tf.TensorSpec([None, 2], tf.int32), tf.TensorSpec([None], tf.int32)
        traced = tf.function(
            lambda a, b: all_shares({"a": a, "b": (b, tf.constant(5.0), None)}), input_signature=rank_only
        )
        shares = traced(batch["a"], dense)
    seen = []
    for piece, (data, counted) in enumerate(shares):
        begin, size = piece_bounds(rows, pieces, piece)
        assert int(counted) == size
        expected = list(range(begin, begin + size)) or [0]
        assert data["b"][0].numpy().tolist() == expected
        assert data["a"].numpy().tolist() == [[row, 10 * row] for row in expected]
        assert float(data["b"][1]) == 5.0
        assert data["b"][2] is None
        seen += expected[: int(counted)]
    assert seen == list(range(rows))


def test_ragged_and_sparse_rows():
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(10), [1, 2, 3, 4])
    sparse = tf.sparse.from_dense([[1, 0, 2], [0, 0, 0], [3, 0, 0]])
    assert rows_if(True, ragged).to_list() == ragged.to_list() and rows_if(False, ragged).to_list() == []
    assert tf.sparse.to_dense(rows_if(True, sparse)).numpy().tolist() == [[1, 0, 2], [0, 0, 0], [3, 0, 0]]
    assert tf.sparse.to_dense(rows_if(False, sparse)).shape == (0, 3)
    assert (int(count_rows(ragged)), int(count_rows(sparse))) == (4, 3)
    (first, one), (second, two) = (cut_piece_or_stand_in(ragged, 3, piece) for piece in (0, 2))
    assert (first.to_list(), int(one)) == ([[0], [1, 2]], 2)
    assert (second.to_list(), int(two)) == ([[6, 7, 8, 9]], 1)


def test_a_batch_without_rows_is_an_error():
    with pytest.raises(ValueError, match=r"without rows cannot be split over replicas\. Received: .*\.batch\(n\)"):
        count_rows((tf.constant(1.0), None))


@pytest.mark.parametrize("static", [True, False])
def test_components_with_other_numbers_of_rows(static):
    def shares(*rows: int, pieces: Pieces = 2) -> list:
        def cut(*batch: tf.Tensor) -> list:
            return [cut_piece_or_stand_in(batch, pieces, piece) for piece in range(2)]

        batch = [tf.range(count) for count in rows]
        if static:
            return cut(*batch)
        return tf.function(cut, input_signature=[tf.TensorSpec([None], tf.int32)] * len(rows))(*batch)

    found = [([part.numpy().tolist() for part in parts], int(rows)) for parts, rows in shares(2, 6)]
    assert found == [([[0], [0, 1, 2]], 3), ([[1], [3, 4, 5]], 3)]
    # One row is for all.
    found = [([part.numpy().tolist() for part in parts], int(rows)) for parts, rows in shares(1, 4)]
    assert found == [([[0], [0, 1]], 2), ([[0], [2, 3]], 2)]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="or multiples of 2") as refused:
        shares(5, 12)
    assert "Received: a batch whose components have" in str(refused.value)
    found = [([part.numpy().tolist() for part in parts], int(rows)) for parts, rows in shares(1, 4, pieces=(0.75, 1.0))]
    assert found == [([[0], [0, 1, 2]], 3), ([[0], [3]], 1)]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"or one row: .* Without batch_shares"):
        shares(4, 12, pieces=(0.75, 1.0))


def test_sparse_pieces_keep_their_dimensions():
    batch = tf.data.Dataset.from_tensors(tf.sparse.from_dense(tf.eye(4, 3)))
    cut = batch.map(lambda x: cut_piece_or_stand_in(x, 2, 1)[0])
    assert cut.element_spec.shape[1:] == [3]
    np.testing.assert_array_equal(tf.sparse.to_dense(next(iter(cut))), np.eye(4, 3)[2:])


@pytest.mark.parametrize("count", [True, False])
@pytest.mark.parametrize(("workers", "replicas", "ends"), [(1, 2, None), (3, 2, None), (1, 2, (0.75, 1.0))])
def test_order_of_rows_over_workers_and_replicas(workers, replicas, ends, count):
    """Replica `k` of worker `w` has piece `k * workers + w`, of every global batch."""
    batches = [list(range(0, 6)), list(range(6, 12)), [12]]
    dataset = tf.data.Dataset.range(13).batch(6)
    pieces = ends or workers * replicas
    for worker in range(workers):
        elements = list(cut_for_worker(dataset, workers, worker, replicas, count, pieces=ends))
        assert len(elements) == len(batches) * replicas
        for i, element in enumerate(elements):
            whole, replica = batches[i // replicas], i % replicas
            begin, size = piece_bounds(len(whole), pieces, replica * workers + worker)
            expected = whole[begin : begin + size]
            if not count:
                assert element.numpy().tolist() == expected
                continue
            assert (int(element.rows), int(element.global_rows)) == (size, len(whole))
            assert element.data.numpy().tolist() == (expected or whole[:1])


def test_shapes_stay_static_where_the_batch_divides():
    spec = cut_for_worker(tf.data.Dataset.range(16).batch(8, drop_remainder=True), 2, 0, 2, count=True).element_spec
    assert spec.data.shape == [2]
    assert cut_for_replica(tf.zeros((8, 3)), 4, 1).data.shape == [2, 3]
    assert cut_for_replica(tf.zeros((8, 3)), (0.75, 1.0), 0).data.shape == [6, 3]


def filled(batch: object) -> object:
    """What a step gets of a batch whose number of rows is known in the step only."""
    shown = []

    def with_any_rows(spec: tf.TypeSpec) -> tf.TypeSpec:
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec([None, *spec.shape[1:]], spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
        return type(spec)([None, *spec.shape[1:]], spec.dtype)

    @tf.function(
        input_signature=[tf.nest.map_structure(with_any_rows, tf.nest.map_structure(tf.type_spec_from_value, batch))]
    )
    def step(given: object) -> object:
        found = with_stand_in(given)
        shown.append([one.shape for one in tf.nest.flatten(found)])
        return found

    found = step(batch)
    assert shown[0] == [tf.TensorShape([None, *one.shape[1:]]) for one in tf.nest.flatten(batch)]
    return found


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_batch_without_rows_gets_one_that_stands_in(rows: int) -> None:
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(2 * rows), [2] * rows)
    batch = (tf.ones([rows, 2, 3]), tf.ones([rows], tf.int64), ragged, tf.sparse.from_dense(tf.ones([rows, 4])))
    found = filled(batch)
    count = max(rows, 1)
    assert [one.shape.as_list() for one in (found[0], found[1], found[3])] == [[count, 2, 3], [count], [count, 4]]
    assert found[2].row_lengths().numpy().tolist() == ([2] * rows or [0])
    assert float(tf.reduce_sum(found[0])) == 6 * rows
    assert float(tf.sparse.reduce_sum(found[3])) == 4 * rows
    assert [one.shape.as_list() for one in with_stand_in(batch[:2])] == [[count, 2, 3], [count]]  # eagerly


def test_a_batch_that_no_row_can_stand_in_for_stays_as_it_is() -> None:
    words = tf.fill([0, 2], "a"), tf.zeros([0])
    assert [one.shape[0] for one in filled(words)] == [0, 0]

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def unknown(given: tf.Tensor) -> tf.Tensor:
        return with_stand_in(given)

    assert unknown(tf.zeros([0, 3])).shape == (0, 3)
    # Other components have rows.
    labelled = filled((tf.zeros([0, 2]), tf.ones([4, 2])))
    assert [one.shape[0] for one in labelled] == [0, 4]
