"""Every operation of tf.data: whether it keeps the order, is given one, draws seeds, or is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.features import table
from tests.tiers import daily
from tfdist.compat.upstream import context, op_def_registry
from tfdist.inspection.datasets import (
    CAN_LOSE,
    CANNOT,
    DRAWS,
    KEEPS,
    OPERATIONS,
    NoOrderError,
    Order,
    family_of,
    goes_by_processors,
    has_order,
    in_order,
    kind_of,
    order_of,
    replay,
    seeds,
    why_not_repeatable,
)

Dataset, experimental = tf.data.Dataset, tf.data.experimental
AUTOTUNE = tf.data.AUTOTUNE


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a program that has set no seed, in a folder with some files."""
    monkeypatch.setattr(context.context(), "_seed", None)
    monkeypatch.chdir(tmp_path)
    for i in range(6):
        Path(f"{i}.csv").write_text("x\n" + "".join(f"{10 * i + row}\n" for row in range(4)))


def rows(first: int = 0, last: int = 12) -> Dataset:
    return Dataset.range(first, last)


def late(row: Any) -> Any:
    """The row, after a time that is another one each time."""
    return tf.ensure_shape(tf.numpy_function(_late, [row], tf.int64), [])


def _late(row: Any) -> Any:
    time.sleep(0.004 * np.random.default_rng().random())
    return row


def file(number: Any) -> Dataset:
    return rows(number * 10, number * 10 + 5).map(late)


def unordered() -> Dataset:
    return rows(0, 4).interleave(file, cycle_length=4, num_parallel_calls=4, deterministic=False)


def with_option() -> Dataset:
    options = tf.data.Options()
    options.deterministic = False
    return rows().map(late, num_parallel_calls=4).with_options(options)


def parse(deterministic: bool) -> Dataset:
    example = tf.train.Example(
        features=tf.train.Features(feature={"x": tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))})
    )
    source = Dataset.from_tensors([example.SerializeToString()]).repeat(8)
    features = {"x": tf.io.FixedLenFeature([], tf.int64)}
    return source.apply(experimental.parse_example_dataset(features, 4, deterministic)).map(lambda row: row["x"])


# What each method makes where it can lose the order or draws; for the others, an example that it leaves as it is.
METHODS: dict[str, tuple[str, Callable[[], Dataset]]] = {
    "apply": (KEEPS, lambda: rows().apply(lambda dataset: dataset.batch(2))),
    "batch": (CAN_LOSE, lambda: rows().map(late).batch(2, num_parallel_calls=2, deterministic=False)),
    "bucket_by_sequence_length": (
        KEEPS,
        lambda: rows(1, 9).map(tf.range).bucket_by_sequence_length(tf.size, [4], [2, 2]),
    ),
    "cache": (CAN_LOSE, lambda: unordered().cache()),
    "choose_from_datasets": (
        KEEPS,
        lambda: Dataset.choose_from_datasets([rows(), rows()], rows(0, 8).map(lambda i: i % 2)),
    ),
    "concatenate": (CAN_LOSE, lambda: rows().concatenate(unordered())),
    "counter": (KEEPS, lambda: Dataset.counter().take(3)),
    "enumerate": (KEEPS, lambda: rows().enumerate()),
    "filter": (DRAWS, lambda: rows(0, 50).filter(lambda row: tf.random.uniform([]) < 0.5)),
    "flat_map": (DRAWS, lambda: rows(0, 3).flat_map(lambda number: rows(0, 9).shuffle(9))),
    "from_generator": (
        KEEPS,
        lambda: Dataset.from_generator(lambda: iter([1, 2]), output_signature=tf.TensorSpec([], tf.int64)),
    ),
    "from_tensor_slices": (KEEPS, lambda: Dataset.from_tensor_slices([1, 2])),
    "from_tensors": (KEEPS, lambda: Dataset.from_tensors([1, 2])),
    "group_by_window": (
        DRAWS,
        lambda: rows(0, 40).group_by_window(
            lambda row: tf.random.uniform([], maxval=2, dtype=tf.int64), lambda key, window: window.batch(4), 4
        ),
    ),
    "ignore_errors": (KEEPS, lambda: rows().ignore_errors()),
    "interleave": (CAN_LOSE, unordered),
    "list_files": (DRAWS, lambda: Dataset.list_files("*.csv")),
    "map": (CAN_LOSE, lambda: rows().map(late, num_parallel_calls=4, deterministic=False)),
    "padded_batch": (KEEPS, lambda: rows().padded_batch(3)),
    "prefetch": (KEEPS, lambda: rows().prefetch(AUTOTUNE)),
    "ragged_batch": (KEEPS, lambda: rows(1, 4).map(tf.range).ragged_batch(2).map(lambda row: row.to_tensor())),
    "random": (DRAWS, lambda: Dataset.random(rerandomize_each_iteration=True).take(9)),
    "range": (KEEPS, lambda: Dataset.range(3)),
    "rebatch": (KEEPS, lambda: rows().batch(2).rebatch(3)),
    "rejection_resample": (
        DRAWS,
        lambda: rows(0, 60).rejection_resample(lambda row: tf.cast(row % 2, tf.int32), [0.2, 0.8], [0.5, 0.5]),
    ),
    "repeat": (DRAWS, lambda: rows().shuffle(12).repeat(2)),
    "sample_from_datasets": (DRAWS, lambda: Dataset.sample_from_datasets([rows(), rows(20, 30)])),
    "scan": (KEEPS, lambda: rows().scan(tf.constant(0, tf.int64), lambda state, row: (state + row, state))),
    "shard": (KEEPS, lambda: rows().shard(2, 0)),
    "shuffle": (DRAWS, lambda: rows().shuffle(12)),
    "skip": (KEEPS, lambda: rows().skip(2)),
    "snapshot": (CANNOT, lambda: rows().snapshot("never made")),
    "sparse_batch": (KEEPS, lambda: rows(1, 4).map(tf.range).sparse_batch(2, [4]).map(tf.sparse.to_dense)),
    "take": (CAN_LOSE, lambda: unordered().take(7)),
    "take_while": (DRAWS, lambda: rows(0, 50).take_while(lambda row: tf.random.uniform([]) < 0.9)),
    "unbatch": (KEEPS, lambda: rows().batch(2).unbatch()),
    "unique": (KEEPS, lambda: rows().unique()),
    "window": (KEEPS, lambda: rows().window(2).flat_map(lambda window: window.batch(2))),
    "with_options": (CAN_LOSE, with_option),
    "zip": (CAN_LOSE, lambda: Dataset.zip((rows().shuffle(12), unordered()))),
    # Readers.
    "FixedLengthRecordDataset": (KEEPS, lambda: tf.data.FixedLengthRecordDataset(__file__, 900)),
    "TFRecordDataset": (KEEPS, lambda: tf.data.TFRecordDataset([])),
    "TextLineDataset": (KEEPS, lambda: tf.data.TextLineDataset([__file__], num_parallel_reads=2)),
    # tf.data.experimental.
    "Counter": (KEEPS, lambda: experimental.Counter().take(3)),
    "CsvDataset": (KEEPS, lambda: experimental.CsvDataset([], [tf.int32])),
    "RandomDataset": (DRAWS, lambda: experimental.RandomDataset().take(9)),
    "assert_cardinality": (CAN_LOSE, lambda: unordered().apply(experimental.assert_cardinality(20))),
    "copy_to_device": (KEEPS, lambda: rows().apply(experimental.copy_to_device("/CPU:0"))),
    "dense_to_ragged_batch": (
        KEEPS,
        lambda: rows(1, 4).map(tf.range).apply(experimental.dense_to_ragged_batch(2)).map(lambda row: row.to_tensor()),
    ),
    "dense_to_sparse_batch": (
        KEEPS,
        lambda: rows(1, 4).map(tf.range).apply(experimental.dense_to_sparse_batch(2, [4])).map(tf.sparse.to_dense),
    ),
    "enumerate_dataset": (KEEPS, lambda: rows().apply(experimental.enumerate_dataset())),
    "from_list": (KEEPS, lambda: experimental.from_list([1, 2])),
    "from_variant": (
        DRAWS,
        lambda: experimental.from_variant(experimental.to_variant(rows().shuffle(12)), tf.TensorSpec([], tf.int64)),
    ),
    "group_by_reducer": (
        KEEPS,
        lambda: rows().apply(
            experimental.group_by_reducer(
                lambda row: row % 2,
                experimental.Reducer(lambda key: key * 0, lambda state, row: state + row, lambda state: state),
            )
        ),
    ),
    "make_batched_features_dataset": (
        DRAWS,
        lambda: experimental.make_batched_features_dataset(
            "*.csv", 2, {"x": tf.io.FixedLenFeature([], tf.string)}, tf.data.TextLineDataset, num_epochs=1
        ).take(0),
    ),
    "make_csv_dataset": (
        CAN_LOSE,
        lambda: experimental.make_csv_dataset("*.csv", 2, num_epochs=1, num_parallel_reads=4, sloppy=True),
    ),
    "map_and_batch": (KEEPS, lambda: rows().apply(experimental.map_and_batch(late, 2, num_parallel_calls=4))),
    "pad_to_cardinality": (
        KEEPS,
        lambda: rows().map(lambda row: {"x": row}).apply(experimental.pad_to_cardinality(15)).map(lambda row: row["x"]),
    ),
    "parallel_interleave": (
        CAN_LOSE,
        lambda: rows(0, 4).apply(experimental.parallel_interleave(file, cycle_length=4, sloppy=True)),
    ),
    "parse_example_dataset": (CAN_LOSE, lambda: parse(False)),
    "prefetch_to_device": (KEEPS, lambda: rows().apply(experimental.prefetch_to_device("/CPU:0"))),
    "shuffle_and_repeat": (DRAWS, lambda: rows().apply(experimental.shuffle_and_repeat(12, 2))),
}
DAILY = (
    "interleave",
    "with_options",
    "cache",
    "shuffle",
    "flat_map",
    "filter",
    "parallel_interleave",
    "snapshot",
    "prefetch",
)
# Functions of tf.data.experimental that are the methods of the same name, under an older one.
SAME = {
    *("bucket_by_sequence_length", "choose_from_datasets", "group_by_window", "ignore_errors", "rejection_resample"),
    *("sample_from_datasets", "scan", "snapshot", "take_while", "unbatch", "unique"),
}
# What makes no dataset, or one of what is in a file or a database.
OTHERS = {
    *("as_numpy_iterator", "cardinality", "element_spec", "fingerprint", "get_single_element", "load", "options"),
    *("reduce", "save", "at", "distributed_save", "enable_debug_mode", "get_model_proto", "get_next_as_optional"),
    *("get_structure", "index_table_from_dataset", "make_saveable_from_iterator", "service", "table_from_dataset"),
    *("to_variant", "SqlDataset", "Dataset", "experimental"),
}


def public(module: Any) -> set[str]:
    """The names of functions and classes that may make a dataset."""
    names = {name for name in dir(module) if not name.startswith("_") and callable(getattr(module, name, None))}
    return {name for name in names if name[0].islower() or name.endswith("Dataset") or name == "Counter"}


def test_every_function_of_tf_data_is_tried() -> None:
    names = public(Dataset) | public(tf.data) | public(experimental)
    assert names - set(METHODS) - SAME - OTHERS == set()


def test_every_operation_is_in_the_table() -> None:
    found = set()
    for name in filter(lambda name: family_of(name), dir(tf.raw_ops)):
        definition = op_def_registry.get(name)
        if not any(output.type == tf.variant.as_datatype_enum for output in definition.output_arg):
            continue
        found.add(family_of(name))
        parts = {part.name for part in (*definition.input_arg, *definition.attr)}
        loses, draws = parts & {"deterministic", "sloppy", "serialized_options"}, parts & {"seed", "seed_generator"}
        assert kind_of(name) is not None, f"{name} is new: put it into the table of inspection/datasets.py"
        if kind_of(name) != CANNOT:
            assert (kind_of(name) == CAN_LOSE, kind_of(name) == DRAWS) == (bool(loses), bool(draws)), name
    # Classes of Python alone.
    assert set(OPERATIONS) - found == {"CopyToDevice", "Csv", "DenseToRagged", "LegacyRebatch", "Restructured"}


def epochs(dataset: Dataset, number: int = 2) -> list[list[Any]]:
    return [[tf.nest.map_structure(_plain, each) for each in dataset.as_numpy_iterator()] for _ in range(number)]


def _plain(value: Any) -> Any:
    return np.asarray(value).tolist()


@pytest.mark.parametrize("name", daily(METHODS, *DAILY))
def test_order(name: str) -> None:
    """What loses the order or draws is the same wherever it has the same slots; what keeps it is left as it is."""
    kind, make = METHODS[name]
    dataset = make()
    if kind == CANNOT:
        with pytest.raises(NoOrderError, match=f"{name.capitalize()} returns rows in an order"):
            in_order(dataset, shared=True)
        return
    ordered = in_order(dataset, shared=True)
    if kind == KEEPS:
        assert order_of(ordered) is None
        return
    slots = order_of(ordered).slots
    here, elsewhere = epochs(ordered), epochs(Order(make(), shared=True).dataset(slots))
    assert here == elsewhere
    assert ordered.element_spec == dataset.element_spec
    assert int(ordered.cardinality()) == int(dataset.cardinality())
    assert in_order(ordered, shared=True) is ordered
    assert has_order(ordered) and not has_order(dataset)
    if name in ("interleave", "map", "with_options", "cache", "shuffle", "flat_map", "sample_from_datasets"):
        # The same rows, each as often.
        assert sorted(epochs(make(), 1)[0]) == sorted(here[0]) == sorted(here[1])


def test_a_shuffle_has_another_order_each_epoch_and_its_count_goes_on() -> None:
    """As the dataset would without tfdist: seeds of its own are kept, and so is how often they were used."""
    seeded = rows().shuffle(12, seed=3)
    expected = epochs(rows().shuffle(12, seed=3), 4)
    dataset = Dataset.zip((seeded, rows().shuffle(12)))
    first = [[pair[0] for pair in epoch] for epoch in epochs(in_order(dataset, shared=True))]
    second = epochs(in_order(dataset, shared=True))
    assert first + [[pair[0] for pair in epoch] for epoch in second] == expected
    assert len({str([pair[1] for pair in epoch]) for epoch in second}) == 2
    assert seeds(in_order(dataset, shared=True)) == [seeds(seeded)[0]]


def test_draws_that_choose_nothing_are_left_alone() -> None:
    """Noise would be the same in every epoch; it is drawn for rows that are the same on all workers."""
    noisy = rows().map(lambda row: (row, tf.random.uniform([])))
    assert in_order(noisy, shared=True) is noisy
    both = epochs(in_order(Dataset.zip((noisy, unordered())), shared=True))
    assert both[0] != both[1]
    assert why_not_repeatable(noisy) == "it draws random numbers without a seed (RandomUniform)"


def test_draws_in_parallel_before_rows_are_chosen() -> None:
    def make() -> Dataset:
        noisy = rows(0, 40).map(lambda row: (late(row), tf.random.uniform([])), num_parallel_calls=4)
        return noisy.filter(lambda row, noise: noise < 0.5)

    ordered = in_order(make(), shared=True)
    assert "ParallelMap draws random numbers in parallel, which takes one thread now" in order_of(ordered).reasons
    assert epochs(ordered) == epochs(Order(make(), shared=True).dataset(order_of(ordered).slots))


def test_one_process_keeps_what_functions_draw() -> None:
    """There nobody has to agree: nested shuffles have another order each epoch, as without tfdist."""
    nested = rows(0, 2).flat_map(lambda number: rows().shuffle(12))
    assert in_order(nested, shared=False) is nested


def test_tables_variables_and_python() -> None:
    """What a graph that leaves the process could not take with it."""
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(*[tf.range(12, dtype=tf.int64)] * 2), -1)
    variable = tf.Variable(5, dtype=tf.int64)
    dataset = unordered().filter(lambda row: row < 12).map(lambda row: late(table.lookup(row)) + variable)
    ordered = in_order(dataset, shared=True)
    assert order_of(ordered).reasons[-1] == "variables that it reads keep the values that they have now"
    before = epochs(ordered, 1)
    variable.assign(6)
    assert sorted(row - 1 for row in epochs(dataset, 1)[0]) == sorted(before[0])
    assert epochs(ordered, 1) == before


@pytest.mark.parametrize("function", [tf.py_function, tf.numpy_function])
def test_a_function_of_python_before_a_shuffle(function: Any) -> None:
    """TensorFlow leaves half a device's name with `py_function`."""
    called = rows().map(lambda row: function(lambda value: value + 1, [row], tf.int64))
    one, other = (epochs(in_order(called.shuffle(12, seed=3), shared=True)) for _ in range(2))
    assert one == other and sorted(one[0]) == list(range(1, 13))


def test_a_number_of_parallel_calls_that_a_function_captures() -> None:
    number = tf.constant(4, tf.int64)
    drawn = rows(0, 2).flat_map(lambda row: rows().map(lambda one: one + _drawn(), num_parallel_calls=number))
    with pytest.raises(NoOrderError, match="ParallelMap computes its num_parallel_calls; give it as a number, or "):
        in_order(drawn.filter(lambda row: row > _drawn()), shared=True)


def _drawn() -> tf.Tensor:
    return tf.random.uniform([], maxval=5, dtype=tf.int64)


def test_rows_in_a_file_of_cache(tmp_path: Path) -> None:
    path = str(tmp_path / "cache")
    options = with_option().options()
    for dataset in (
        unordered().cache(path),
        rows().shuffle(9).batch(2).cache(path).repeat(2),
        rows().map(late, 4).cache(path).with_options(options),
        rows(0, 2).flat_map(lambda number: rows().shuffle(9).cache(path)),
    ):
        with pytest.raises(NoOrderError, match=r"it caches rows in a file.*tfds.ReadConfig\(shuffle_seed=1\)"):
            in_order(dataset, shared=True)
    assert order_of(in_order(rows().cache(path).shuffle(9), shared=True)).reasons == ["Shuffle without a seed"]
    # One process has one file, whatever is in it.
    assert order_of(in_order(rows().shuffle(9).cache(path), shared=False)) is not None


@pytest.mark.nightly
def test_a_cycle_that_goes_by_the_number_of_processors() -> None:
    makers = [
        lambda **cycle: rows().interleave(file, **cycle),
        lambda **cycle: rows().interleave(file, num_parallel_calls=2, **cycle),
        lambda **cycle: rows(0, 1).flat_map(
            lambda number: rows().interleave(file, num_parallel_calls=AUTOTUNE, **cycle)
        ),
    ]
    for make in makers:
        assert not goes_by_processors(make(cycle_length=2))
        dataset = make()
        assert goes_by_processors(dataset)
        expected = epochs(dataset, 1)
        own = Order(dataset, shared=True)
        assert epochs(own.dataset(own.slots), 1) == expected
        # Of a host with other processors.
        assert epochs(Order(dataset, shared=True).dataset([[7]]), 1) == epochs(make(cycle_length=7), 1) != expected


REPLAYED = {
    "shuffle": lambda: rows().shuffle(9, seed=1),
    "shuffle twice": lambda: rows().shuffle(9, seed=1).shuffle(9, seed=2),
    "files": lambda: (
        rows(0, 4).shuffle(4, seed=1).flat_map(lambda n: rows(n, n + 3)).map(tf.identity).shuffle(9, seed=2)
    ),
    "one after another": lambda: rows().shuffle(9, seed=1).concatenate(rows().shuffle(9, seed=2)),
    "repeat": lambda: rows().shuffle(9, seed=1).repeat(2),
    "cache": lambda: rows().shuffle(9, seed=1).cache().shuffle(9, seed=2),
    "zip": lambda: Dataset.zip((rows().shuffle(9, seed=1), rows().shuffle(9, seed=2).shuffle(9, seed=3))),
}


@pytest.mark.parametrize("name", daily(REPLAYED, "files", "one after another", "cache"))
def test_replay(name: str) -> None:
    """As Keras makes iterators: one for each epoch, and at its end one that nobody uses."""
    before, after = REPLAYED[name](), REPLAYED[name]()
    for _ in range(3):
        epochs(before, 1)
        iter(before)
    replay(after, lambda: iter(after), 6, 3)
    assert epochs(after) == epochs(before)
    assert len({str(epoch) for epoch in epochs(before, 3)}) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("policy", daily(["FILE", "OFF"], "FILE"))
def test_one_process_has_nothing_to_shard(mirrored: tf.distribute.Strategy, policy: str) -> None:
    """Batches of 16 rows, and of 10 at the end, also of a number that nobody knows before."""
    x, y = table.rows(90)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = experimental.AutoShardPolicy[policy]
    expected = table.train_and_observe(tf.distribute.get_strategy(), table.mlp(), lambda: table.batches(x, y))
    received = table.train_and_observe(
        mirrored, table.mlp(), lambda: table.batches(x, y).filter(lambda x, y: True).with_options(options)
    )
    gaps = table.differences(expected, received)
    assert max(gap for name, gap in gaps.items() if name.startswith(("history", "evaluate"))) < 1e-5
