"""What is known of the data of a `fit` without taking a batch: its batches, its seeds, whether it repeats, its order.

Python's objects of a `tf.data` pipeline cannot be changed and do not tell all; its graph can, and does. So `Order`
rewrites the graph where an operation loses the order of its elements or draws a seed. A *slot* is what the order
depends on and a process would choose for itself: the two seeds of a shuffle or of an operation that draws, the cycle
length of an interleave. Processes with the same slots read the same rows in the same order, and so does a process that
is started again with them.

The table says what each operation does to the order; a test compares it with TensorFlow. Names in it are families: the
operation `ParallelMapDatasetV2` and the Python class `_ParallelMapDataset` are "ParallelMap".
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import re
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfdist.compat.upstream import (
    ArrayDataAdapter,
    PerReplicaSpec,
    coordinator_values,
    dataset_options_pb2,
    graph_pb2,
    op_def_registry,
)

KEEPS = "keeps the order"
# It loses the order where it is asked to: `deterministic`, `sloppy`, or an option of the dataset.
CAN_LOSE = "can lose the order, and be given one"
# Its order, or what it returns, comes from a seed, which it draws where none was given.
DRAWS = "draws a seed"
CANNOT = "cannot be given an order"

_FAMILIES = {
    KEEPS: """
        AssertCardinality AssertNext AssertPrev AutoShard Batch BytesProducedStats CSV Cache ChooseFastest
        ChooseFastestBranch Concatenate CopyToDevice Csv DenseToRagged DenseToSparseBatch DirectedInterleave Filter
        FilterByLastComponent Finalize FixedLengthRecord FlatMap FromGraph Generator GroupByReducer GroupByWindow
        IgnoreErrors IndexFlatMap Interleave LMDB LatencyStats LegacyRebatch List Load Map MapAndBatch MatchingFiles
        MaxIntraOpParallelism Model NonSerializable Optimize PaddedBatch Prefetch PrivateThreadPool Range Rebatch Repeat
        Restructured Rewrite Save Scan SetStatsAggregator Shard Skip Sleep SlidingWindow SparseTensorSlice Sql TFRecord
        Take TakeWhile Tensor TensorSlice TextLine ThreadPool Unbatch Unique WeightedFlatMap Window Zip
    """,
    CAN_LOSE: """
        LegacyParallelInterleave Options ParallelBatch ParallelFilter ParallelInterleave ParallelMap ParseExample
    """,
    DRAWS: "GlobalShuffle Random Sampling Shuffle ShuffleAndRepeat",
    CANNOT: "DataService ListSnapshotChunks Snapshot SnapshotChunk",
}
OPERATIONS = {family: kind for kind, families in _FAMILIES.items() for family in families.split()}
# They decide which elements there are: what their functions draw has to be the same on all processes.
CHOOSE = {"FlatMap", "Interleave", "LegacyParallelInterleave", "ParallelInterleave"}
# These depend on all that comes before them.
SELECT = {"DirectedInterleave", "Filter", "GroupByReducer", "GroupByWindow", "ParallelFilter", "TakeWhile"}

_DECIDED_ELSEWHERE = (
    "{} returns rows in an order that is decided elsewhere, by files or a service; cache() keeps rows in memory, and "
    "AutoShardPolicy.OFF lets each process train on the rows that it gets"
)
_IGNORE = 1  # functions with a state may be in a graph that stays in this process
# So many threads TensorFlow reckons for each input of a parallel interleave whose cycle length it chooses.
_THREADS_OF_INPUT = 3
READS_IN_ORDER = (
    "seeds, and no deterministic=False (files of TensorFlow Datasets: read_config=tfds.ReadConfig(shuffle_seed=1))"
)
_NO_SEEDS = [0, 0]
_PYTHON = ("PyFunc", "EagerPyFunc")
# Operations with a generator that outlives an iterator; tf.random.Generator makes them.
_SHARED_GENERATOR = ("StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal", "RngReadAndSkip")
_GLANCE = 16  # rows at each end of an array, and about as many between
_NUMBERS = 4096  # of them, and not many more than twice as many, whatever the size of a row
_KEEPS_BATCHES = {"Cache", "Options", "Prefetch", "Repeat", "Skip", "Take"}
# Weak references on both sides: this table must keep neither a model nor its data alive.
_latest: weakref.WeakKeyDictionary[keras.Model, weakref.ref] = weakref.WeakKeyDictionary()


class NoOrderError(ValueError):
    """A pipeline cannot be given one order; the text says why and what to do, "...; ..."."""


def family_of(name: str) -> str | None:
    """The family of an operation or a class; `None` if it makes no dataset.

    Example:
        >>> family_of("ExperimentalParallelMapDatasetV2"), family_of("_ShuffleDataset"), family_of("AddV2")
        ('ParallelMap', 'Shuffle', None)
    """
    found = re.fullmatch(r"_?(?:Experimental)?(?:(\w+)Dataset|Dataset(FromGraph))(?:V\d+)?", name)
    return found and (found[1] or found[2])


def kind_of(name: str) -> Any:
    """The kind of an operation or a class by its name; `None` for one that is not in the table.

    Example:
        >>> kind_of("ShuffleDatasetV3")
        'draws a seed'
    """
    return OPERATIONS.get(family_of(name))


def note_iterator(model: keras.Model, epoch_iterator: Any) -> None:
    """Notes that Keras has made an iterator for a model."""
    _latest[model] = weakref.ref(epoch_iterator)


def latest_iterator(model: keras.Model) -> Any:
    """The iterator that Keras made last for a model, if it is still in use; at the beginning of a fit, that fit's."""
    return _latest.get(model, lambda: None)()


def rows_of_arrays(epoch_iterator: Any) -> int | None:
    """The number of rows, if Keras makes the dataset from arrays; it cannot be read from that dataset."""
    adapter = getattr(epoch_iterator, "data_adapter", None)
    return adapter._num_samples if isinstance(adapter, ArrayDataAdapter) else None


def glance_at_arrays(epoch_iterator: Any) -> list[float]:
    """Sums over the first, the last and some rows between of arrays; empty if the data are no arrays.

    Processes compare them to see whether they were given different rows.
    """
    adapter = getattr(epoch_iterator, "data_adapter", None)
    return _glance(tree.flatten(adapter._inputs)) if isinstance(adapter, ArrayDataAdapter) else []


def glance_at_sources(dataset: tf.data.Dataset) -> list[float]:
    """The same of the rows, or the names of files, that a pipeline begins with."""
    return _glance([tensor for part in _parts(dataset) for tensor in getattr(part, "_tensors", ())])


def _glance(arrays: Iterable[Any]) -> list[float]:
    sums = []
    for array in arrays:
        with contextlib.suppress(Exception):  # Keras takes anything that becomes an array; not all of it can be cut
            for values in map(_as_numbers, _some_of(array)):
                size = float(np.abs(values).sum())
                # The second sum depends on signs and on the order of the rows, since the weights differ much.
                weights = np.random.default_rng(0).uniform(-1, 1, values.size)
                sums += [size, float(values @ weights) / size if size else 0.0]
    return sums


def _some_of(array: Any) -> list[np.ndarray]:
    """Some values of the first rows of an array, a tensor or a frame, of the last, and of some between."""
    if isinstance(array, tf.RaggedTensor):
        array = array.flat_values
    elif isinstance(array, tf.SparseTensor):
        array = array.values
    rows = getattr(array, "iloc", array)  # those of a frame go by its index otherwise
    parts = (rows[:_GLANCE], rows[-_GLANCE:], rows[:: max(1, array.shape[0] // _GLANCE)])
    return [values[:: max(1, values.size // _NUMBERS)] for values in (np.asarray(part).ravel() for part in parts)]


def _as_numbers(values: np.ndarray) -> np.ndarray:
    """Finite numbers, made of text where there are none; folders of files may differ between jobs and hosts."""
    try:
        numbers = (np.abs(values) if np.iscomplexobj(values) else values).astype("float64")
    except (TypeError, ValueError):
        numbers = np.array([zlib.crc32(str(value).rpartition("/")[2].encode()) for value in values], "float64")
    return np.where(np.isfinite(numbers), numbers, 0.0)


def batch_size(epoch_iterator: Any) -> int | None:
    """The number of rows of all batches but the last one, if it is known without taking one."""
    adapter = getattr(epoch_iterator, "data_adapter", None)
    if isinstance(adapter, ArrayDataAdapter):
        return adapter.batch_size
    dataset = getattr(epoch_iterator, "_distributed_dataset", None)
    while dataset is not None:
        if (size := getattr(dataset, "_batch_size", None)) is not None:
            return tf.get_static_value(size)
        # Goes back through datasets that come after batching and do not change the rows.
        if hasattr(dataset, "_tfdist_order"):
            dataset = dataset._tfdist_order.source
        else:
            dataset = dataset._input_dataset if family_of(type(dataset).__name__) in _KEEPS_BATCHES else None
    return None


def batch_sizes(dataset: tf.data.Dataset) -> list[int]:
    """The number of rows that each part of a pipeline puts into a batch, as far as it is known."""
    sizes = (tf.get_static_value(getattr(part, "_batch_size", None)) for part in _parts(dataset))
    return [int(size) for size in sizes if size is not None]


def batch_specification(epoch_iterator: Any) -> Any:
    """The specification of a batch, without taking one: `tf.TensorSpec`s, and `None` for what is no tensor."""
    dataset = epoch_iterator._distributed_dataset
    return tf.nest.map_structure(_of_one_replica, getattr(dataset, "source", dataset).element_spec)


def _of_one_replica(spec: Any) -> Any:
    if isinstance(spec, PerReplicaSpec):
        spec = spec._value_specs[0]
    return spec if hasattr(spec, "shape") and hasattr(spec, "dtype") else None


def pipeline(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields the dataset and all datasets that it reads from."""
    yield dataset
    reader = getattr(dataset, "_impl", None)  # of files: its `_inputs` are those of the reader
    for source in dataset._inputs() if reader is None else [reader]:
        yield from pipeline(source)


def _operations(dataset: tf.data.Dataset) -> Iterator[tuple[Any, Scope]]:
    """The operations in the functions of a pipeline, and where each is."""
    for part in pipeline(dataset):
        for scope in _functions(part):
            yield from ((node, scope) for node in scope.nodes)


def _functions(dataset: tf.data.Dataset) -> Iterator[Scope]:
    """The functions that a transformation applies, nested ones included."""
    if (order := getattr(dataset, "_tfdist_order", None)) is not None:
        yield from order.functions.values()
    in_parallel = "Parallel" in type(dataset).__name__
    for wrapper in dataset._functions():
        graph = wrapper.function.graph.as_graph_def()
        yield Scope(graph.node, in_parallel)
        for function in graph.library.function:
            yield Scope(function.node_def, in_parallel)


class Scope:
    """The operations of a graph, or of one of its functions.

    Args:
        nodes: their messages.
        in_parallel: whether they run in several threads.
        suffix: what follows the name of an operation where another one reads from it.
    """

    def __init__(self, nodes: Any, in_parallel: bool = False, suffix: str = ""):
        self.nodes, self.in_parallel, self._suffix = nodes, in_parallel, suffix
        self.by_name = {node.name: node for node in nodes}

    def sources(self, node: Any) -> list[str]:
        """The names of the operations that one reads from."""
        return [name for name in (each.lstrip("^").split(":")[0] for each in node.input) if name in self.by_name]

    def constant(self, node: Any, argument: str) -> Any:
        """The message of the tensor that an operation gets as an argument; `None` if it gets none, or no constant."""
        index = _position(node, argument)
        source = None if index is None else self.by_name.get(node.input[index].split(":")[0])
        return source.attr["value"].tensor if source is not None and source.op == "Const" else None

    def number(self, node: Any, argument: str) -> Any:
        """As `constant`, its value."""
        tensor = self.constant(node, argument)
        return None if tensor is None else tf.make_ndarray(tensor).item()

    def give(self, node: Any, argument: str, value: Any) -> None:
        """Gives an operation another constant: a number, or the message of a tensor."""
        before = self.constant(node, argument)
        if before is None:
            raise NoOrderError(
                f"{family_of(node.op)} computes its {argument}; give it as a number, or {READS_IN_ORDER}"
            )
        constant = self.nodes.add(op="Const", name=f"tfdist_{argument}_{len(self.nodes)}")
        number = not isinstance(value, type(before))
        tensor = tf.make_tensor_proto(value, tf.as_dtype(before.dtype), ()) if number else value
        constant.attr["value"].tensor.CopyFrom(tensor)
        constant.attr["dtype"].type = before.dtype
        node.input[_position(node, argument)] = constant.name + self._suffix
        self.by_name[constant.name] = constant


def _position(node: Any, argument: str) -> int | None:
    """The number of an operation's input with this name."""
    definition, index = op_def_registry.get(node.op), 0
    for each in definition.input_arg if definition else ():
        if each.name == argument:
            return index
        if each.type_list_attr:
            index += len(node.attr[each.type_list_attr].list.type)
        else:
            index += node.attr[each.number_attr].i if each.number_attr else 1
    return None


def is_unordered(node: Any, scope: Scope) -> bool:
    """Whether an operation may return its elements in another order each time."""
    if kind_of(node.op) != CAN_LOSE:
        return False
    if family_of(node.op) == "Options":
        return _options(node).deterministic is False
    if "sloppy" in node.attr:
        return node.attr["sloppy"].b
    # A look at an attribute that there is not would make one.
    if "deterministic" in node.attr:
        return node.attr["deterministic"].s == b"false"
    return bool(scope.number(node, "sloppy"))


def _options(node: Any) -> tf.data.Options:
    options = tf.data.Options()
    options._from_proto(dataset_options_pb2.Options.FromString(node.attr["serialized_options"].s))
    return options


def draws(node: Any) -> bool:
    """Whether an operation that makes no dataset draws random numbers, and keeps count of them."""
    return {"seed", "seed2"} <= set(node.attr) and not node.op.startswith("Stateless") and not family_of(node.op)


def seeds_of(node: Any, scope: Scope) -> list[int] | None:
    """The two seeds of an operation that draws, zeros if it has none; `None` if it does not draw, or computes them."""
    if draws(node):
        return [node.attr["seed"].i, node.attr["seed2"].i]
    if kind_of(node.op) != DRAWS:
        return None
    seeds = [scope.number(node, "seed"), scope.number(node, "seed2")]
    return None if None in seeds else seeds


def order_of(dataset: tf.data.Dataset) -> Order | None:
    """The order that a pipeline was given by `in_order`; `None` if it has its own."""
    return next(filter(None, (getattr(part, "_tfdist_order", None) for part in pipeline(dataset))), None)


def seeds(dataset: tf.data.Dataset) -> list[list[int]]:
    """Seeds of all random transformations in a pipeline; tf.data fixes them when the pipeline is built."""
    if (order := order_of(dataset)) is not None:
        return order.given
    return [[int(d._seed), int(d._seed2)] for d in pipeline(dataset) if hasattr(d, "_seed2")]


def draws_seeds(dataset: tf.data.Dataset) -> bool:
    """Whether each iterator of the pipeline draws seeds, so that a later one depends on how many there were."""
    order = order_of(dataset)
    return (
        bool(seeds(dataset))
        or (order is not None and any(len(slot) == 2 for slot in order.slots))
        or any("Shuffle" in node.op for node, _ in _operations(dataset))
    )


def goes_by_processors(dataset: tf.data.Dataset) -> bool:
    """Whether the order depends on how many processors a process has: `interleave(cycle_length=tf.data.AUTOTUNE)`."""
    return any(tf.get_static_value(getattr(part, "_cycle_length", 0)) == -1 for part in pipeline(dataset)) or any(
        "Interleave" in node.op and scope.number(node, "cycle_length") == -1 for node, scope in _operations(dataset)
    )


def has_order(dataset: tf.data.Dataset) -> bool:
    """Whether it gives all processes the same rows in the same order, as it is."""
    try:
        return in_order(dataset, shared=True) is dataset
    except NoOrderError:
        return False


def can_save_iterator(dataset: tf.data.Dataset) -> bool:
    """Whether TensorFlow can save an iterator of a pipeline that has an order: no function in it has a state."""
    # Operations that make datasets count as stateful for other reasons.
    definitions = (op_def_registry.get(node.op) for node, _ in _operations(dataset) if not family_of(node.op))
    return not any(definition is not None and definition.is_stateful for definition in definitions)


def why_not_repeatable(dataset: tf.data.Dataset) -> str | None:
    """Why a pipeline that has an order may give other elements when it is built again; `None` if it will not.

    Example:
        >>> why_not_repeatable(tf.data.Dataset.range(8).map(lambda row: tf.random.uniform([])))
        'it draws random numbers without a seed (RandomUniform)'
    """
    return next(filter(None, (_obstacle(node, scope) for node, scope in _operations(dataset))), None)


def _obstacle(node: Any, scope: Scope) -> str | None:
    """Why an operation in a function of a pipeline may give another result the next time; `None` if it will not."""
    if node.op in _PYTHON:
        return "it runs Python code (from_generator, py_function or numpy_function), whose state is unknown"
    if node.op in _SHARED_GENERATOR:
        return f"it draws from a tf.random.Generator ({node.op}), whose state is not part of the pipeline"
    if _counts(node):
        return "it changes a variable (a Keras augmentation layer counts its random numbers), which starts at 0 again"
    if seeds_of(node, scope) == _NO_SEEDS:
        return f"it draws random numbers without a seed ({node.op})" if draws(node) else "it shuffles without a seed"
    if draws(node) and scope.in_parallel:
        return f"it draws random numbers in parallel ({node.op}), in no fixed order"
    return None


def draws_numbers(dataset: tf.data.Dataset) -> bool:
    """Whether functions of a pipeline draw random numbers, to augment rows with, say; Python's are not known."""
    nodes = (node for node, _ in _operations(dataset))
    return any(draws(node) or node.op in _SHARED_GENERATOR or _counts(node) for node in nodes)


def runs_python(dataset: tf.data.Dataset) -> bool:
    """Whether Python makes rows of a pipeline: a generator, a PyDataset, or a function."""
    return any(node.op in _PYTHON for node, _ in _operations(dataset))


def _counts(node: Any) -> bool:
    return node.op.startswith("Assign") and node.op.endswith("VariableOp")


def parts_that_draw(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The parts of a pipeline that draw seeds, as the program has made them: others may read from them, too."""
    return [part for part in _parts(dataset) if kind_of(type(part).__name__) == DRAWS]


def _parts(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    order = order_of(dataset)
    return list(pipeline(dataset if order is None else order.source))


def _draws_behind(dataset: tf.data.Dataset, *families: str) -> bool:
    """Whether parts of these families read from one that draws."""
    drawing = parts_that_draw(dataset)
    return any(
        family_of(type(part).__name__) in families and any(other in drawing for other in pipeline(part))
        for part in _parts(dataset)
    )


def replay_takes_elements(dataset: tf.data.Dataset) -> bool:
    """Whether `replay` reads a pipeline: to make its iterators is not enough."""
    return len(parts_that_draw(dataset)) > 1 or _draws_behind(dataset, "Repeat", "Concatenate", "Cache")


def replay(dataset: tf.data.Dataset, make: Callable[[], Any], made: int, used: int, taken: int | None = None) -> None:
    """Brings the seeds that the iterators of a pipeline draw to where they were.

    A shuffle in front of another one, or of a cache, draws when the first element is asked for, not before.

    Args:
        dataset: the pipeline.
        make: makes an iterator.
        made: how many were made before.
        used: of how many of them elements were taken.
        taken: how many elements of each of those; `None` for all.
    """
    has_several = len(parts_that_draw(dataset)) > 1
    each_ends = _draws_behind(dataset, "Repeat", "Concatenate") and (
        taken is not None or dataset.cardinality() != tf.data.INFINITE_CARDINALITY
    )
    # One that was not read to its end has filled no cache.
    fills_cache = _draws_behind(dataset, "Cache")
    for number in range(made):
        iterator = make()
        if number < used and (each_ends or (fills_cache and (number == 0 or taken is not None))):
            for _ in itertools.islice(iterator, taken):
                pass
        elif number < used and has_several:
            next(iterator, None)


def in_order(
    dataset: tf.data.Dataset,
    *,
    shared: bool,
    agree: Callable[[list[list[int]]], list[list[int]]] = lambda slots: slots,
    always: bool = False,
) -> tf.data.Dataset:
    """A pipeline in one order: the dataset itself, if it has one.

    Args:
        dataset: the pipeline.
        shared: as for `Order`.
        agree: returns the order that is used, from that which this process would choose.
        always: whether an order is noted also where the pipeline has one.

    Raises:
        NoOrderError: if it cannot be given one.

    Example:
        >>> shuffled = in_order(tf.data.Dataset.range(8).shuffle(8), shared=False)
        >>> order_of(shuffled).reasons
        ['Shuffle without a seed']
    """
    if order_of(dataset) is not None or not (always or _asks_for_order(dataset, shared)):
        return dataset
    order = Order(dataset, shared)
    return order.dataset(agree(order.slots)) if always or order.reasons else dataset


def _asks_for_order(dataset: tf.data.Dataset, shared: bool) -> bool:
    """Whether it is worth while to look at the graph of a pipeline, which holds all its arrays."""
    chooses = shared and any(family_of(type(part).__name__) in CHOOSE | SELECT for part in pipeline(dataset))
    return any(map(_may_lack_order, pipeline(dataset))) or any(
        kind_of(node.op) == CANNOT
        or is_unordered(node, scope)
        or (shared and seeds_of(node, scope) == _NO_SEEDS and (chooses or not draws(node)))
        for node, scope in _operations(dataset)
    )


def _may_lack_order(part: tf.data.Dataset) -> bool:
    kind = kind_of(type(part).__name__)
    if kind == DRAWS:
        return not (hasattr(part, "_seed2") and (int(part._seed) or int(part._seed2)))
    if kind == CAN_LOSE:
        if family_of(type(part).__name__) == "Options":
            return part.options().deterministic is False
        return getattr(part, "_deterministic", None) in (None, "false")
    return kind in (None, CANNOT) and not hasattr(part, "_tfdist_order")


class Order:
    """One order for a pipeline.

    Args:
        dataset: the pipeline.
        shared: whether several processes have to agree. What draws in functions, for each element, then gets seeds
            wherever other elements could come of it; in one process that would only repeat the numbers in each epoch.

    Attributes:
        source: the pipeline.
        shared: as given.
        reasons: what in it has no order of its own, in words.
        slots: one order of it, JSON-serialisable.
        given: the seeds that it came with.
        functions: their operations, for each function in it.

    Raises:
        NoOrderError: if there is none for it.
    """

    def __init__(self, dataset: tf.data.Dataset, shared: bool):
        self.source, self.shared = dataset, shared
        self.reasons: list[str] = []
        self._places: list[tuple[Scope, Any, bool, list[int]]] = []  # of each slot; whether it came with it; the slot
        self._changed: set[str] = set()  # operations and functions
        self._graph = _graph_of(dataset)
        self._bodies = {f.signature.name: f.node_def for f in self._graph.library.function}
        nodes = itertools.chain(self._graph.node, *self._bodies.values())
        parallel = self._called_by(n for n in nodes if "Parallel" in n.op or "MapAndBatch" in n.op)
        self.functions = {name: Scope(nodes, name in parallel, ":output:0") for name, nodes in self._bodies.items()}
        self._main = Scope(self._graph.node)
        self._choosing = self._functions_that_choose()
        for name, scope in (("", self._main), *self.functions.items()):
            for node in list(scope.nodes):
                if reasons := self._examine(node, scope, name):
                    self.reasons += reasons
                    self._changed |= {node.name, name}
        self.slots = [slot for *_, slot in self._places]
        self.given = [slot for _, _, is_given, slot in self._places if is_given]
        if shared and self.reasons:
            self._check_files()
        self.reasons = list(dict.fromkeys(self.reasons))
        if self.reasons and any(node.op == "VarHandleOp" for node in self._main.nodes):
            self.reasons.append("variables that it reads keep the values that they have now")

    def dataset(self, slots: Sequence[Sequence[int]], every: bool = False) -> tf.data.Dataset:
        """The pipeline in one order.

        Args:
            slots: as the attribute, of this pipeline in any process.
            every: whether the seeds that it came with are replaced as well.

        Raises:
            NoOrderError: if the slots are those of another pipeline.
        """
        if [len(slot) for slot in slots] != [len(slot) for slot in self.slots]:
            raise NoOrderError("another process, or a backup, has an order of another pipeline; pass the same dataset")
        for (scope, node, is_given, own), slot in zip(self._places, slots, strict=True):
            if not is_given or (every and list(slot) != own):
                self._fill(scope, node, slot)
        for node in self._main.nodes:
            self._make_new(node, "cache")
        with tf.device("CPU:0"):
            graph = tf.constant(self._graph.SerializeToString())
            dataset = coordinator_values.deserialize_dataset_from_graph(graph, self.source.element_spec)
        self._graph = self._main = self._places = None  # it may hold all rows
        self.slots = [list(slot) for slot in slots]
        dataset._tfdist_order = self
        return dataset

    def _called_by(self, nodes: Iterable[Any], through_datasets: bool = True) -> set[str]:
        """The functions that operations call, directly or by other functions."""

        def called(name: str) -> list[str]:
            nodes = (n for n in self._bodies.get(name, ()) if through_datasets or not family_of(n.op))
            return [function for node in nodes for function in _functions_of(node)]

        return _reached((name for node in nodes for name in _functions_of(node)), called)

    def _functions_that_choose(self) -> set[str]:
        """The functions on which it depends what elements there are."""
        placed = [(node, scope) for scope in (self._main, *self.functions.values()) for node in scope.nodes]
        before = [each for node, scope in placed if family_of(node.op) in SELECT for each in _before(node, scope)]
        return self._called_by([*before, *(node for node, _ in placed if family_of(node.op) in CHOOSE)])

    def _examine(self, node: Any, scope: Scope, function: str) -> list[str]:
        """Notes the slots of an operation, and makes it deterministic. Returns what in it had no order, in words."""
        family, reasons = family_of(node.op), []
        if kind_of(node.op) == CANNOT:
            raise NoOrderError(_DECIDED_ELSEWHERE.format(family))
        if is_unordered(node, scope):
            reasons.append("deterministic=False" if family == "Options" else f"{family}, deterministic=False")
            _make_deterministic(node, scope)
        seeds = seeds_of(node, scope)
        if seeds and any(seeds):
            self._places.append((scope, node, True, seeds))
        elif seeds and (not function or (self.shared and (not draws(node) or function in self._choosing))):
            reasons.append(f"{family or node.op} without a seed")
            self._places.append((scope, node, False, _new_seeds()))
        if family in ("Interleave", "ParallelInterleave"):
            cycle = scope.number(node, "cycle_length")
            if cycle == -1 or (cycle is not None and not function):
                slot = [_cycle_length(node, scope) if cycle == -1 else cycle]
                self._places.append((scope, node, False, slot))
        is_chosen = self._choosing.intersection(_functions_of(node))
        if self.shared and is_chosen and _position(node, "num_parallel_calls") is not None:
            called = self._called_by([node], through_datasets=False)
            if any(draws(n) for name in called for n in self._bodies.get(name, ())):
                reasons.append(f"{family} draws random numbers in parallel, which takes one thread now")
                scope.give(node, "num_parallel_calls", 1)
        return reasons

    def _fill(self, scope: Scope, node: Any, slot: Sequence[int]) -> None:
        if len(slot) == 1:
            scope.give(node, "cycle_length", slot[0])
            if (scope.number(node, "num_parallel_calls") or 0) > slot[0]:  # TensorFlow refuses more of them
                scope.give(node, "num_parallel_calls", slot[0])
        elif draws(node):
            node.attr["seed"].i, node.attr["seed2"].i = slot
        else:
            scope.give(node, "seed", slot[0])
            scope.give(node, "seed2", slot[1])
            if scope is self._main:
                self._make_new(node, "seed_generator")

    def _make_new(self, node: Any, argument: str) -> None:
        """Parts an operation from what the pipeline as it was given keeps: the count of its orders, or cached rows."""
        resource = self._main.constant(node, argument)
        if resource is not None and resource.dtype == tf.resource.as_datatype_enum:
            resource.resource_handle_val[0].name += f"/{uuid.uuid4().hex}"

    def _check_files(self) -> None:
        """Refuses files of rows in another order: each process may find one that was written some other time."""
        everywhere = "deterministic=False" in self.reasons  # an option of the dataset
        for scope in (self._main, *self.functions.values()):
            caches = [n for n in scope.nodes if family_of(n.op) == "Cache" and scope.number(n, "filename")]
            for before in (_before(node, scope) for node in caches):
                if everywhere or self._changed & ({n.name for n in before} | self._called_by(before)):
                    raise NoOrderError(
                        "it caches rows in a file, in the order that they had when it was written; cache() without a "
                        f"file, or {READS_IN_ORDER}"
                    )


def _graph_of(dataset: tf.data.Dataset) -> Any:
    graph = graph_pb2.GraphDef()
    try:
        text = tf.raw_ops.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor, external_state_policy=_IGNORE, strip_device_assignment=True
        )
        graph.ParseFromString(text.numpy())
    except Exception as error:  # TensorFlow's, or that of a message which is too large
        raise NoOrderError(f"its graph cannot be read ({str(error).splitlines()[0][:200]}); {READS_IN_ORDER}") from None
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in nodes:
            node.device = ""  # TensorFlow leaves half a name with `py_function`, which it then refuses
    return graph


def _before(node: Any, scope: Scope) -> list[Any]:
    """An operation, and all that it depends on."""
    return [scope.by_name[name] for name in _reached([node.name], lambda name: scope.sources(scope.by_name[name]))]


def _functions_of(node: Any) -> list[str]:
    """The names of the functions that an operation calls."""
    return [f.name for value in node.attr.values() for f in (value.func, *value.list.func) if f.name]


def _reached(names: Iterable[str], following: Callable[[str], Iterable[str]]) -> set[str]:
    """These names, and all that follow from them."""
    found, left = set(), list(names)
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            left += following(name)
    return found


def _make_deterministic(node: Any, scope: Scope) -> None:
    if family_of(node.op) == "Options":
        options = _options(node)
        options.deterministic = True
        node.attr["serialized_options"].s = options._to_proto().SerializeToString()
    if "deterministic" in node.attr:
        node.attr["deterministic"].s = b"true"
    if "sloppy" in node.attr:
        node.attr["sloppy"].b = False
    if scope.constant(node, "sloppy") is not None:
        scope.give(node, "sloppy", False)


def _cycle_length(node: Any, scope: Scope) -> int:
    """What TensorFlow would choose for a process with this one's processors."""
    processors = len(os.sched_getaffinity(0))
    if family_of(node.op) == "Interleave":
        return processors
    calls = scope.number(node, "num_parallel_calls")
    return min(calls, processors) if calls and calls > 0 else math.ceil(processors / _THREADS_OF_INPUT)


def _new_seeds() -> list[int]:
    """Seeds as a shuffle that is made now would get; any, if no global seed says which."""
    seeds = tf.compat.v1.get_seed(None)
    if None in seeds:
        draw = random.SystemRandom().randrange
        return [draw(1, 2**31), draw(1, 2**31)]
    return list(seeds)
