"""Where a training is in its data, and how another process gets to the same position.

Keras asks `EpochIterator._enumerate_iterator` for the steps of an epoch. It is shadowed on the instance by one that
does the same, tells when a step is done, and can begin in the middle. A position is the number of iterators that were
made (each may draw seeds for its shuffling) and the number of batches taken from the last one:

iterators made   0   1   2   3 ........          known size: one for each epoch, and one more at its end
batches taken    0 . 10  0 . 4                   -> position (3, 4): make two, make a third, skip four batches
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoint import callback_state
from tfdist.compat.keras import hooks_of
from tfdist.compat.upstream import ArrayDataAdapter, PyDatasetAdapter, TFDatasetAdapter, context, input_lib
from tfdist.inspection.datasets import (
    NoOrderError,
    Order,
    batch_sizes,
    can_save_iterator,
    draws_seeds,
    glance_at_arrays,
    glance_at_sources,
    goes_by_processors,
    in_order,
    order_of,
    parts_that_draw,
    replay,
    replay_takes_elements,
    seeds,
    why_not_repeatable,
)
from tfdist.inspection.model_state import items_of, random_state, restore_random_state
from tfdist.runtime.peers import near
from tfdist.steps.attributes import is_users
from tfdist.strategies.data_parallel.dataset import ReplicaBatchDataset, in_common_order

_log = logging.getLogger("tfdist")

# Name of the iterator's state among the tensors of a backup. TensorFlow refuses iterators that have a state elsewhere.
_ITERATOR = "iterator"
_FAIL = 2
_OWN = "dataset"
# Facts about data that are not always known; earlier versions have not saved all of them.
_BATCHES, _SIZES = "number of batches", "rows of a batch"
_LARGEST = 1e12
_HOOKS = ("on_epoch_begin", "on_epoch_end")
_GENERATORS = (
    *(np.random.Generator, np.random.RandomState, random.Random),
    *(keras.random.SeedGenerator, tf.random.Generator),
)
# Longer containers hold rows, or the names of files.
_LONGEST = 1000
# What to do about each reason of `why_not_repeatable`; the first entry whose text is in the reason counts.
_REMEDIES = (
    ("augmentation layer", "put the layer into the model, or use tf.image.stateless_random_* in map"),
    ("Python code", "use a keras.utils.PyDataset, or operations of TensorFlow"),
    ("tf.random.Generator", "use tf.random.stateless_*"),
    ("in parallel", "use tf.random.stateless_*, or map without num_parallel_calls"),
    ("", "keras.utils.set_random_seed, called first, seeds all that has no seed"),
)
# Parts that draw, of pipelines that a fit has read which has not come to its end.
_drawn: weakref.WeakSet[tf.data.Dataset] = weakref.WeakSet()
# Those of finished fits whose pipelines were not read yet, which a later fit may need.
_passed_over: list[DataPosition] = []


class DataPosition:
    """The position of a `fit` in its data.

    Args:
        model: the model that is fitted.
        epoch_iterator: Keras' iterator over its epochs.
        dataset_fn: the user's function from an epoch to the dataset of that epoch, if there is one.
        after_step: called after each execution with the number of steps that the epoch then has.

    Attributes:
        obstacle: why no position within an epoch can be found again; `None` if it can.
    """

    def __init__(
        self,
        model: keras.Model,
        epoch_iterator: Any,
        dataset_fn: Callable[[int], tf.data.Dataset] | None,
        after_step: Callable[[int], None],
    ):
        self._model = model
        self._iterator = epoch_iterator
        self._dataset_fn = dataset_fn
        self._data = ReadData(model, epoch_iterator)
        self._after_step = after_step
        self._made = 0
        self._used = 0  # of these, those that a batch was taken from
        self._in_epoch = 0
        self._own_size: int | None = None
        self._resumed: dict | None = None
        self._random_at_begin: list | None = None
        adapter = epoch_iterator.data_adapter
        self._is_arrays = isinstance(adapter, ArrayDataAdapter) and dataset_fn is None
        self._py_dataset = adapter.py_dataset if isinstance(adapter, PyDatasetAdapter) and dataset_fn is None else None
        # For the order of arrays, if nothing else says in which order they come.
        draws_seed = self._is_arrays and adapter._shuffle and context.global_seed() is None
        self._array_seed = random.SystemRandom().randrange(2**31) if draws_seed else None
        if self._dataset_fn is None and not self._is_arrays:
            self._data.put_in_order()
        self._saves_iterator = self._should_save_iterator()
        self.obstacle = None if self._saves_iterator else self._find_obstacle()
        self._agree_on_obstacle()
        self.epoch = 0
        epoch_iterator._enumerate_iterator = self._enumerate

    @property
    def not_repeatable(self) -> str | None:
        """Why another run may read other data, though nobody disturbs it; `None` if that is not known."""
        source = self._data.source
        if self.obstacle is not None or not isinstance(source, tf.data.Dataset) or self._is_arrays:
            return self.obstacle
        order = order_of(source)
        drawn = [reason for reason in (order.reasons if order else []) if "without a seed" in reason]
        drawn += ["no seed was set"] if self._data.seeds_are_drawn and seeds(source) else []
        return ", ".join(drawn) or None

    def _find_obstacle(self) -> str | None:
        if self._dataset_fn is not None or self._is_arrays:
            return None
        adapter = self._iterator.data_adapter
        if self._py_dataset is not None:
            changes = any(
                getattr(type(self._py_dataset), hook) is not getattr(keras.utils.PyDataset, hook) for hook in _HOOKS
            )
            if self._py_dataset.num_batches is None:
                return "a PyDataset without a length is a generator"
            if changes and _kind_of_state(self._py_dataset) != _OWN:
                return (
                    f"{type(self._py_dataset).__name__} changes in on_epoch_begin or on_epoch_end; give it get_state() "
                    "and set_state(state), and that can be saved"
                )
            if (drawn_from := self._draws_from()) is not None:
                return (
                    f"{type(self._py_dataset).__name__}.__getitem__ draws from {drawn_from}; draw from a generator "
                    "that is made from the index instead, such as np.random.default_rng(index)"
                )
            return None
        if not isinstance(adapter, TFDatasetAdapter):
            kind = type(adapter).__name__.removesuffix("Adapter").removesuffix("Data")
            return f"the data come from a {kind}, not a tf.data.Dataset"
        source = self._data.source
        if not isinstance(source, tf.data.Dataset):
            return f"the data are a {type(source).__name__}, which the workers read by themselves"
        if self._data.no_order is not None:
            return self._data.no_order
        reason = why_not_repeatable(source)
        return reason and f"{reason}; {next(remedy for part, remedy in _REMEDIES if part in reason)}"

    def _draws_from(self) -> str | None:
        """A random state on which an item depends, and which the threads that read ahead change at any time."""
        before, own, arrays = random_state(), generators_in(self._py_dataset), {}
        kept, content = callback_state.encode(own, arrays, ""), callback_state.content_of(own)
        item = self._py_dataset[0]
        is_global, is_own = random_state() != before, callback_state.content_of(own) != content
        if is_global:
            restore_random_state(before)
        if is_own:
            callback_state.decode(kept, arrays, own)
            return "a generator that the dataset keeps"
        if is_global:
            return "the global random state of Python, NumPy or TensorFlow"
        if _kind_of_state(self._py_dataset) == _OWN:
            return None
        differs = callback_state.content_of(item) != callback_state.content_of(self._py_dataset[0])
        return "a state to which no attribute leads" if differs else None

    def _should_save_iterator(self) -> bool:
        """Whether the state of the iterator itself is saved.

        That state holds all rows of a shuffle's buffer. So it is saved only where no position can be found again (the
        order comes from no seed), or where one iterator serves the whole training, so that all data before the position
        would have to be read again.
        """
        dataset, adapter = self._iterator._distributed_dataset, self._iterator.data_adapter
        if self._dataset_fn is not None or not isinstance(adapter, TFDatasetAdapter):
            return False
        if not isinstance(dataset, tf.data.Dataset) or self._data.no_order or not can_save_iterator(dataset):
            return False
        return self._iterator.steps_per_epoch is not None or why_not_repeatable(dataset) is not None

    def _agree_on_obstacle(self) -> None:
        """Each process may have other data, and all save after the same steps, or none does."""
        peers = hooks_of(self._model.distribute_strategy).peers
        if peers and self._reads_own_rows:
            everyone = peers.gather("position", self.obstacle, "begin to train")
            self.obstacle = next((obstacle for obstacle in everyone if obstacle is not None), None)

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; `None` if that is not (yet) known."""
        return self._own_size if self._dataset_fn is not None else self._iterator.num_batches

    # Saving and resuming

    def state(self, tensors: dict[str, Any], mid_epoch: bool) -> dict:
        """The position as JSON-serialisable data; what is not JSON goes into `tensors`."""
        iterator = self._iterator
        state = {
            "made": self._made,
            "used": self._used,
            "taken": iterator._steps_seen,
            "steps": self._in_epoch if mid_epoch else 0,
            "goes on": mid_epoch or (iterator.steps_per_epoch is not None and iterator._current_iterator is not None),
            "batches": iterator._num_batches,
            "facts": self._facts,
            "glance": self._glance,
            "array seed": self._array_seed,
            "global seed": context.global_seed(),
            **self._data.order,
        }
        if state["goes on"] and self._saves_iterator:
            tensors[_ITERATOR] = tf.raw_ops.SerializeIterator(
                resource_handle=iterator._current_iterator._iterator_resource, external_state_policy=_FAIL
            )
        if self._py_dataset is not None:
            state["random at begin"] = self._random_at_begin
            kind = _kind_of_state(self._py_dataset)
            if kind == _OWN or not mid_epoch:
                state[kind] = state_of(self._py_dataset, tensors, kind)
        return state

    @property
    def _reads_own_rows(self) -> bool:
        """Whether the user has cut the data: each process has rows of its own, in an order of its own."""
        return self._data.is_sharded or getattr(self._iterator._distributed_dataset, "manual", False)

    @functools.cached_property
    def _facts(self) -> dict:
        """Facts about the data; a position within an epoch is valid only where they are the same."""
        peers = hooks_of(self._model.distribute_strategy).peers
        if peers and peers.rank and self._reads_own_rows:
            return {}  # what is saved are the chief's
        source = self._data.source
        known = isinstance(source, tf.data.Dataset) and self._dataset_fn is None
        return {
            _BATCHES: None if self._dataset_fn else self._iterator.data_adapter.num_batches,
            "components of a batch": str(source.element_spec),
            # All processes have to find the same: those with rows of their own may have batches of their own.
            _SIZES: batch_sizes(source) if known and not (self._is_arrays or self._reads_own_rows) else None,
            "seeds of its shuffling": []
            if not known or self._is_arrays or self._data.seeds_are_drawn
            else seeds(source),
        }

    @functools.cached_property
    def _glance(self) -> list[float]:
        """Numbers that tell whether the data are others than before; empty where that is not known."""
        source = self._data.source
        if self._is_arrays or self._dataset_fn is not None or not isinstance(source, tf.data.Dataset):
            found = glance_at_arrays(self._iterator)
        else:
            found = glance_at_sources(source)
        return [number if abs(number) < _LARGEST else 0.0 for number in found]  # JSON has no infinity

    def resume(self, meta: dict, tensors: Mapping[str, Any]) -> None:
        """Makes the first epoch begin at the position of a backup.

        Raises:
            ValueError: the position is within an epoch of other data.
        """
        state = meta["position"]
        if state["steps"]:
            if self.obstacle:
                raise ValueError(
                    "The backup was made within an epoch of data whose position could be found again. Received data "
                    f"for which it cannot: {self.obstacle}. "
                    "Expected: the same data as before; or pass another backup_dir to start over."
                )
            for what, now in self._facts.items():
                then = state["facts"].get(what)
                if now != then and not (what in (_BATCHES, _SIZES) and None in (now, then)):
                    raise ValueError(
                        f"The backup was made within an epoch of other data. Received: {what}: {now}. Expected, as "
                        f"saved: {then}. Pass the same data (with the same seeds) as before, or another backup_dir to "
                        "start over."
                    )
        if self._dataset_fn is None:
            self._data.give(state)
        peers = hooks_of(self._model.distribute_strategy).peers
        if not (peers and peers.rank) and not near(self._glance, state.get("glance", self._glance)):
            warnings.warn(
                "Received: arrays, or names of files, that are others than when the backup was made, or in another "
                "order. The fit goes on with them: it may train on rows that were for validation before, and in an "
                "epoch that has begun some come twice, and others never. Expected: the same data at each start. Seed "
                "what splits or shuffles them (keras.utils.set_random_seed, random_state=), and sort names of files.",
                stacklevel=2,
            )
        if not _drawn.isdisjoint(self._drawing):
            warnings.warn(
                "Received: a dataset that shuffles, and that a fit of this process has read which has failed. What its "
                "seeds have drawn cannot be drawn again: this fit goes on with rows in another order, and of an epoch "
                "that has begun some come twice, and others never. Expected: a dataset that is made anew for each "
                "attempt, or another process.",
                stacklevel=2,
            )
        self._resumed = {**state, _ITERATOR: tensors.get(_ITERATOR), "random": meta["random"]}
        self.epoch = meta["epoch"]
        if self._is_arrays:
            self._array_seed = state["array seed"]
            if self._array_seed is None and state["global seed"] != context.global_seed():
                # The chief of a cluster has drawn another seed; the order of the rows depends on it.
                with _global_seed(state["global seed"]):
                    dataset = self._data.distribute(self._iterator.data_adapter.get_tf_dataset())
                    self._iterator._distributed_dataset = dataset
        if self._py_dataset is not None and (kind := _kind_of_state(self._py_dataset)) in state:
            give_back(self._py_dataset, state[kind], tensors)

    @property
    def _drawing(self) -> list[tf.data.Dataset]:
        """The parts of the program's pipeline that draw other seeds for each iterator; none if it was made anew."""
        source = self._data.source
        if self._dataset_fn is not None or self._is_arrays or not isinstance(source, tf.data.Dataset):
            return []
        parts = parts_that_draw(source) if order_of(source) is None else []
        return [part for part in parts if getattr(part, "_reshuffle_each_iteration", True)]

    def ended(self) -> None:
        """When the fit has come to its end."""
        _drawn.difference_update(self._drawing)

    def pass_over(self) -> None:
        """Draws the seeds that a finished fit has drawn: a later fit may read the same pipeline.

        Where that takes elements, it waits for such a fit: most scripts have none, and are to end at once.
        """
        source = self._data.source
        if self._dataset_fn is not None or self._is_arrays or not isinstance(source, tf.data.Dataset):
            return
        if draws_seeds(source):
            _passed_over.append(self)
            if not replay_takes_elements(source):
                self._catch_up()

    def follow(self) -> None:
        """Before a fit begins: draws what finished fits were left to draw from parts that its pipeline shares."""
        source = self._data.source
        own = set(map(id, parts_that_draw(source))) if _passed_over and isinstance(source, tf.data.Dataset) else set()
        for before in list(_passed_over):
            if not own.isdisjoint(map(id, parts_that_draw(before._data.source))):
                before._catch_up()

    def _catch_up(self) -> None:
        _passed_over.remove(self)
        state, now = self._resumed, random_state()
        if state[_ITERATOR] is not None:  # it knows how often it has drawn
            self._find(state)
        else:
            replay(self._data.source, self._make, state["made"], _used_of(state))
        restore_random_state(now)

    # The steps of an epoch

    def _enumerate(self) -> Iterator:
        """In place of `EpochIterator._enumerate_iterator`: begins at the position of the training."""
        iterator, resumed = self._iterator, self._resumed
        self._resumed = None
        _drawn.update(self._drawing)
        if self._py_dataset is not None:
            self._note_random_at_begin(resumed)
        iterator.data_adapter.on_epoch_begin()
        first = current = 0
        if resumed:
            first, current = resumed["steps"], self._find(resumed)
        if self._dataset_fn is not None:
            yield from self._steps_of_own_dataset(first)
            return
        size = iterator.steps_per_epoch or iterator._num_batches or -1
        if not current and (size < 0 or iterator._current_iterator is None or iterator.steps_per_epoch is None):
            iterator._current_iterator = self._make()
            iterator._steps_seen = 0
        step = first
        while size < 0 or step < size:
            if size > 0 and iterator._num_batches and iterator._steps_seen >= iterator._num_batches:
                if iterator.steps_per_epoch:
                    iterator._interrupted_warning()
                break
            yield from self._execution(step)
            step += iterator.steps_per_execution
        if iterator._num_batches and iterator._steps_seen >= iterator._num_batches:
            self._begin_again()
        iterator.data_adapter.on_epoch_end()

    def _note_random_at_begin(self, resumed: dict | None) -> None:
        """An iterator over a PyDataset draws its order with its first batch, and may go on in the next epoch."""
        iterator = self._iterator
        is_drawn = iterator._current_iterator is not None and iterator.steps_per_epoch and iterator._steps_seen
        if resumed and (is_drawn := resumed["goes on"] and resumed["taken"]) and resumed.get("random at begin"):
            restore_random_state(resumed["random at begin"])
        if resumed or not is_drawn:
            self._random_at_begin = random_state()

    def _begin_again(self) -> None:
        """At the end of the data."""
        iterator = self._iterator
        if self._array_seed is not None and iterator.steps_per_epoch is None:
            # Keras makes one that nobody uses. Making it takes as long as many steps: it is only counted.
            self._made += 1
            iterator._current_iterator = None
        else:
            iterator._current_iterator = self._make()
        iterator._steps_seen = 0

    def _execution(self, step: int) -> Iterator:
        iterator = self._iterator
        self._used += not iterator._steps_seen
        iterator._steps_seen += iterator.steps_per_execution
        yield step, step + iterator.steps_per_execution - 1, iterator._current_iterator
        self._in_epoch = step + iterator.steps_per_execution
        self._after_step(self._in_epoch)

    def _steps_of_own_dataset(self, first: int) -> Iterator:
        iterator = self._iterator
        dataset = self._dataset_fn(self.epoch)
        size = iterator.steps_per_epoch or int(dataset.cardinality())
        self._own_size = size if size > 0 else None
        distributed = self._data.distribute(dataset)
        iterator._current_iterator = iter(self._after(first, distributed, dataset) if first else distributed)
        step = first
        while size < 0 or step < size:
            yield from self._execution(step)
            step += iterator.steps_per_execution

    def _find(self, state: dict) -> bool:
        """Makes the iterators that were made before; returns whether the training continues with the last one."""
        iterator = self._iterator
        if self._dataset_fn is not None:
            return False
        then, now = state["facts"].get(_SIZES), self._facts.get(_SIZES)
        if iterator._num_batches is None and (then == now or None in (then, now)):
            iterator._num_batches = state["batches"]  # learnt when the data ended for the first time
        goes_on = state["goes on"]
        before = state["made"] - int(goes_on)
        used = _used_of(state)
        source = self._data.source
        if isinstance(source, tf.data.Dataset) and not self._is_arrays and draws_seeds(source):
            replay(source, self._make, before, used - bool(goes_on and state["taken"]))
        self._made, self._used = before, used
        if goes_on:
            saved = state.pop(_ITERATOR)  # it may be large, and is needed once
            iterator._current_iterator = self._make(skip=0 if saved is not None else state["taken"])
            if saved is not None:
                tf.raw_ops.DeserializeIterator(
                    resource_handle=iterator._current_iterator._iterator_resource, serialized=saved
                )
            iterator._steps_seen = state["taken"]
            restore_random_state(state["random"])  # finding the position may have drawn random numbers
        return goes_on

    def _make(self, skip: int = 0) -> Any:
        self._made += 1
        dataset = self._iterator._distributed_dataset
        if self._array_seed is not None:
            with _global_seed((self._array_seed + self._made) % 2**31):
                dataset = self._data.distribute(self._iterator.data_adapter.get_tf_dataset().skip(skip))
            return iter(dataset)
        if self._py_dataset is not None or self._data.is_sharded:
            # Not `Dataset.skip`: the order of a PyDataset is drawn together with the first batch, and that has to be
            # now; and TensorFlow would shard what is left.
            made = iter(dataset)
            for _ in range(skip):
                next(made)
            return made
        source = self._data.source
        # Data that the workers read by themselves begin again.
        if skip and isinstance(source, tf.data.Dataset):
            size = getattr(dataset, "_cardinality", None)
            dataset = self._after(skip, dataset, source)
            if size is not None:
                dataset._cardinality = size  # part of the type of the iterator: another one would be traced again
        return iter(dataset)

    def _after(self, steps: int, distributed: Any, dataset: tf.data.Dataset) -> Any:
        """A distributed dataset without its first steps."""
        # Of data that the user has sharded, a step takes less than a batch.
        return distributed.skip(steps) if hasattr(distributed, "skip") else self._data.distribute(dataset.skip(steps))


def generators_in(dataset: Any) -> list[Any]:
    """The random number generators in the attributes of a PyDataset, and of the layers and objects in these."""
    found, seen, waiting = [], set(), [dataset]
    for one in waiting:  # which grows
        values = [v for v in vars(one).values() if not isinstance(v, (list, tuple, dict)) or len(v) <= _LONGEST]
        for item in items_of(values):
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, _GENERATORS):
                found.append(item)
            elif isinstance(item, keras.Layer) or is_users(item):
                waiting.append(item)
    return found


def _kind_of_state(dataset: Any) -> str:
    """What is saved of a PyDataset, as its name in a position: a state of its own, or its generators."""
    return _OWN if hasattr(dataset, "get_state") and hasattr(dataset, "set_state") else "generators"


def state_of(dataset: Any, arrays: dict[str, Any], prefix: str) -> Any:
    """What a PyDataset gets back in another process, as JSON: of its `get_state()`, or its generators."""
    held = dataset.get_state() if _kind_of_state(dataset) == _OWN else generators_in(dataset)
    return callback_state.encode(held, arrays, prefix)


def give_back(dataset: Any, state: Any, arrays: Mapping[str, Any]) -> None:
    """Gives a PyDataset what `state_of` has returned in another process."""
    if _kind_of_state(dataset) == _OWN:
        dataset.set_state(callback_state.decode(state, arrays))
    else:
        callback_state.decode(state, arrays, generators_in(dataset))


def _used_of(state: Mapping[str, Any]) -> int:
    # A backup of an earlier version does not tell: all but those that Keras makes at the ends of epochs, in vain.
    return state.get("used", -(-state["made"] // 2))


@contextlib.contextmanager
def _global_seed(seed: int | None) -> Iterator[None]:
    """Sets TensorFlow's global seed for a block, and leaves no trace of it."""
    before = random_state()
    tf.random.set_seed(seed)
    try:
        yield
    finally:
        restore_random_state(before)


def made_by_validation(iterator: Any) -> tuple[int, int | None]:
    """How many iterators Keras makes for a validation, and how many batches it takes; `None` for all that there are.

    It makes a second one, in vain, where the steps have come to the end of the data.

    Args:
        iterator: Keras' own over the data of validations.
    """
    size, each = iterator._num_batches, iterator.steps_per_execution
    steps = iterator.steps_per_epoch
    taken = steps and -(-steps // each) * each
    if size is None:
        return 1, taken
    return (2, None) if taken is None or taken >= size else (1, taken)


class ReadData:
    """The dataset that one of Keras' iterators reads.

    Args:
        model: whose iterator it is.
        epoch_iterator: the iterator.

    Attributes:
        no_order: why the dataset cannot be given an order that it lacks; `None` otherwise.
    """

    def __init__(self, model: keras.Model, epoch_iterator: Any):
        self._model, self._iterator = model, epoch_iterator
        self.no_order: str | None = None

    @property
    def order(self) -> dict[str, Any]:
        """The order that the dataset was given, for a backup; empty if it has its own."""
        source = self.source
        order = order_of(source) if isinstance(source, tf.data.Dataset) else None
        return {} if order is None else {"order": order.slots, "order is shared": order.shared}

    def give(self, saved: Mapping[str, Any]) -> None:
        """Gives the dataset an order that `order` has returned, in another process.

        Raises:
            NoOrderError: if it is that of another dataset.
        """
        source = self.source
        if "order" in saved and isinstance(source, tf.data.Dataset):
            order = order_of(source)
            again = Order(source if order is None else order.source, bool(saved.get("order is shared")))
            self.read(again.dataset(saved["order"], every=self.seeds_are_drawn))

    def read(self, dataset: tf.data.Dataset) -> None:
        """Makes Keras' iterator read another dataset of batches."""
        before = self._iterator._distributed_dataset
        if isinstance(before, ReplicaBatchDataset):
            after = before.with_source(dataset)
        elif isinstance(before, input_lib.DistributedDatasetsFromFunction):
            after = self._model.distribute_strategy.distribute_datasets_from_function(lambda context: dataset)
        else:
            after = self.distribute(dataset)
        self._iterator._distributed_dataset = after
        if hasattr(before, "steps"):
            after.steps = before.steps

    def put_in_order(self) -> None:
        """Gives a dataset one order where it has none, or notes the one that it has by chance: for another process."""
        source = self.source
        if not isinstance(source, tf.data.Dataset) or not isinstance(self._iterator.data_adapter, TFDatasetAdapter):
            return
        try:
            ordered = self._ordered(source)
        except NoOrderError as error:
            self.no_order = str(error)
            return
        if ordered is not source:
            self.read(ordered)

    def _ordered(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        strategy = self._model.distribute_strategy
        always = goes_by_processors(dataset) or (self.seeds_are_drawn and bool(seeds(dataset)))
        if hooks_of(strategy).peers:
            return in_common_order(strategy, dataset, always)
        ordered = in_order(dataset, shared=False, always=always)
        if ordered is not dataset and (reasons := order_of(ordered).reasons):
            _log.warning(
                "The dataset has no order of its own (%s): it was given one, which the backup keeps. To choose it "
                "yourself, give it seeds, and no deterministic=False.",
                ", ".join(reasons),
            )
        return ordered

    @property
    def seeds_are_drawn(self) -> bool:
        """Whether the processes have agreed on a random seed, as none was set."""
        return not hooks_of(self._model.distribute_strategy).seed_is_given

    @property
    def source(self) -> Any:
        """Keras' dataset of the batches of an epoch, before a strategy has split it; or what this process reads."""
        dataset = self._iterator._distributed_dataset
        if not self.is_sharded:
            return getattr(dataset, "source", dataset)
        if isinstance(dataset, input_lib.DistributedDatasetsFromFunction):
            return dataset._datasets[0]
        return self._iterator.data_adapter.get_tf_dataset()

    @property
    def is_sharded(self) -> bool:
        """Whether TensorFlow distributes the data, so that each process reads its own and all agree at each step."""
        dataset = self._iterator._distributed_dataset
        kinds = (input_lib.DistributedDataset, input_lib.DistributedDatasetsFromFunction)
        is_data_parallel = hooks_of(self._model.distribute_strategy).is_data_parallel
        return isinstance(dataset, kinds) and not hasattr(dataset, "source") and is_data_parallel

    def distribute(self, dataset: tf.data.Dataset) -> Any:
        strategy = self._model.distribute_strategy
        with strategy._keras_input() if hooks_of(strategy).is_data_parallel else contextlib.nullcontext():
            return strategy.experimental_distribute_dataset(dataset)
