"""The part of `ParameterServerStrategy` that `tf.distribute` calls: where variables are, and who updates them how."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import parameter_server_strategy_v2 as upstream

COORDINATOR = "/job:chief/replica:0/task:0/device:CPU:0"


class ParameterServerExtended(upstream.ParameterServerStrategyV2Extended):
    """One replica a worker, which updates variables where they are, without asking the other replicas.

    TensorFlow's own part makes replicas meet in every update (`merge_call`), which cannot be done inside a branch: the
    updates of accumulated gradients and of moving averages are in one.
    """

    _bytes: list[int]

    def configure(self, number_of_servers: int) -> None:
        """Completes an instance that TensorFlow has made."""
        self._bytes = [0] * number_of_servers
        # Steps of Keras are scheduled by the strategy itself.
        self._allow_run_without_coordinator = True
        self._num_gpus_per_worker = min(self._num_gpus_per_worker, 1)

    @contextlib.contextmanager
    def unpartitioned(self) -> Iterator[None]:
        """Creates variables as they are: Keras has no variables in parts."""
        partitioner, self._variable_partitioner = self._variable_partitioner, None
        try:
            yield
        finally:
            self._variable_partitioner = partitioner

    def _use_merge_call(self) -> bool:
        return False

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if self._container_strategy().is_in_shard:
            raise NotImplementedError(
                "Received: something that needs the whole batch in a step under ParameterServerStrategy(mode='sync'), "
                "where each worker has a shard of it: a loss over masked time steps, reduction="
                "'mean_with_sample_weight', or BatchNormalization(synchronized=True). Expected: other ones; or "
                "mode='async'."
            )
        return value

    def _replica_ctx_update(self, var: Any, fn: Callable, args: tuple = (), kwargs: Any = None, group: bool = True):
        return self._update(var, fn, args, kwargs or {}, group)

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            # The state of a metric: workers return what they add to it, the coordinator alone changes it.
            with tf.device(None), tf.device(COORDINATOR):
                return next_creator(**kwargs)
        # Slot variables come with a variable beside which they are; TensorFlow sees to that.
        self._variable_count = self._bytes.index(min(self._bytes))
        variable = super()._create_variable(next_creator, **kwargs)
        for part in getattr(variable, "variables", [variable]):
            self._bytes[_server_of(part)] += _size(part)
        return variable


def _server_of(variable: tf.Variable) -> int:
    return tf.DeviceSpec.from_string(variable.device).task or 0


def _size(variable: tf.Variable) -> int:
    return variable.dtype.size * (variable.shape.num_elements() or 0)
