"""Keras' `EpochIterator` of a call of fit, evaluate or predict: which one it is, and what its batches look like."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfdist.compat.upstream import ArrayDataAdapter, PerReplicaSpec

# Weak references on both sides: this table must keep neither a model nor its data alive.
_latest: weakref.WeakKeyDictionary[keras.Model, weakref.ref] = weakref.WeakKeyDictionary()

# How many rows are read at each end of an array, and about how many of their numbers.
_GLANCE, _NUMBERS = 16, 1 << 16
_KEEPS_BATCHES = (
    "_PrefetchDataset",
    "_RepeatDataset",
    "_TakeDataset",
    "_SkipDataset",
    "_OptionsDataset",
    "_CacheDataset",
)
# What comes after the rows of arrays were taken.
_KEEPS_ELEMENTS = ("_PrefetchDataset", "_OptionsDataset", "_SkipDataset")


def note(model: keras.Model, epoch_iterator: Any) -> None:
    """Notes that Keras has made an iterator for a model."""
    _latest[model] = weakref.ref(epoch_iterator)


def latest(model: keras.Model) -> Any:
    """The iterator that Keras made last for a model, if it is still in use; at the beginning of a fit, that fit's."""
    reference = _latest.get(model)
    return reference() if reference is not None else None


def rows_of_arrays(epoch_iterator: Any) -> int | None:
    """The number of rows, if Keras makes the dataset from arrays; it cannot be read from that dataset."""
    adapter = getattr(epoch_iterator, "data_adapter", None)
    return adapter._num_samples if isinstance(adapter, ArrayDataAdapter) else None


class ArraySource(NamedTuple):
    """What Keras makes the batches of arrays from.

    Attributes:
        indices: a dataset of the numbers of the rows of each batch, int64 vectors.
        arrays: a dataset of the arrays as tensors, the same ones without an end.
        take: returns the rows with these numbers, from an element of `indices` and one of `arrays`.
    """

    indices: tf.data.Dataset
    arrays: tf.data.Dataset
    take: Callable[[tf.Tensor, Any], Any]


def array_source(dataset: tf.data.Dataset) -> ArraySource | None:
    """The source of a dataset that Keras has made from arrays, also after `skip`; `None` for any other dataset."""
    skipped = []
    while type(dataset).__name__ in _KEEPS_ELEMENTS:
        skipped += [dataset._count] if hasattr(dataset, "_count") else []
        dataset = dataset._input_dataset
    take = getattr(getattr(dataset, "_map_func", None), "_func", None)
    # Numbers and arrays, side by side. The numbers are made by functions of the same module.
    sources = getattr(getattr(dataset, "_input_dataset", None), "_datasets", ())
    if getattr(take, "__module__", None) != ArrayDataAdapter.__module__ or len(sources) != 2:
        return None
    indices, arrays = sources
    for count in skipped:
        indices = indices.skip(count)
    return ArraySource(indices, arrays, take)


def glance_at_arrays(epoch_iterator: Any) -> list[float]:
    """Some sums over the first and the last rows of arrays; empty if the data are no arrays.

    Processes compare them to see whether they were given different rows. The sums do not depend on the last bits of a
    number.
    """
    adapter = getattr(epoch_iterator, "data_adapter", None)
    if not isinstance(adapter, ArrayDataAdapter):
        return []
    sums = []
    for array in tree.flatten(adapter._inputs):
        if isinstance(array, (np.ndarray, tf.Tensor)) and (np.dtype(_name(array.dtype)).kind in "fiub"):
            for rows in (array[:_GLANCE], array[-_GLANCE:]):
                values = np.asarray(rows).ravel()
                values = values[:: max(1, values.size // _NUMBERS)].astype("float64")
                size = float(np.abs(values).sum())
                # The second sum depends on the order of the numbers. It is divided by the size, so that rounding errors
                # stay small.
                sums += [size, float(values @ np.linspace(1, 2, len(values))) / size if size else 0.0]
    return sums


def _name(dtype: Any) -> Any:
    return getattr(dtype, "as_numpy_dtype", dtype)


def batch_size(epoch_iterator: Any) -> int | None:
    """The number of rows of all batches but the last one, if it is known without taking one."""
    adapter = getattr(epoch_iterator, "data_adapter", None)
    if isinstance(adapter, ArrayDataAdapter):
        return adapter.batch_size
    dataset = getattr(epoch_iterator, "_distributed_dataset", None)
    while dataset is not None:
        size = getattr(dataset, "_batch_size", None)
        if size is not None:
            return tf.get_static_value(size)
        # Goes back through datasets that come after batching and do not change the rows.
        dataset = dataset._input_dataset if type(dataset).__name__ in _KEEPS_BATCHES else None
    return None


def batch_specification(epoch_iterator: Any) -> Any:
    """The specification of a batch, without taking one: `tf.TensorSpec`s, and `None` for what is no tensor."""
    dataset = epoch_iterator._distributed_dataset
    return tf.nest.map_structure(_of_one_replica, getattr(dataset, "source", dataset).element_spec)


def _of_one_replica(spec: Any) -> Any:
    if isinstance(spec, PerReplicaSpec):
        spec = spec._value_specs[0]
    return spec if hasattr(spec, "shape") and hasattr(spec, "dtype") else None
