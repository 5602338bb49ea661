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
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoint import plain_data
from tfdist.compat.hooks import hooks_of
from tfdist.compat.upstream import ArrayDataAdapter, GrainDatasetAdapter, PyDatasetAdapter, TFDatasetAdapter, context
from tfdist.inspection import random_state
from tfdist.inspection.dataset_properties import can_save_iterator, draws_seeds, seeds, why_not_repeatable

# Name of the iterator's state among the tensors of a backup. TensorFlow refuses iterators that have a state elsewhere.
_ITERATOR = "iterator"
_FAIL = 2
_HOOKS = ("on_epoch_begin", "on_epoch_end")
# What to do about each reason of `why_not_repeatable`; the first entry whose text is in the reason counts.
_REMEDIES = (
    ("augmentation layer", "put the layer into the model, or use tf.image.stateless_random_* in map"),
    ("Python code", "use a keras.utils.PyDataset, or operations of TensorFlow"),
    ("tf.random.Generator", "use tf.random.stateless_*"),
    ("in parallel", "use tf.random.stateless_*, or map without num_parallel_calls"),
    ("not deterministic", "remove deterministic=False"),
    ("", "keras.utils.set_random_seed, called first, seeds all that has no seed"),
)


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
        self._after_step = after_step
        self._made = 0
        self._in_epoch = 0
        self._own_size: int | None = None
        self._resumed: dict | None = None
        self._saved_iterator: tf.Tensor | None = None
        self._random_at_begin: list | None = None
        self._random_when_saved: list | None = None
        adapter = epoch_iterator.data_adapter
        self._is_arrays = isinstance(adapter, ArrayDataAdapter) and dataset_fn is None
        self._py_dataset = adapter.py_dataset if isinstance(adapter, PyDatasetAdapter) and dataset_fn is None else None
        self._grain = self._record_grain()
        self._array_seed = self._new_array_seed()
        self._saves_iterator = self._should_save_iterator()
        self.obstacle = None if self._saves_iterator else self._find_obstacle()
        self.epoch = 0
        epoch_iterator._enumerate_iterator = self._enumerate

    def _record_grain(self) -> Any:
        """The Grain dataset, if the data are one, from now on one that tells its position where that can be found."""
        adapter, before = self._iterator.data_adapter, self._iterator._distributed_dataset
        if not isinstance(adapter, GrainDatasetAdapter) or self._dataset_fn is not None:
            return None
        from tfdist.checkpoint.position.grain import RecordedDataset  # it imports Grain, which not everybody has

        recorded = RecordedDataset(adapter._dataset)
        if recorded.obstacle is not None:
            return recorded  # it would ask for states that there are not
        adapter._dataset = recorded
        self._iterator._distributed_dataset = after = self._distribute(adapter.get_tf_dataset())
        if hasattr(before, "steps"):
            after.steps = before.steps
        return recorded

    def _find_obstacle(self) -> str | None:
        if self._dataset_fn is not None or self._is_arrays:
            return None
        if self._grain is not None:
            return self._grain.obstacle
        adapter = self._iterator.data_adapter
        if self._py_dataset is not None:
            changes = any(
                getattr(type(self._py_dataset), hook) is not getattr(keras.utils.PyDataset, hook) for hook in _HOOKS
            )
            if self._py_dataset.num_batches is None:
                return "a PyDataset without a length is a generator"
            if changes and not hasattr(self._py_dataset, "get_state"):
                return (
                    f"{type(self._py_dataset).__name__} changes in on_epoch_begin or on_epoch_end; give it get_state() "
                    "and set_state(state), and that can be saved"
                )
            if self._draws_random_numbers():
                return (
                    f"{type(self._py_dataset).__name__}.__getitem__ draws from the global random state of Python, "
                    "NumPy or TensorFlow; draw from a generator that is made from the index instead, such as "
                    "np.random.default_rng(index)"
                )
            return None
        if not isinstance(adapter, TFDatasetAdapter):
            return f"the data come from a {type(adapter).__name__.removesuffix('DataAdapter').lower()}, not a dataset"
        source = self._source()
        if not isinstance(source, tf.data.Dataset):
            return f"the data are a {type(source).__name__}, which the workers read by themselves"
        reason = why_not_repeatable(source)
        if reason is None and seeds(source) and not getattr(self._model.distribute_strategy, "_seed_is_given", True):
            reason = "no seed was set, so that the processes agreed on a random one"
        return reason and f"{reason}; {next(remedy for part, remedy in _REMEDIES if part in reason)}"

    def _draws_random_numbers(self) -> bool:
        """Whether an item depends on the global random state, which the threads that read ahead change at any time."""
        before = random_state.capture()
        self._py_dataset[0]
        if random_state.capture() == before:
            return False
        random_state.restore(before)
        return True

    def _should_save_iterator(self) -> bool:
        """Whether the state of the iterator itself is saved.

        That state holds all rows of a shuffle's buffer. So it is saved only where no position can be found again (the
        order comes from no seed), or where one iterator serves the whole training, so that all data before the position
        would have to be read again.
        """
        dataset, adapter = self._iterator._distributed_dataset, self._iterator.data_adapter
        if self._dataset_fn is not None or not isinstance(adapter, TFDatasetAdapter):
            return False
        if not isinstance(dataset, tf.data.Dataset) or not can_save_iterator(dataset):
            return False
        return self._iterator.steps_per_epoch is not None or why_not_repeatable(dataset) is not None

    def _source(self) -> Any:
        """Keras' dataset of the batches of an epoch, before a strategy has split it."""
        dataset = self._iterator._distributed_dataset
        return getattr(dataset, "source", dataset)

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
            "taken": iterator._steps_seen,
            "steps": self._in_epoch if mid_epoch else 0,
            "goes on": mid_epoch or (iterator.steps_per_epoch is not None and iterator._current_iterator is not None),
            "batches": iterator._num_batches,
            "facts": self._facts,
            "array seed": self._array_seed,
            "global seed": context.global_seed(),
        }
        if state["goes on"] and self._saves_iterator:
            tensors[_ITERATOR] = tf.raw_ops.SerializeIterator(
                resource_handle=iterator._current_iterator._iterator_resource, external_state_policy=_FAIL
            )
        if self._grain is not None and state["goes on"] and state["taken"] and self.obstacle is None:
            state["grain"] = self._grain.state_after(iterator._steps_seen)
        if self._py_dataset is not None:
            state["random at begin"] = self._random_at_begin
            if hasattr(self._py_dataset, "get_state"):
                state["dataset"] = plain_data.encode(self._py_dataset.get_state(), tensors, "dataset")
        return state

    @functools.cached_property
    def _facts(self) -> dict:
        """Facts about the data; a position within an epoch is valid only where they are the same."""
        source = self._source()
        known = isinstance(source, tf.data.Dataset) and self._dataset_fn is None
        return {
            "number of batches": None if self._dataset_fn else self._iterator.data_adapter.num_batches,
            "components of a batch": str(source.element_spec),
            "seeds of its shuffling": seeds(source) if known and not self._is_arrays else [],
        }

    def resume(self, epoch: int, state: dict, tensors: Mapping[str, Any]) -> None:
        """Makes the first epoch begin at a saved position.

        Raises:
            ValueError: the position is within an epoch of other data.
        """
        if state["steps"]:
            if self.obstacle:
                raise ValueError(
                    "The backup was made within an epoch of data whose position could be found again. Received data "
                    f"for which it cannot: {self.obstacle}. "
                    "Expected: the same data as before; or pass another backup_dir to begin anew."
                )
            for what, now in self._facts.items():
                then = state["facts"].get(what)
                if now != then and not (what == "number of batches" and None in (now, then)):
                    raise ValueError(
                        f"The backup was made within an epoch of other data. Received: {what}: {now}. Expected, as "
                        f"saved: {then}. Pass the same data (with the same seeds) as before, or another backup_dir to "
                        "begin anew."
                    )
        if "grain" in state and self._grain is not None and self.obstacle is None:
            self._grain.check(state["grain"])
        self._resumed = state
        self._saved_iterator = tensors.get(_ITERATOR)
        self.epoch = epoch
        if self._is_arrays:
            self._array_seed = state["array seed"]
            if self._array_seed is None and state["global seed"] != context.global_seed():
                # The chief of a cluster has drawn another seed; the order of the rows depends on it.
                with _global_seed(state["global seed"]):
                    self._iterator._distributed_dataset = self._distribute(self._iterator.data_adapter.get_tf_dataset())
        if "dataset" in state and hasattr(self._py_dataset, "set_state"):
            self._py_dataset.set_state(plain_data.decode(state["dataset"], tensors))

    def leave_random_state(self, state: list) -> None:
        """Sets the random state, and sets it again once the position is found: finding it may draw random numbers."""
        self._random_when_saved = state
        random_state.restore(state)

    # The steps of an epoch

    def _enumerate(self) -> Iterator:
        """In place of `EpochIterator._enumerate_iterator`: begins at the position of the training."""
        iterator, resumed = self._iterator, self._resumed
        self._resumed = None
        if self._py_dataset is not None:
            if resumed and resumed["steps"] and resumed.get("random at begin"):
                random_state.restore(resumed["random at begin"])
            self._random_at_begin = random_state.capture()
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
            if self._array_seed is not None and iterator.steps_per_epoch is None:
                # Keras makes one that nobody uses. Making it takes as long as many steps: it is only counted.
                self._made += 1
                iterator._current_iterator = None
            else:
                iterator._current_iterator = self._make()
            iterator._steps_seen = 0
        iterator.data_adapter.on_epoch_end()

    def _execution(self, step: int) -> Iterator:
        iterator = self._iterator
        iterator._steps_seen += iterator.steps_per_execution
        yield step, step + iterator.steps_per_execution - 1, iterator._current_iterator
        self._in_epoch = step + iterator.steps_per_execution
        if self._grain is not None:
            self._grain.forget_before(iterator._steps_seen)
        self._after_step(self._in_epoch)

    def _steps_of_own_dataset(self, first: int) -> Iterator:
        iterator = self._iterator
        dataset = self._dataset_fn(self.epoch)
        size = iterator.steps_per_epoch or int(dataset.cardinality())
        self._own_size = size if size > 0 else None
        distributed = self._distribute(dataset)
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
        if iterator._num_batches is None:
            iterator._num_batches = state["batches"]  # learnt when the data ended for the first time
        goes_on = state["goes on"]
        before = state["made"] - int(goes_on)
        source = self._source()
        if isinstance(source, tf.data.Dataset) and not self._is_arrays and draws_seeds(source):
            for _ in range(before):
                self._make()
        self._made = before
        if goes_on:
            has_grain = "grain" in state and self._grain is not None and self.obstacle is None
            has_state = self._saved_iterator is not None or has_grain
            if has_grain:
                self._grain.begin_at(state["taken"], state["grain"])
            iterator._current_iterator = self._make(skip=0 if has_state else state["taken"])
            if self._saved_iterator is not None:
                tf.raw_ops.DeserializeIterator(
                    resource_handle=iterator._current_iterator._iterator_resource, serialized=self._saved_iterator
                )
                self._saved_iterator = None
            iterator._steps_seen = state["taken"]
            if self._random_when_saved is not None:
                random_state.restore(self._random_when_saved)
        return goes_on

    def _make(self, skip: int = 0) -> Any:
        self._made += 1
        dataset = self._iterator._distributed_dataset
        if self._array_seed is not None:
            with _global_seed((self._array_seed + self._made) % 2**31):
                dataset = self._distribute(self._iterator.data_adapter.get_tf_dataset().skip(skip))
            return iter(dataset)
        if self._py_dataset is not None:
            # Not `Dataset.skip`: the order is drawn together with the first batch, and that has to be now.
            made = iter(dataset)
            for _ in range(skip):
                next(made)
            return made
        source = self._source()
        # Data that the workers read by themselves begin anew.
        if skip and isinstance(source, tf.data.Dataset):
            size = getattr(dataset, "_cardinality", None)
            dataset = self._after(skip, dataset, source)
            if size is not None:
                dataset._cardinality = size  # part of the type of the iterator: another one would be traced again
        return iter(dataset)

    def _after(self, steps: int, distributed: Any, dataset: tf.data.Dataset) -> Any:
        """A distributed dataset without its first steps."""
        # Of data that the user has sharded, a step takes less than a batch.
        return distributed.skip(steps) if hasattr(distributed, "skip") else self._distribute(dataset.skip(steps))

    def _distribute(self, dataset: tf.data.Dataset) -> Any:
        strategy = self._model.distribute_strategy
        if not hooks_of(strategy).is_data_parallel:
            return strategy.experimental_distribute_dataset(dataset)
        with strategy._keras_input():
            return strategy.experimental_distribute_dataset(dataset)

    def _new_array_seed(self) -> int | None:
        """A seed for the order of arrays, if nothing else says what order they come in."""
        adapter = self._iterator.data_adapter
        if not self._is_arrays or not adapter._shuffle or context.global_seed() is not None:
            return None
        return random.SystemRandom().randrange(2**31)


@contextlib.contextmanager
def _global_seed(seed: int | None) -> Iterator[None]:
    """Sets TensorFlow's global seed for a block, and leaves no trace of it."""
    before = random_state.capture()
    tf.random.set_seed(seed)
    try:
        yield
    finally:
        random_state.restore(before)
