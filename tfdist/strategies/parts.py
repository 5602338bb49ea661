"""Weights of which each replica keeps a part: how a strategy makes, reads and saves them.

steps/shards.py          the variables
layers/sharded_table.py  says which of them are tables, whose rows are looked up where they are

`FullyShardedStrategy` keeps parts of all weights, `MultiWorkerMirroredStrategy` those of each
`tfdist.layers.ShardedEmbedding`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.server import ProcessGoneError
from tfdist.inspection.model_state import all_optimizers_of, gather, is_sharded, own_methods, parts_of
from tfdist.layers.sharded_table import TableInitializer, is_making_table
from tfdist.optimizers.sharded_optimizer import ELEMENTWISE, ShardedOptimizer
from tfdist.runtime.peers import PeerTimeoutError
from tfdist.steps.flat_bucket import FlatBucket, RowLayout
from tfdist.steps.keras_step import shadowed
from tfdist.steps.shards import ShardedVariable, own_part
from tfdist.strategies.data_parallel.strategy import DataParallelHooks


def _is_of_table(variable: keras.Variable) -> bool:
    """Whether a Keras variable that is being made is a whole table."""
    return is_making_table.get() or isinstance(variable._initializer, TableInitializer)


class PartsExtended:
    """Mixin for subclasses of `tf.distribute.StrategyExtended`: makes such variables."""

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        strategy = self._container_strategy()
        like, created = kwargs.get("colocate_with"), strategy._created
        is_split = like is None and strategy.shards(created)
        is_weight = is_split and kwargs.get("trainable") is True and kwargs.get("shape") is None
        if strategy.num_replicas_in_sync == 1 or not (is_weight or isinstance(like, ShardedVariable)):
            return super()._create_variable(next_creator, **kwargs)
        kwargs.pop("colocate_with", None)
        device = self.worker_devices[0]
        # Values are drawn as one process draws them, one variable at a time; the chief's count.
        given = self._get_variable_creator_initial_value(0, device, None, **kwargs)
        with tf.device(device):
            value = given() if callable(given) else given
        if not value.dtype.is_floating:
            return super()._create_variable(next_creator, **{**kwargs, "initial_value": value})
        kind = RowLayout if like is None and created is not None and _is_of_table(created) else FlatBucket
        if like is not None and value.shape == like.shape:
            kind = type(like.layout)
        layout = kind(value.dtype, (value.shape,), strategy.number_of_parts)
        parts, name = [], kwargs.pop("name", None) or "weight"
        aggregation = kwargs.get("aggregation", tf.VariableAggregation.NONE)
        for i, device in enumerate(self.worker_devices):
            with tf.device(device):
                part = own_part(layout, strategy.first_part + i, value)
                own = {**kwargs, "initial_value": part, "name": f"{name}/replica_{i}/" if i else name}
                parts.append(next_creator(**own))
        variable = ShardedVariable(strategy, parts, aggregation, layout)
        variable._tfdist_number = next(strategy._variable_numbers)
        strategy._sharded_variables[variable._tfdist_number] = variable
        return variable


class PartsHooks(DataParallelHooks):
    """Models of whose weights some may be sharded."""

    # Whether all weights are.
    _splits_all = False

    @property
    def keeps_parts(self) -> bool:
        """Whether each process has its own part of some weights."""
        return bool(self._strategy._sharded_variables)

    def check(self, model: keras.Model) -> None:
        super().check(model)
        if not (self._splits_all or any(map(is_sharded, model.variables))):
            return
        if model.run_eagerly and own_methods(model, "train_step"):
            raise ValueError(
                f"Received: run_eagerly=True and a train_step of the model's own, under {self._name}. Only a graph "
                "tells whether it changes gradients, of which each replica has a part. Expected: run_eagerly=False."
            )
        for optimizer in all_optimizers_of(model):
            self._check_optimizer(optimizer)

    @property
    def _name(self) -> str:
        return type(self._strategy).__name__ + ("" if self._splits_all else " with a ShardedEmbedding")

    def _check_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Refuses optimizers that need to see whole variables.

        Raises:
            ValueError: for one that does not update each element by itself.
        """
        is_outer = parts_of(optimizer) and not isinstance(optimizer, ShardedOptimizer)
        if not is_outer and type(optimizer) not in ELEMENTWISE:
            names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ValueError(
                f"Received: optimizer {type(optimizer).__name__} under {self._name}, where each replica updates a "
                f"part of each variable. Expected: one of {names}, which update each element by itself."
            )

    def initialize_variable(self, initialize: Callable, variable: Any, value: Any) -> None:
        # It may be made later than it was created, where the scope of its name is left already.
        with shadowed(self._strategy, _created=variable):
            initialize(variable, value)

    def _arrange(self, callback_list: Any, callbacks: list, model: Any) -> list:
        for callback in callbacks if self.keeps_parts else ():
            # It is the chief's alone, and would wait for the others.
            if isinstance(callback, keras.callbacks.TensorBoard) and callback.histogram_freq and self.peers:
                raise ValueError(
                    f"Received: TensorBoard(histogram_freq={callback.histogram_freq}) under {self._name} on several "
                    "processes, of which the chief alone would read weights. Expected: histogram_freq=0."
                )
        return super()._arrange(callback_list, callbacks, model)

    @contextlib.contextmanager
    def collected(self, model: keras.Model) -> Iterator[None]:
        with super().collected(model), self._strategy.collecting(model):
            yield

    def save(self, write: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        with self._strategy.collecting(model):
            return super().save(write, model, *args, **kwargs)


class KeepsParts:
    """Mixin for strategies whose `extended` has `PartsExtended`, and whose hooks are `PartsHooks`."""

    # Whether no process before has the same parts, whether weights are collected now, and the Keras variable that is
    # being made.
    is_first_copy = True
    _is_collecting = False
    _created: keras.Variable | None = None

    @functools.cached_property
    def _sharded_variables(self) -> weakref.WeakValueDictionary[int, ShardedVariable]:
        """Those that are there, by their numbers, which are the same on all processes."""
        return weakref.WeakValueDictionary()

    @property
    def number_of_parts(self) -> int:
        """How many parts a weight has."""
        return self.num_replicas_in_sync

    @property
    def first_part(self) -> int:
        """The number of this process' first part."""
        return self.extended._input_position()[1] * len(self.extended.worker_devices)

    def shards(self, variable: keras.Variable | None) -> bool:
        """Whether a variable that is being made is split, if it is a weight; `None`: it is none of Keras'."""
        return variable is not None and _is_of_table(variable)

    def all_parts(self, variable: ShardedVariable) -> tf.Tensor:
        """All parts of a variable, one below the other; all processes call it."""
        (parts,) = gather(self, [variable])
        return tf.reshape(parts, [-1, parts.shape[-1]])

    def meet_to_read(self, variable: ShardedVariable) -> None:
        """Waits until all processes are about to read a variable."""
        if self._peers:
            self._meet(variable._tfdist_number, f"read weight '{variable.name}', too")

    def _meet(self, number: int | None, waits_for: str) -> int | None:
        """Tells all processes which variable this one reads, `None` if it answers; returns what the chief reads."""
        numbers = self._peers.gather("weight", number, f"{waits_for} (each process has a part of it)")
        if set(numbers) - {None, numbers[0]}:
            read = zip(self._peers.names, numbers, strict=True)
            raise RuntimeError(
                f"Received: processes that read other weights at the same point: {dict(read)}. Expected: all read, or "
                "save, the same ones in the same order. Look for code that only one rank runs."
            )
        return numbers[0]

    @contextlib.contextmanager
    def collecting(self, model: keras.Model) -> Iterator[None]:
        """While the block runs on the chief, it can read any variable: the others answer, and run the block after."""
        if self._is_collecting or not self._peers or not any(map(is_sharded, model.variables)):
            yield
            return
        waits_for, is_together = "save the model, too", True
        self._is_collecting = True
        try:
            # The chief says what it reads next; nobody has more than one whole variable at a time.
            while not self.is_chief and (number := self._meet(None, waits_for)) is not None:
                self.all_parts(self._sharded_variables[number])
            yield
        except (PeerTimeoutError, ProcessGoneError):
            is_together = False
            raise
        finally:
            self._is_collecting = False
            if self.is_chief and is_together:
                self._meet(None, waits_for)
