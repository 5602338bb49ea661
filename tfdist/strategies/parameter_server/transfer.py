"""Values on their way between a worker and the coordinator: packed into few tensors, and fetched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.parameter_server.variables import COORDINATOR


def fetch(tensor: tf.Tensor) -> np.ndarray:
    """The value of a tensor that may be on another process.

    `tensor.numpy()`, and making a tensor while a device of another process is entered, hold Python's lock until that
    process answers. If it hangs, all threads of the coordinator hang. An operation (`identity`) does not hold it.

    Example:
        >>> fetch(tf.constant([1, 2])).tolist()  # doctest: +SKIP
        [1, 2]
    """
    with tf.device(COORDINATOR):
        return tf.identity(tensor).numpy()


def local_constant(value: np.ndarray) -> tf.Tensor:
    """A tensor on the coordinator, whatever device is entered.

    Example:
        >>> int(local_constant(np.int32(3)))  # doctest: +SKIP
        3
    """
    with tf.device(COORDINATOR):
        return tf.constant(value)


class Packing:
    """Packs tensors of known shapes into one vector for each dtype, and unpacks them.

    Each transfer between processes costs as much as some kilobytes, so few large tensors travel faster than many small
    ones.

    Args:
        shapes: the shapes of the tensors.
        dtypes: the dtypes of the tensors.

    Example:
        >>> packing = Packing([(2,), ()], [tf.float32, tf.float32])
        >>> [vector] = packing.pack([tf.constant([1.0, 2.0]), tf.constant(3.0)])
        >>> [array.tolist() for array in packing.unpack([vector.numpy()])]
        [[1.0, 2.0], 3.0]
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[tf.DType]):
        self._shapes = [tuple(shape) for shape in shapes]
        self._dtypes = [tf.as_dtype(dtype) for dtype in dtypes]
        self._groups = list(dict.fromkeys(self._dtypes))

    @property
    def length(self) -> int:
        """The number of values in all vectors."""
        return sum(math.prod(shape) for shape in self._shapes)

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """One vector for each dtype, in the order of the first tensors of it."""
        return [
            tf.concat([tf.reshape(t, [-1]) for t, own in zip(tensors, self._dtypes, strict=True) if own == dtype], 0)
            for dtype in self._groups
        ]

    def unpack(self, vectors: Sequence[Any]) -> list[Any]:
        """The tensors again, from vectors that are arrays or tensors."""
        offsets = dict.fromkeys(self._groups, 0)
        found = dict(zip(self._groups, vectors, strict=True))
        arrays = []
        for shape, dtype in zip(self._shapes, self._dtypes, strict=True):
            begin = offsets[dtype]
            offsets[dtype] = end = begin + math.prod(shape)
            part = found[dtype][begin:end]
            arrays.append(part.reshape(shape) if isinstance(part, np.ndarray) else tf.reshape(part, shape))
        return arrays
