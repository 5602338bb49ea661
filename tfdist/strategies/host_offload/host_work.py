"""The parts of a step that run on the host: those that work on weights only.

optimizer.apply   clips, averages and updates there; Keras has all of it on the device of the step, so that every
                  gradient would come back
regularizers      see the weights there; Keras would read those of all layers at once for the loss
sums              of gradients that are there, of a weight that several blocks use or that is regularized
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import record
from tfdist.inspection.model_parts import optimizers_of, parts_of
from tfdist.steps.keras_step import shadowed


@contextlib.contextmanager
def work_on_host(model: keras.Model, host: str) -> Iterator[None]:
    """Overrides, until the block ends, the methods that work on weights: they run on the host.

    Args:
        model: the model.
        host: the device with the variables.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers_of(model):
            for part in [optimizer, *parts_of(optimizer)]:
                # With one replica there is nothing to reduce, but the all-reduce copies the gradients to the device.
                methods = {"_all_reduce_sum_gradients": list, "apply": _on(host, part.apply)}
                if isinstance(part, keras.optimizers.LossScaleOptimizer):
                    methods["check_finite"] = _on(host, part.check_finite)
                stack.enter_context(shadowed(part, **methods))
        losses = functools.partial(_regularization_losses, model, host)
        stack.enter_context(shadowed(model, _get_regularization_losses=losses))
        yield


def sums_on_host(device: str, host: str) -> contextlib.AbstractContextManager:
    """A device scope: operations are placed on `device`, but sums whose terms are all on the host stay there.

    Args:
        device: for what has none of its own.
        host: the device with the variables.
    """

    def place(operation: tf.Operation) -> str:
        if operation.device:
            return operation.device
        terms_on_host = operation.type == "AddN" and all(term.op.device == host for term in operation.inputs)
        return host if terms_on_host else device

    # Outside of a graph a device is a name, and there is one already.
    return contextlib.nullcontext() if tf.executing_eagerly() else tf.compat.v1.device(place)


def _on(device: str, method: Callable) -> Callable:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with tf.device(device):
            return method(*args, **kwargs)

    return call


def _regularization_losses(model: keras.Model, host: str) -> list[tf.Tensor]:
    variables = [variable for variable in model.trainable_weights if variable.regularizer is not None]
    return [_regularization_loss(v.regularizer, tf.convert_to_tensor(v.value), host) for v in variables]


def _regularization_loss(regularizer: Callable, weight: tf.Tensor, host: str) -> tf.Tensor:
    def backward(gradient: tf.Tensor) -> list[tf.Tensor]:
        with tf.device(host):
            with tf.GradientTape() as tape:
                tape.watch(weight)
                again = regularizer(weight)
            return [tape.gradient(again, weight, output_gradients=gradient)]

    with record.stop_recording(), tf.device(host):
        loss = tf.convert_to_tensor(regularizer(weight))
    record.record_operation("TfdistRegularizer", [loss], [weight], backward)
    return loss
