"""Keeps the work of optimizers and of users' steps where the data are.

Keras computes clipping, averages and updates without saying where, and TensorFlow puts what nobody places on the first
device: every gradient would travel there and back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.keras_step import shadowed
from tfdist.strategies.model_parts import optimizers_of, parts_of


@contextlib.contextmanager
def near_inputs() -> Iterator[None]:
    """Places every operation of the block that has no device of its own on that of its largest input."""
    with tf.compat.v1.device(_device_for):
        yield


def _device_for(operation: tf.Operation) -> str:
    if operation.device:
        return operation.device
    resources = [t for t in operation.inputs if t.dtype == tf.resource]
    candidates = resources or sorted(operation.inputs, key=_elements, reverse=True)
    return next((device for device in map(_device_of, candidates) if device), "")


def _elements(tensor: tf.Tensor) -> int:
    return math.prod(size or 1 for size in tensor.shape) if tensor.shape.rank else 1


def _device_of(tensor: Any) -> str:
    if not tf.is_symbolic_tensor(tensor):
        return tensor.device
    if tensor.op.device or tensor.op.type != "Placeholder":
        return tensor.op.device
    for outside, inside in getattr(tensor.graph, "captures", ()):
        if inside is tensor:
            return _device_of(outside)
    return ""


class LocalScalars:
    """Copies of an optimizer's step counter and learning rate on the devices of the variables, for one update.

    Every variable's update reads both: from another process, each time.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        rate = getattr(optimizer, "_learning_rate", None)
        self._scalars = [v for v in (optimizer._iterations, rate) if isinstance(v, keras.Variable)]
        self._copies: dict[tuple[Any, str], list[tf.Tensor]] = {}

    @contextlib.contextmanager
    def on(self, device: str) -> Iterator[None]:
        """Within the block, which has this device already, the scalars' values are the copies there."""
        graph = tf.compat.v1.get_default_graph()
        key = graph, device
        if key not in self._copies:
            self._copies[key] = [tf.identity(v._value) for v in self._scalars]
        given = list(zip(self._scalars, self._copies[key], strict=True))
        with keras.StatelessScope(given, initialize_variables=False) as scope:
            yield
        # An optimizer may assign to a variable of its own by Keras' methods, which the scope has kept.
        before = {id(v): value for v, value in given}
        for variable in self._optimizer.variables:
            value = scope.get_current_value(variable)
            if value is not None and value is not before.get(id(variable)):
                variable._value.assign(value)


@contextlib.contextmanager
def local_optimizers(model: keras.Model, scope: Callable[[LocalScalars | None], Any]) -> Iterator[None]:
    """While the block runs, a model's optimizers leave gradients where they are and read their scalars once.

    Args:
        model: the model.
        scope: called with the scalars before an optimizer updates variables, and with `None` afterwards.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers_of(model):
            for part in [optimizer, *parts_of(optimizer)]:
                # With one replica there is nothing to reduce, but the all-reduce puts all gradients on one device.
                methods = {"_all_reduce_sum_gradients": list}
                if hasattr(part, "_iterations") and isinstance(part._iterations, keras.Variable):
                    methods["_distributed_tf_update_step"] = _with_scalars(part, scope)
                stack.enter_context(shadowed(part, **methods))
        yield


def _with_scalars(optimizer: Any, scope: Callable[[LocalScalars | None], Any]) -> Callable:
    original = optimizer._distributed_tf_update_step

    def update(distribution: Any, grads_and_vars: Sequence[Any], learning_rate: Any) -> None:
        scope(LocalScalars(optimizer))
        try:
            original(distribution, grads_and_vars, learning_rate)
        finally:
            scope(None)

    return update
