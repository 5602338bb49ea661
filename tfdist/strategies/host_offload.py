"""`tfdist.HostOffloadStrategy`: one device, and weights on the host that it sees one block at a time.

The parts of a step that work on weights only run on the host:

optimizer.apply   clips, averages and updates there; Keras has all of it on the device of the step, so that every
                  gradient would come back
regularizers      see the weights there; Keras would read those of all layers at once for the loss
sums              of gradients that are there, of a weight that several blocks use or that is regularized
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import device_util, distribute_lib, one_device_strategy, record
from tfdist.inspection.model_state import all_optimizers_of
from tfdist.memory.application import apply
from tfdist.memory.modes import applied
from tfdist.memory.policy import StreamPolicy
from tfdist.steps.keras_step import recognise_step, shadowed
from tfdist.strategies import validation
from tfdist.strategies.hooks import StrategyHooks, install
from tfdist.strategies.validation import existing_device

_STAND_IN = (
    "To try it without a GPU, call tf.config.set_logical_device_configuration before anything else, and then "
    "HostOffloadStrategy(device='CPU:1', host='CPU:0')."
)


class _HostOffloadExtended(one_device_strategy.OneDeviceExtended):
    """The part of `HostOffloadStrategy` that `tf.distribute` calls."""

    def __init__(self, container: Any, device: str, host: str):
        super().__init__(container, device)
        self.host = host

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        # All variables: weights, optimizer slots, metrics, seeds.
        kwargs.pop("colocate_with", None)
        with tf.device(self.host):
            return next_creator(**kwargs)

    def _update_non_slot(self, colocate_with: Any, fn: Callable, args: tuple, kwargs: dict, group: bool) -> Any:
        with tf.device(self.host), distribute_lib.UpdateContext(self.host):
            result = fn(*args, **kwargs)
        return result if group else tf.nest.map_structure(self._local_results, result)

    def _call_for_each_replica(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        def placed(*args: Any, **kwargs: Any) -> Any:
            with _sums_on_host(self._device, self.host):
                return fn(*args, **kwargs)

        return super()._call_for_each_replica(placed, args, kwargs)

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> tf.data.Dataset:
        # Batches wait on the host, too: stock strategies keep the next ones on the device.
        return dataset


class HostOffloadStrategy(tf.distribute.Strategy):
    """Trains a model that is larger than the device: weights and optimizer slots are on the host and are updated there.

    One block of layers is on the device at a time. Its weights come from the host while the block before it computes,
    in the forward pass and once more in the backward pass, in which the block is run again; the gradients of weights
    leave for the host at once, and the device waits when it is two blocks ahead of them. What the device needs does
    not grow with the depth of the model (L2L, Pudipeddi et al., arXiv 2002.05645). Inputs of blocks wait on the host,
    too. The numbers are those of plain training, bit for bit, but where TensorFlow would make one kernel of operations
    in two blocks, or add up more than two gradients of a tensor that several blocks read: there they are rounded
    otherwise.

    Build and compile a Keras model in `strategy.scope()`; `fit`, `evaluate` and `predict` then stream it.

    Args:
        device: what computes.
        host: where variables are, and are updated.
        blocks: names or classes of the layers that are blocks. "auto": consecutive layers of a Functional or Sequential
            model, none of which needs much more than the largest layer; in a model that is written as a class, the
            layers of the kind that repeats most. All other layers are streamed, too.
        prefetch: how many blocks ahead weights are fetched; 0 or more.

    Raises:
        ValueError: for devices that do not exist, or are the same; for another argument that makes no sense. When a
            model is trained: with run_eagerly=True or jit_compile=True, or if it has no blocks.

    Example (two logical CPU devices, or a GPU, are needed):
        >>> import keras, numpy as np, tfdist
        >>> strategy = tfdist.HostOffloadStrategy("CPU:1", "CPU:0")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(9))])
        ...     model.compile("adam", "mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 4)), verbose=0)
    """

    def __init__(
        self,
        device: str = "GPU:0",
        host: str = "CPU:0",
        *,
        blocks: str | Sequence[str | type] = "auto",
        prefetch: int = 1,
    ):
        install()
        device, host = _check_devices(device, host)
        self._memory = StreamPolicy(blocks=blocks, host=host, prefetch=prefetch)
        super().__init__(_HostOffloadExtended(self, device_util.resolve(device), host))
        self._keras_hooks = HostOffloadHooks(self, self._memory)

    # There are no other processes.
    is_chief = True

    def run(self, fn: Callable, args: tuple = (), kwargs: dict | None = None, options: Any = None) -> Any:
        step = recognise_step(fn, args, kwargs)
        if step is None:
            return super().run(fn, args, kwargs, options)
        # `predict` comes here without having asked whether it may.
        self._keras_hooks.check(step.model)
        if applied(step.model) is None:
            apply(step.model, self._memory)
        with _work_on_host(step.model, self.extended.host):
            return super().run(fn, args, kwargs, options)


class HostOffloadHooks(StrategyHooks):
    """Models of a `HostOffloadStrategy`: its memory policy cuts them into blocks before their first step."""

    streams_weights = True

    def check(self, model: keras.Model) -> None:
        validation.check_in_a_graph(self._strategy, model)
        validation.check_compiled(self._strategy, model)
        validation.check_variables(self._strategy, {f"variable '{v.path}'": v for v in model.variables})


def _check_devices(device: str, host: str) -> tuple[str, str]:
    """The full names of two devices, which exist and are not the same."""
    computes, holds = (device_util.canonicalize(existing_device(given, _STAND_IN)) for given in (device, host))
    if computes == holds:
        raise ValueError(
            f"Received: device={device!r} and host={host!r}, which are the same: nothing would be elsewhere. Expected: "
            "an accelerator, and the host: device='GPU:0', host='CPU:0'."
        )
    return computes, holds


@contextlib.contextmanager
def _work_on_host(model: keras.Model, host: str) -> Iterator[None]:
    """Overrides, until the block ends, the methods that work on weights: they run on the host.

    Args:
        model: the model.
        host: the device with the variables.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in all_optimizers_of(model):
            methods = {"apply": _on(host, optimizer.apply)}
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                methods["check_finite"] = _on(host, optimizer.check_finite)
            stack.enter_context(shadowed(optimizer, **methods))
        losses = functools.partial(_regularization_losses, model, host)
        stack.enter_context(shadowed(model, _get_regularization_losses=losses))
        yield


def _sums_on_host(device: str, host: str) -> contextlib.AbstractContextManager:
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
