"""Finds losses that mix the rows of a batch: replicas, which see some of the rows, cannot compute these exactly.

The mean of a loss over the rows of a batch is the mean of the replicas' means. Dice, Tversky, Circle, contrastive
losses, sums and the root of a mean are no such means, and nothing fails: so each compiled loss is tried on a few random
rows, whole and in halves, when a step has been traced, and a warning tells of one that differs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.steps.keras_step import shadowed
from tfdist.steps.local_values import exchanged

_ROWS = 4
# Larger targets and predictions are not worth the memory.
_MOST = 1 << 22
# An attribute of a loss that was tried: one of a user's own may not be hashable.
_TRIED = "_tfdist_tried"


@contextlib.contextmanager
def noticed(model: keras.Model) -> Iterator[None]:
    """While a step is traced, notes what compiled losses are given; then warns, once, of each that mixes rows."""
    listed = getattr(getattr(model, "_compile_loss", None), "_flat_losses", None) or []
    # One loss may serve several outputs.
    losses = {id(loss): loss for _, loss, *_ in listed if isinstance(loss, keras.losses.Loss)}
    given: dict[int, tuple[tf.TensorSpec, tf.TensorSpec]] = {}
    with contextlib.ExitStack() as stack:
        for key, loss in losses.items():
            if not hasattr(loss, _TRIED):
                stack.enter_context(shadowed(loss, call=_noting(loss, given, key)))
        yield
    for key, specs in given.items():
        object.__setattr__(losses[key], _TRIED, True)
        if mixes_rows(losses[key].call, *specs):
            warnings.warn(
                f"Received: loss '{losses[key].name}', which mixes the rows of a batch: its value is not the mean of "
                "its values for parts of the batch. Each replica computes it of its own rows, so that training differs "
                "from one process. Expected: a loss that has a value for each row, or a mean of such; or one replica.",
                stacklevel=2,
            )


def _noting(loss: keras.losses.Loss, given: dict, key: int) -> Callable:
    call = loss.call

    def noting(y_true: Any, y_pred: Any) -> Any:
        value, has_all_rows = exchanged(lambda: call(y_true, y_pred))
        if not has_all_rows:
            with contextlib.suppress(Exception):  # of a loss that takes something else than tensors
                given.setdefault(key, (_few_like(y_true), _few_like(y_pred)))
        return value

    return noting


def _few_like(value: Any) -> tf.TensorSpec:
    value = tf.convert_to_tensor(value)
    return tf.TensorSpec([_ROWS, *(3 if size is None else size for size in value.shape[1:])], value.dtype)


def mixes_rows(call: Callable, y_true: tf.TensorSpec, y_pred: tf.TensorSpec) -> bool:
    """Whether a loss of a few random rows differs from the mean of its values for their halves.

    A loss that has state, or draws random numbers, is not tried: that would change its state.

    Args:
        call: a function of targets and predictions; it may return a value for each row, or one for all.
        y_true: shape, with the number of rows to try, and dtype of the targets.
        y_pred: those of the predictions.

    Example:
        >>> few = tf.TensorSpec((4, 3))
        >>> mixes_rows(keras.losses.dice, few, few), mixes_rows(keras.losses.mean_squared_error, few, few)
        (True, False)
    """
    if max(y_true.shape.num_elements(), y_pred.shape.num_elements()) > _MOST:
        return False
    try:
        # Out of the graph of the step, and of XLA.
        with tf.init_scope():
            tried = _without_state(call, y_true, y_pred)
            if tried is None:
                return False
            targets, predictions = _some(y_true, 1), _some(y_pred, 2)
            whole, again = (tf.convert_to_tensor(tried(targets, predictions)) for _ in range(2))
            halves = [tried(targets[part], predictions[part]) for part in (slice(2), slice(2, None))]
            # Of a mean in 16 bits two or three digits are right.
            digits = 1e-2 if whole.dtype.size < 4 else 1e-4
            whole, again, *halves = (tf.cast(value, tf.float64) for value in (whole, again, *halves))
            parts = tf.concat(halves, 0) if whole.shape.rank else sum(halves) / 2
            # What is not a number, or another one each time, tells nothing.
            return not _close(whole, parts, digits) and _close(whole, again, digits)
    except Exception:
        return False


def _without_state(call: Callable, *specs: tf.TensorSpec) -> Callable | None:
    """The loss as a function of TensorFlow, or `None` if it reads or changes anything but its arguments."""
    loose = [tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) for spec in specs]
    traced = tf.function(call, autograph=False).get_concrete_function(*loose)
    stateful = any(operation.op_def.is_stateful for operation in traced.graph.get_operations())
    return None if stateful or any(one.dtype == tf.resource for one in traced.inputs) else traced


def _some(spec: tf.TensorSpec, seed: int) -> tf.Tensor:
    """Random numbers in [0, 1), or zeros and ones for integers."""
    numbers = tf.random.stateless_uniform(spec.shape, [seed, 0])
    return tf.cast(numbers if spec.dtype.is_floating else tf.round(numbers), spec.dtype)


def _close(one: tf.Tensor, other: tf.Tensor, digits: float) -> bool:
    return one.shape == other.shape and bool(tf.reduce_all(tf.abs(one - other) <= digits * (0.1 + tf.abs(one))))
