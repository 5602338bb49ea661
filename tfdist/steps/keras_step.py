"""Recognises the step functions that Keras hands to `Strategy.run`, and holds what is known while one is traced.

Keras' trainer calls `strategy.run(model.train_step, ...)`. That bound method is where a strategy meets the model it
trains, so everything that needs the model (its optimizers, its seeds, its normalisation layers) starts here, and
nothing of Keras has to be replaced for it. Functions of custom training loops are not recognised and keep
`tf.distribute`'s documented semantics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.patch import owner
from tfdist.inspection.batch_sharding import count_rows, static_rows

# Not `keras.Model`: some models are layers that mix Keras' trainer in.
_Trainer = owner(keras.Model, "compile")


@dataclasses.dataclass
class KerasStep:
    """One `train_step`, `test_step` or predict step of a Keras model, while it is traced or run.

    A replica's `weight` is its share of the rows of the global batch: the mean of a loss over the global batch is the
    sum over the replicas of weight times local mean. With equal shares it is one over the number of replicas; a
    replica that got no row of an uneven last batch has weight 0. `relative_weight` is weight times number of replicas.

    Attributes:
        kind: "train", "test" or "predict".
        model: the model, or `None` for "predict".
        function: what Keras wants to be run on every replica.
        on_batch: whether the data came from `*_on_batch`, not from a distributed dataset.
        scaled_losses: (id of an optimizer, local replica) for each `scale_loss` that was called.
        sums: what the replicas add up or gather, in this order: see `tfdist.steps.collectives`.
        states: by local replica, what it has written of its layers' state: `tfdist.steps.layer_state`.
        is_compiled: whether XLA compiles what the replicas compute between their exchanges.
        exchanged: what came of the last exchange, on all replicas of this process.
        global_seeds: what `keras.random` functions draw from that are given no seed, for the replicas' threads.
    """

    kind: str
    model: keras.Model | None
    function: Callable
    on_batch: bool = False
    scaled_losses: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    sums: list[Any] = dataclasses.field(default_factory=list)
    states: dict[int, Any] = dataclasses.field(default_factory=dict)
    is_compiled: bool = False
    exchanged: list[tf.Tensor] = dataclasses.field(default_factory=list)
    global_seeds: keras.random.SeedGenerator | None = None
    _shares: dict[int, tuple[tf.Tensor, tf.Tensor, bool]] = dataclasses.field(default_factory=dict)

    def begin_replica(self, data: Any, rows: tf.Tensor | None, global_rows: tf.Tensor | None) -> None:
        """Notes this replica's number of rows and weight. Called on every replica before the step function.

        Args:
            data: this replica's share of the batch.
            rows: how many of its rows count; `None` for all.
            global_rows: rows of the global batch; `None` if the dataset does not know.
        """
        context = tf.distribute.get_replica_context()
        fixed = static_rows(data)
        rows = count_rows(data) if rows is None else rows
        may_be_empty = fixed is None or fixed <= 1
        if global_rows is None and fixed:
            # A user's own distributed dataset with a fixed batch size on every replica.
            relative_weight = tf.constant(1.0)
        else:
            if global_rows is None:
                global_rows = context.all_reduce(tf.distribute.ReduceOp.SUM, rows)
            # In this order it is 1 where all have equally many rows, without any rounding.
            relative_weight = rows * context.num_replicas_in_sync / tf.maximum(global_rows, 1)
            relative_weight = tf.cast(relative_weight, tf.float32)
        self._shares[local_replica()] = rows, relative_weight, may_be_empty

    def begin_shard(self, weight: tf.Tensor) -> None:
        """Notes this replica's weight, where the one who has cut the batch knows it.

        Args:
            weight: a float32 scalar.
        """
        self._shares[local_replica()] = weight, weight * self.replicas, False

    @property
    def weight(self) -> tf.Tensor:
        """Share of the current replica in the global batch, a float32 scalar in [0, 1]."""
        return self.relative_weight / self.replicas

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return tf.distribute.get_replica_context().num_replicas_in_sync

    @property
    def relative_weight(self) -> tf.Tensor:
        """Rows of the current replica over the mean of all replicas, a float32 scalar."""
        return self._shares[local_replica()][1]

    def adds_up(self, value: tf.Tensor) -> bool:
        """Whether the replicas' values of a traced step add up to that of the global batch."""
        state = self.states.get(local_replica())
        return state is not None and state.adds_up(value)

    @property
    def counts(self) -> tf.Tensor | None:
        """Whether the current replica has rows of its own, a boolean scalar; `None` if it certainly has."""
        rows, _, may_be_empty = self._shares[local_replica()]
        return rows > 0 if may_be_empty else None


def recognise(function: Callable) -> KerasStep | None:
    """Returns the Keras step that `function` is, or `None` if it is something else (a user's own function)."""
    if isinstance(function, types.MethodType) and isinstance(function.__self__, _Trainer):
        kind = {"train_step": "train", "test_step": "test"}.get(function.__name__)
        return KerasStep(kind, function.__self__, function) if kind else None
    if "make_predict_function.<locals>.one_step_on_data" in getattr(function, "__qualname__", ""):
        return KerasStep("predict", None, function)
    return None


def predicting_model(function: Callable) -> keras.Model:
    """The model that Keras' predict function, as `recognise` knows it, belongs to."""
    variables = inspect.getclosurevars(inspect.unwrap(function)).nonlocals
    return variables["self"] if "self" in variables else predicting_model(variables["step_func"])


def current_step() -> KerasStep | None:
    """The Keras step that is traced (or eagerly run) in this replica, or `None` outside of one."""
    if tf.distribute.in_cross_replica_context():
        return None
    return getattr(tf.distribute.get_strategy(), "_keras_step", None)


def local_replica() -> int:
    """Index of the current replica among those of this process."""
    return tf.distribute.get_replica_context()._replica_id


def global_replica() -> int:
    """Index of the current replica among those of all workers."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))


@contextlib.contextmanager
def shadowed(owner: Any, **methods: Callable) -> Iterator[None]:
    """Shadows methods on one instance (never on its class) until the block ends."""
    for name, method in methods.items():
        # Past Keras' attribute tracking, which would record the functions as state of the object.
        object.__setattr__(owner, name, method)
    try:
        yield
    finally:
        for name in methods:
            object.__delattr__(owner, name)
