"""PowerSGD: the sum of all gradients as a product of two thin matrices.

n x m gradients  M1, M2, ...                          of the replicas, each with its rest of the step before
P = M1 Q + M2 Q + ...                                 n x r, sent; then its columns are made orthonormal
Q = M1' P + M2' P + ...                               m x r, sent; the Q of the next step
P Q' = P P' (M1 + M2 + ...)                           what the optimizer gets
M1 - P P' M1, M2 - P P' M2, ...                       rests

One step of the power method for the largest singular values, which goes on from step to step, since gradients change
slowly. It is linear: what the optimizer gets, and the sum of the rests, depend on the sum of the gradients only, and
not on how many replicas it comes from.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization" (2019,
arXiv 1905.13727).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.arguments import check_count
from tfdist.compression.compressor import Kept, Next, Slot, Sums, all_finite, check_start, sum_of

# A matrix is sent as it is if its factors have more than so much of its size.
_MOST = 0.5
# Larger than float64's rounding errors of products of unit vectors, which could make them negative.
_RIDGE = 1e-12


@dataclasses.dataclass(frozen=True)
class PowerSGD:
    """Sends the gradient of each large weight as two matrices of a low rank.

    A kernel of shape (n, m) costs `rank * (n + m)` numbers instead of `n * m`; other shapes are matrices by joining
    axes, so that n + m is smallest. Biases, small weights and gradients of embeddings (`tf.IndexedSlices`) are sent as
    they are. What is left out of a step is added to the gradient of the next.

    What a step leaves out of a gradient is, in the Frobenius norm, at least all singular values beyond the first
    `rank`, and little more while gradients change slowly. All steps together leave out the last rest only.

    Args:
        rank: number of columns of the two matrices, at least 1. Memory: a copy of each large weight on each replica.
        start_step: before this step of the optimizer, gradients are sent as they are; a hundred or so help where
            training begins with a high learning rate.
            The optimizer's `clipnorm`, `global_clipnorm` and `clipvalue` act on the sum.

    Raises:
        ValueError: for a `rank` or `start_step` that is no whole number, or too small.

    References:
        Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization"
        (2019, arXiv 1905.13727).

    Example:
        >>> import tfdist
        >>> strategy = tfdist.MirroredStrategy(["CPU:0"], compression=tfdist.compression.PowerSGD(rank=2))
    """

    rank: int = 4
    start_step: int = 0

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_start(self.start_step)

    def numbers(self, shape: Sequence[int]) -> int:
        """How many numbers are sent for a gradient of this shape.

        Example:
            >>> PowerSGD(rank=4).numbers((1000, 500)), PowerSGD(rank=4).numbers((500,))
            (6000, 500)
        """
        matrix = matrix_of(shape)
        return self.rank * sum(matrix) if self._pays(matrix) else math.prod(shape)

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot] | None:
        """As in `Method`."""
        n, m = matrix_of(shape)
        if not self._pays((n, m)):
            return None
        # Any matrix, the same on all replicas and after a restart.
        start = np.random.default_rng([n, m]).normal(size=(m, self.rank))
        start /= np.linalg.norm(start, axis=0)
        return {"rest": Slot((n, m)), "factor": Slot((m, self.rank), start, is_shared=True)}

    def prepare(self, optimizer: Any) -> tuple[None, dict[str, Any]]:
        """As in `Method`: nothing depends on the optimizer."""
        return None, {}

    def whole(self, gradient: tf.Tensor, kept: Kept, settings: None) -> tuple[tf.Tensor, Next]:
        """As in `Method`."""
        return gradient, {}

    def sums(
        self, gradients: Sequence[tf.Tensor], kept: Sequence[Kept], others: Sequence[tf.Tensor], settings: None
    ) -> Sums:
        """As in `Method`."""
        matrices = [
            tf.reshape(gradient, of["rest"].shape) + of["rest"].read_value()
            for gradient, of in zip(gradients, kept, strict=True)
        ]
        factors = [of["factor"].read_value() for of in kept]
        products = [tf.matmul(matrix, factor) for matrix, factor in zip(matrices, factors, strict=True)]
        summed = sum_of([*products, *others])
        lefts = orthonormal(summed[: len(matrices)])
        own = [tf.matmul(matrix, left, transpose_a=True) for matrix, left in zip(matrices, lefts, strict=True)]
        rights = sum_of(own)
        totals = [
            tf.reshape(tf.matmul(left, right, transpose_b=True), gradient.shape)
            for left, right, gradient in zip(lefts, rights, gradients, strict=True)
        ]
        following = [
            {
                "rest": matrix - tf.matmul(left, of_matrix, transpose_b=True),
                "factor": _unit_columns(right, factor),
            }
            for matrix, left, of_matrix, right, factor in zip(matrices, lefts, own, rights, factors, strict=True)
        ]
        is_finite = tf.reduce_all([all_finite(right) for right in rights])
        return Sums(totals, summed[len(matrices) :], is_finite, following)

    def _pays(self, matrix: tuple[int, int]) -> bool:
        n, m = matrix
        return self.rank * (n + m) <= _MOST * n * m


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """The matrix with the fewest rows and columns that has a tensor's elements in their order.

    Example:
        >>> matrix_of((3, 3, 64, 128)), matrix_of((256, 4, 64)), matrix_of((7,))
        ((576, 128), (256, 256), (7, 1))
    """
    pairs = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, max(2, len(shape)))]
    return min(pairs, key=sum)


def orthonormal(matrices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Matrices with orthonormal columns that span what the columns of the given ones span, by Cholesky decomposition.

    The matrices are thin: float64 costs little, and has room for columns that depend on each other but for float32's
    rounding. A column of zeros stays one. Nothing is divided by 0.
    """
    wide = [tf.cast(matrix, tf.float64) for matrix in matrices]
    units = [tf.math.divide_no_nan(matrix, tf.norm(matrix, axis=0)) for matrix in wide]
    products = tf.stack([tf.matmul(unit, unit, transpose_a=True) for unit in units])
    rank = units[0].shape[1]
    triangles = tf.linalg.cholesky(products + _RIDGE * tf.eye(rank, dtype=tf.float64))
    inverses = tf.linalg.triangular_solve(triangles, tf.eye(rank, batch_shape=[len(units)], dtype=tf.float64))
    return [
        tf.cast(tf.matmul(unit, inverse, transpose_b=True), matrix.dtype)
        for matrix, unit, inverse in zip(matrices, units, tf.unstack(inverses, len(units)), strict=True)
    ]


def _unit_columns(matrix: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """Columns of length 1: the next product neither overflows nor vanishes. Where one is 0, that of before stays."""
    lengths = tf.norm(matrix, axis=0)
    return tf.where(lengths > 0, tf.math.divide_no_nan(matrix, lengths), before)
