"""Variables on parameter servers: where they are, and how workers change them without a lock.

    coordinator (chief)     the variables of metrics
    parameter servers       all others, each on the server that has the fewest bytes so far
    workers                 none: they read variables from the servers and change them there

Several workers change a variable at the same time, so each addition has to be a single operation on the server. And
workers read and update only the rows of a table that they need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import get_stateless_scope, in_stateless_scope
from tfdist.compat.upstream import parameter_server_strategy as upstream
from tfdist.steps.keras_step import shadowed

COORDINATOR = "/job:chief/replica:0/task:0/device:CPU:0"


class ParameterServerExtended(upstream.ParameterServerStrategyV2Extended):
    """The part of `ParameterServerStrategy` that `tf.distribute` calls: one replica a worker.

    A replica updates variables where they are, without asking the other replicas. TensorFlow's own part makes replicas
    meet in every update (`merge_call`). That cannot be done inside a branch (`tf.cond`), but the updates of accumulated
    gradients and of moving averages are in one.
    """

    _bytes: list[int]

    def configure(self, number_of_servers: int) -> None:
        """Completes an instance that TensorFlow has made."""
        self._bytes = [0] * number_of_servers
        # This strategy schedules the steps of Keras itself: TensorFlow would refuse `run` without its own coordinator.
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
        if self._container_strategy()._is_in_shard:
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
        # TensorFlow puts the next variable on the server with this number; a slot goes beside its variable.
        self._variable_count = self._bytes.index(min(self._bytes))
        variable = super()._create_variable(next_creator, **kwargs)
        for part in getattr(variable, "variables", [variable]):
            self._bytes[_server_of(part)] += _size(part)
        return variable


def _server_of(variable: tf.Variable) -> int:
    return tf.DeviceSpec.from_string(variable.device).task or 0


def _size(variable: tf.Variable) -> int:
    return variable.dtype.size * (variable.shape.num_elements() or 0)


class ServerVariable(keras.Variable):
    """A Keras variable whose additions are single operations on the server.

    Keras adds by reading, adding and writing (`assign(self + value)`): if two workers do so at the same time, one
    addition is lost. And Keras' embedding reads the whole table, unless the variable has a `sparse_read`.
    """

    def assign_add(self, value: Any) -> Any:
        if self._is_held_by_scope():
            return super().assign_add(value)
        value = self._convert_to_tensor(value, dtype=self._dtype)
        self._value.assign_add(value)
        return value

    def assign_sub(self, value: Any) -> Any:
        if self._is_held_by_scope():
            return super().assign_sub(value)
        value = self._convert_to_tensor(value, dtype=self._dtype)
        self._value.assign_sub(value)
        return value

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """The rows with these indices; `tf.gather` looks for this method."""
        if self._is_held_by_scope():
            return tf.gather(self.value, indices, name=name)
        return self._maybe_autocast(self._value.sparse_read(indices, name=name))

    def _is_held_by_scope(self) -> bool:
        if not in_stateless_scope():
            return False
        scope = get_stateless_scope()
        holds = getattr(scope, "holds", None)
        return holds is None or holds(self)


def adopt(variables: Iterable[keras.Variable]) -> None:
    """Makes plain Keras variables `ServerVariable`s, in place."""
    for variable in variables:
        if type(variable) is keras.Variable:
            variable.__class__ = ServerVariable


@contextlib.contextmanager
def sparse_updates(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """While a step is traced, lets Keras' Adagrad update only the rows of a table that have a gradient.

    Keras' own update reads and writes the whole table, although rows without a gradient do not change. SGD without
    momentum is row-wise in Keras already. All other optimizers are left alone: they change every row in every step,
    because moments decay (Adam, momentum, RMSprop, Adadelta, ...), or compute the value anew (Ftrl).

    Where a row occurs several times, the accumulator gets the sum of the squares of its gradients, not the square of
    their sum, as with Keras and `tf.IndexedSlices` in one process.

    Args:
        optimizer: any optimizer, also a `keras.optimizers.LossScaleOptimizer` around one.

    Example:
        >>> optimizer, table = keras.optimizers.Adagrad(1.0), keras.Variable([[0.0], [0.0]])
        >>> gradient = tf.IndexedSlices([[3.0]], [1], [2, 1])
        >>> with sparse_updates(optimizer):
        ...     optimizer.apply([gradient], [table])
    """
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if type(optimizer).update_step is not keras.optimizers.Adagrad.update_step:
        yield
        return
    with shadowed(optimizer, update_step=_row_wise(optimizer, optimizer.update_step)):
        yield


def _row_wise(optimizer: Any, dense: Callable) -> Callable:
    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not isinstance(gradient, tf.IndexedSlices):
            dense(gradient, variable, learning_rate)
            return
        rows, values = gradient.indices, tf.cast(gradient.values, variable.dtype)
        accumulator = optimizer._accumulators[optimizer._get_variable_index(variable)].value
        optimizer.assign_add(accumulator, tf.IndexedSlices(tf.square(values), rows))
        # Read after the addition, which has also added up the squares of a row that occurs several times.
        scale = tf.cast(learning_rate, variable.dtype) / tf.sqrt(tf.gather(accumulator, rows) + optimizer.epsilon)
        optimizer.assign_sub(variable, tf.IndexedSlices(values * scale, rows))

    return update_step
