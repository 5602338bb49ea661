"""An optimizer that works on parts: on each replica on its parts of gradients and slots.

What updates each element by itself needs nothing else. What depends on more, is a sum over the replicas: the norms of
gradients that are clipped, and whether all of them are finite.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.inspection.model_state import is_sharded, parts_of
from tfdist.steps.keras_step import current_step, global_replica, shadowed
from tfdist.steps.reduce import all_reduce
from tfdist.steps.shards import in_parts


@contextlib.contextmanager
def working_in_parts(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """While a step is traced, lets an optimizer and those inside of it work on the parts of sharded variables."""
    with contextlib.ExitStack() as stack:
        for part in [optimizer, *parts_of(optimizer)]:
            methods = {
                "_backend_apply_gradients": functools.partial(_apply_in_parts, part._backend_apply_gradients),
                "_clip_gradients": functools.partial(clip_parts, part, part._clip_gradients),
                "_update_model_variables_moving_average": functools.partial(_average, part),
            }
            if hasattr(part, "check_finite"):
                methods["check_finite"] = functools.partial(are_finite, part.check_finite)
            stack.enter_context(shadowed(part, **methods))
        yield


def _apply_in_parts(apply: Callable, grads: Any, trainable_variables: Any) -> None:
    with in_parts(trainable_variables):
        apply(grads, trainable_variables)


def _average(optimizer: Any, trainable_variables: Sequence[Any]) -> None:
    """As Keras does, past the test of shapes in `Variable.assign`."""
    for variable, average in zip(trainable_variables, optimizer._model_variables_moving_average, strict=True):
        if average is not None:
            dtype = average.value.dtype
            momentum = tf.cast(tf.not_equal(optimizer.iterations, 0), dtype) * optimizer.ema_momentum
            average.value.assign(momentum * average + (1 - momentum) * tf.cast(variable, dtype))


def are_finite(check: Callable, grads: Sequence[Any]) -> tf.Tensor:
    """What `check` says of parts of gradients, for those of all replicas: another one's may not be finite."""
    return tf.equal(all_reduce(tf.cast(~check(grads), tf.float32), differentiable=False), 0)


def _own_squares(grad: tf.Tensor, counts: bool) -> tf.Tensor:
    """What this replica adds to the squared norm."""
    values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
    return tf.cast(tf.reduce_sum(tf.square(values)), tf.float64) if counts else tf.zeros([], tf.float64)


def clip_parts(optimizer: Any, clip: Callable, grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """As `clip`, the optimizer's `_clip_gradients`; but norms are those of the parts of all replicas."""
    most = optimizer.clipnorm or optimizer.global_clipnorm
    if not most:
        return clip(grads)
    step = current_step()
    weights = step.here.in_parts if step else ()
    # The gradient of a whole weight is the same on all replicas, that of a part on all hosts that keep it.
    counts = [v._value.is_first_copy if is_sharded(v) else global_replica() == 0 for v in weights]
    # Without sharded weights: the gradients of split slots, all of which are parts.
    own = tf.stack(list(map(_own_squares, grads, counts or itertools.repeat(True))))
    is_alone = optimizer._distribution_strategy.num_replicas_in_sync == 1
    squares = own if is_alone else all_reduce(own, differentiable=False)
    if optimizer.global_clipnorm:
        squares = tf.fill(squares.shape, tf.reduce_sum(squares))
    norms = tf.sqrt(squares)
    factors = most / tf.maximum(norms, most)
    if optimizer.global_clipnorm:
        factors += norms - norms  # as Keras does it: nothing is finite any more, if the norm is not
    pairs = zip(grads, tf.unstack(factors), strict=True)
    return [_times(grad, tf.cast(factor, grad.dtype), bool(optimizer.clipnorm)) for grad, factor in pairs]


def _times(grad: Any, factor: tf.Tensor, keeps_slices: bool) -> Any:
    """As Keras does it: slices that are clipped by the norm of all gradients are added up."""
    if keeps_slices and isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values * factor, grad.indices, grad.dense_shape)
    return grad * factor
