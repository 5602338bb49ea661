"""`tfdist.HostOffloadStrategy`: one device, and weights on the host that it sees one block at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import device_util, distribute_lib, one_device_strategy
from tfdist.memory.application import apply
from tfdist.memory.modes import applied
from tfdist.memory.policy import StreamPolicy
from tfdist.steps.common_hooks import install
from tfdist.steps.keras_step import predicting_model, recognise
from tfdist.strategies.host_offload import validation
from tfdist.strategies.host_offload.host_work import sums_on_host, work_on_host
from tfdist.strategies.keras_hooks import StrategyHooks


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
            with sums_on_host(self._device, self.host):
                return fn(*args, **kwargs)

        return super()._call_for_each_replica(placed, args, kwargs)

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> tf.data.Dataset:
        # Batches wait on the host, too: stock strategies keep the next ones on the device.
        return dataset

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return (self.host,)

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        return (self.host,)


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
        device, host = validation.check_devices(device, host)
        self._memory = StreamPolicy(blocks=blocks, host=host, prefetch=prefetch)
        super().__init__(_HostOffloadExtended(self, device_util.resolve(device), host))
        self._keras_hooks = HostOffloadHooks(self)

    # There are no other processes.
    is_chief = True

    def run(self, fn: Callable, args: tuple = (), kwargs: dict | None = None, options: Any = None) -> Any:
        step = recognise(fn) if len(args) == 1 and not kwargs else None
        if step is None:
            return super().run(fn, args, kwargs, options)
        model = step.model or predicting_model(fn)
        # `predict` comes here without having asked whether it may.
        self._keras_hooks.check(model)
        if applied(model) is None:
            apply(model, self._memory)
        with work_on_host(model, self.extended.host):
            return super().run(fn, args, kwargs, options)


class HostOffloadHooks(StrategyHooks):
    """Models of a `HostOffloadStrategy`: its memory policy cuts them into blocks before their first step."""

    streams_weights = True

    def __init__(self, strategy: HostOffloadStrategy):
        super().__init__(strategy)
        self._warned: weakref.WeakSet[keras.Model] = weakref.WeakSet()

    def check(self, model: keras.Model) -> None:
        validation.check(self._strategy, model)
        if model not in self._warned and validation.warn(model):
            self._warned.add(model)
