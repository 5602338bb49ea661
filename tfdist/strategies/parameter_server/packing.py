"""Several tensors as one vector a dtype: each transfer between processes costs as much as some kilobytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class Packing:
    """How tensors of known shapes lie in vectors.

    Args:
        shapes: of the tensors.
        dtypes: of the tensors.

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
        """The tensors again, of vectors that are arrays or tensors."""
        offsets = dict.fromkeys(self._groups, 0)
        found = dict(zip(self._groups, vectors, strict=True))
        arrays = []
        for shape, dtype in zip(self._shapes, self._dtypes, strict=True):
            begin = offsets[dtype]
            offsets[dtype] = end = begin + math.prod(shape)
            part = found[dtype][begin:end]
            arrays.append(part.reshape(shape) if isinstance(part, np.ndarray) else tf.reshape(part, shape))
        return arrays
