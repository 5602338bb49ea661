"""TopK: the largest elements of each gradient, with their positions.

v = v + gradient                 what is not sent yet, of each weight on each replica
largest |v|                      sent: positions and values of all replicas are gathered; there it is 0 now
sum of what was received         what the optimizer gets

With momentum correction, v = v + u, where u = momentum * u + gradient: an element that was not sent for some steps then
has the velocity that it would have had. Where an element is sent, u is 0 as well, so that old gradients do not push on.

Lin et al., "Deep gradient compression: reducing the communication bandwidth for distributed training" (2018, arXiv
1712.01887).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.compression.compressor import Kept, Next, Slot, Sums, all_finite, check_start, sum_of
from tfdist.steps.reduce import all_gather

# Smaller weights are sent as they are: biases, scales.
_SMALLEST = 1024


# One value of so many is in the sample. Its threshold should let through a third more than are wanted, and some to
# spare.
_EVERY, _MARGIN, _SPARE = 61, 1.3, 30


class _Momentum(NamedTuple):
    factor: float
    is_nesterov: bool


@dataclasses.dataclass(frozen=True)
class TopK:
    """Sends the largest elements of the gradient of each large weight.

    Each of N replicas receives `fraction` of the elements of every other one, as positions and values of 8 bytes
    together. What a replica sends grows with N: `8 (N - 1) fraction` bytes an element, where the whole gradient needs
    `8 (N - 1) / N`. So it suits few replicas. Weights with fewer than 1,024 elements and gradients of embeddings
    (`tf.IndexedSlices`) are sent as they are. What is left out of a step is added to the gradient of the next.

    What a step leaves out of a gradient is, in the squared norm, at most the share `1 - fraction` of it. All steps
    together leave out the last rest only.

    Args:
        fraction: how many of a weight's elements each replica sends in a step, in (0, 1].
        momentum_correction: takes the momentum of `keras.optimizers.SGD` before elements are left out, as the paper
            does, not after. The velocity does not have the learning rate in it, unlike Keras'.
        start_step: as in `PowerSGD`.

    Raises:
        ValueError: for a `fraction` out of (0, 1]; and in the first step with `momentum_correction`, for an optimizer
            that is no `SGD` with momentum, clips, or accumulates gradients.

    References:
        Lin et al., "Deep gradient compression: reducing the communication bandwidth for distributed training" (2018,
        arXiv 1712.01887).

    Example:
        >>> import tfdist
        >>> strategy = tfdist.MirroredStrategy(["CPU:0"], compression=tfdist.compression.TopK(0.01))
    """

    fraction: float = 0.01
    momentum_correction: bool = False
    start_step: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, Real) or not 0 < self.fraction <= 1:
            raise ValueError(
                f"Received: fraction={self.fraction!r}. Expected: a share of the elements, more than 0 and at most 1, "
                "such as 0.01."
            )
        check_start(self.start_step)

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot] | None:
        """As in `Method`."""
        size = math.prod(shape)
        if size < _SMALLEST:
            return None
        return {"rest": Slot((size,))} | ({"velocity": Slot((size,))} if self.momentum_correction else {})

    def count(self, size: int) -> int:
        """How many of a weight's elements are sent.

        Example:
            >>> TopK(0.01).count(5000)
            50
        """
        return max(1, round(self.fraction * size))

    def prepare(self, optimizer: Any) -> tuple[_Momentum | None, dict[str, Any]]:
        """As in `Method`: the momentum, which the optimizer leaves to this."""
        if not self.momentum_correction:
            return None, {}
        if type(optimizer) is not keras.optimizers.SGD or not optimizer.momentum:
            momentum = getattr(optimizer, "momentum", None)
            raise ValueError(
                f"Received: TopK(momentum_correction=True) with {type(optimizer).__name__}(momentum={momentum!r}). "
                "Expected: keras.optimizers.SGD with a momentum. With any other optimizer use "
                "TopK(momentum_correction=False)."
            )
        for name in ("gradient_accumulation_steps", "clipnorm", "global_clipnorm", "clipvalue"):
            if getattr(optimizer, name) is not None:
                raise ValueError(
                    f"Received: TopK(momentum_correction=True) with SGD({name}={getattr(optimizer, name)!r}). "
                    "Expected: an optimizer without it, which would act on the velocity and not on the gradient."
                )
        return _Momentum(optimizer.momentum, optimizer.nesterov), {"momentum": 0.0, "nesterov": False}

    def whole(self, gradient: tf.Tensor, kept: Kept, settings: _Momentum | None) -> tuple[tf.Tensor, Next]:
        """As in `Method`."""
        if settings is None:
            return gradient, {}
        velocity, step = _accelerated(tf.reshape(gradient, [-1]), kept, settings)
        return tf.reshape(step, gradient.shape), {"velocity": velocity}

    def sums(
        self,
        gradients: Sequence[tf.Tensor],
        kept: Sequence[Kept],
        others: Sequence[tf.Tensor],
        settings: _Momentum | None,
    ) -> Sums:
        """As in `Method`."""
        rests, velocities = [], []
        for gradient, of in zip(gradients, kept, strict=True):
            step = tf.reshape(gradient, [-1])
            if settings is not None:
                velocity, step = _accelerated(step, of, settings)
                velocities.append(velocity)
            rests.append(of["rest"].read_value() + step)
        counts = [self.count(rest.shape[0]) for rest in rests]
        positions = [largest(tf.abs(rest), count) for rest, count in zip(rests, counts, strict=True)]
        # Floats of 64 bits are sent as 32; what that leaves out is part of the rest.
        values = [tf.cast(tf.gather(rest, where), tf.float32) for rest, where in zip(rests, positions, strict=True)]
        # What is largest is not known where something is no number: then nothing that is sent is one.
        is_good = tf.reduce_all([all_finite(rest) for rest in rests])
        sent = tf.where(is_good, tf.concat(values, 0), float("nan"))
        rows = _rows_of_all(tf.concat(positions, 0), sent)
        is_finite = tf.reduce_all([all_finite(received) for _, received in rows])
        following: list[Next] = []
        for i, (where, value) in enumerate(zip(positions, values, strict=True)):
            where = where[:, tf.newaxis]
            one = {"rest": tf.tensor_scatter_nd_sub(rests[i], where, tf.cast(value, rests[i].dtype))}
            if settings is not None:
                zeros = tf.zeros_like(value, velocities[i].dtype)
                one["velocity"] = tf.tensor_scatter_nd_update(velocities[i], where, zeros)
            following.append(one)
        results = [tf.zeros_like(rest) for rest in rests]
        # One replica after another, each with positions that differ: additions have the same order everywhere.
        for where_of_all, received in rows:
            parts = zip(tf.split(where_of_all, counts), tf.split(received, counts), strict=True)
            results = [
                tf.tensor_scatter_nd_add(result, where[:, tf.newaxis], tf.cast(value, result.dtype))
                for result, (where, value) in zip(results, parts, strict=True)
            ]
        shaped = [tf.reshape(result, gradient.shape) for result, gradient in zip(results, gradients, strict=True)]
        return Sums(shaped, sum_of(others) if others else [], is_finite, following)


def largest(values: tf.Tensor, count: int) -> tf.Tensor:
    """Positions of the largest values, in any order; of equal values the first.

    TensorFlow's `top_k` compares every value with the best so far; a threshold from a sample leaves most of them out
    first.

    Args:
        values: a vector of known length, not negative.
        count: how many are wanted.

    Returns:
        An int32 vector.

    Example:
        >>> sorted(largest(tf.constant([1.0, 7.0, 3.0]), 2).numpy().tolist())
        [1, 2]
    """
    size = values.shape[0]
    # A prime: if it divided the number of columns of a matrix, the sample would have values of few columns.
    sample = values[::_EVERY]
    kept = math.ceil(_MARGIN * count / _EVERY) + _SPARE
    if kept * _EVERY > size // 2:
        return tf.math.top_k(values, count, sorted=False).indices
    enough = tf.math.top_k(sample, kept).values[-1]
    candidates = tf.where(values >= enough)[:, 0]
    return tf.cond(
        tf.size(candidates) >= count,
        lambda: tf.cast(
            tf.gather(candidates, tf.math.top_k(tf.gather(values, candidates), count, sorted=False).indices), tf.int32
        ),
        lambda: tf.math.top_k(values, count, sorted=False).indices,
    )


def _accelerated(gradient: tf.Tensor, kept: Kept, settings: _Momentum) -> tuple[tf.Tensor, tf.Tensor]:
    """The velocity after a gradient, and the step that SGD makes."""
    velocity = settings.factor * kept["velocity"].read_value() + gradient
    return velocity, gradient + settings.factor * velocity if settings.is_nesterov else velocity


def _rows_of_all(positions: tf.Tensor, values: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Positions (int32) and values (float32) of each replica, by rank."""
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    # Every transport has int64; int32 would make a detour over the host of a GPU.
    own = tf.bitcast(tf.stack([positions, tf.bitcast(values, tf.int32)], axis=1), tf.int64)
    (rows,) = all_gather([own[:, tf.newaxis]])
    pairs = tf.bitcast(rows[:, 0], tf.int32)
    return [(row[:, 0], tf.bitcast(row[:, 1], tf.float32)) for row in tf.split(pairs, replicas)]
