"""An optimizer whose slots are split over the replicas (ZeRO, stage 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.utils.tracking import no_automatic_dependency_tracking

from tfdist.optimizers.flat_bucket import in_buckets
from tfdist.optimizers.flat_slots import FlatSlots
from tfdist.optimizers.flat_step import AVERAGE, FlatStep
from tfdist.optimizers.gathering import all_gather
from tfdist.optimizers.sharded_checks import check_inner, check_strategy, check_variables
from tfdist.strategies.keras_step import global_replica, local_replica, shadowed
from tfdist.strategies.replica_values import parts_of_variable

# What Keras' base class does with gradients and weights, before and after the update itself.
_SETTINGS = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


@keras.saving.register_keras_serializable(package="tfdist")
class ShardedOptimizer(keras.optimizers.Optimizer):
    """Splits the slots of an optimizer over the replicas, so that each keeps one n-th of them (ZeRO-1).

    Adam keeps two values for every weight, on every replica the same. With this optimizer each of n replicas keeps and
    updates them for an n-th of the weights, and then gets the other weights from the others. Weights, history and saved
    files are those of the optimizer inside. The gradient is summed over the replicas as ever; to gather the weights
    adds half as much communication, in one collective for each dtype.

    Variables are laid end to end in flat buckets, each beginning at a multiple of 64 bytes, so that parts are equal
    whatever the sizes of the variables. Without a strategy, or with one replica, it is the optimizer inside.

    Learning rate schedules, weight decay, clipping, averages of the weights (`use_ema`), gradient accumulation (whose
    sums are split, too), and `LossScaleOptimizer(ShardedOptimizer(...))` work. Gradients of embeddings are summed by
    row first: of a row that a batch uses several times, Keras' own optimizers square the parts one by one.

    Files hold whole slots, as if they were written without this class, and load into any number of replicas. With
    several processes no one can write them alone: all take part in `model.save`, `save_weights` and the callbacks that
    save, and the chief writes. When `fit` ends it fetches all slots to the hosts, and the chief can save alone.

    Args:
        inner_optimizer: a new Keras optimizer that updates each element by itself, or its name: SGD, RMSprop, Adam,
            AdamW, Adadelta, Adagrad, Adamax, Ftrl or Lion. Create both in the strategy's scope.
        name: name of this optimizer; by default that of the one inside.

    Raises:
        ValueError: for an optimizer that is not elementwise, was used already, or clips by norm what it accumulates;
            in the scope of another strategy than tfdist's `MirroredStrategy` and `MultiWorkerMirroredStrategy`.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> strategy = tfdist.MirroredStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(tfdist.ShardedOptimizer(keras.optimizers.Adam(1e-3)), "mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)

    References:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, arXiv 1910.02054.
    """

    def __init__(self, inner_optimizer: keras.optimizers.Optimizer | str, name: str | None = None) -> None:
        inner = keras.optimizers.get(inner_optimizer)
        check_inner(inner)
        check_strategy(tf.distribute.get_strategy())
        super().__init__(
            lambda: inner.learning_rate,
            name=name or inner.name,
            **{setting: getattr(inner, setting) for setting in _SETTINGS},
        )
        self.inner_optimizer = inner
        # Formulas of the optimizer inside use its counter; this one counts.
        self._iterations = inner._iterations
        # All that is saved are `variables`, as they are without this class.
        for method in ("save_own_variables", "load_own_variables"):
            object.__setattr__(inner, method, _nothing)

    @no_automatic_dependency_tracking
    def build(self, variables: Sequence[Any]) -> None:
        """Creates the slots.

        Raises:
            ValueError: if `variables` are not made of floats, or if called on a replica.
        """
        if self.built:
            return
        check_variables(variables)
        strategy, inner = self._distribution_strategy, self.inner_optimizer
        self._trainable_variables = list(variables)
        self._trainable_variables_indices = {self._var_key(v): i for i, v in enumerate(variables)}
        self._buckets = in_buckets(variables, strategy.num_replicas_in_sync, inner._use_weight_decay)
        self._slots = FlatSlots(strategy, self._buckets, variables, lambda: int(self._iterations.numpy()), self.name)
        with shadowed(inner, add_variable_from_reference=self._slots.add):
            inner.build(self._trainable_variables)
        self._step = FlatStep(inner, self._slots, self._buckets, self._trainable_variables)
        self.built = True

    @property
    def variables(self) -> list[Any]:
        """Counter, learning rate and slots, in the order and with the shapes of the optimizer inside."""
        return self.inner_optimizer.variables + (self._slots.views if self.built else [])

    @property
    def learning_rate(self) -> Any:
        """That of the optimizer inside."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """As in `keras.optimizers.Optimizer`."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def collect(self) -> None:
        """On several processes: fetches all slots to the hosts, so that any of them can save them until the next step.

        A collective: all processes call it after the same step. `fit` does so when it ends, and whatever saves the
        model on all processes before it does; only what reads slots by itself needs a call.
        """
        self._slots.collect()

    @property
    def is_collected(self) -> bool:
        """Whether this process can read all slots: they are here, or were collected after the last step."""
        return not self.built or self._slots.is_readable

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """As in `keras.optimizers.Optimizer`; collects the slots, too."""
        if self.built:
            self.collect()
        super().finalize_variable_values(var_list)

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Sequence[Any]) -> None:
        averages = [slot for slot in self._slots.views if slot.kind == AVERAGE]
        for variable in trainable_variables:
            variable.assign(averages[self._get_variable_index(variable)].read_value())

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        pairs = self._all_reduce_sum_gradients(list(zip(grads, trainable_variables, strict=True)))
        grads = [tf.convert_to_tensor(grad) for grad, _ in pairs]
        if not self.gradient_accumulation_steps:
            grads = self._clip_gradients(grads)
        by_variable = {self._get_variable_index(v): g for g, (_, v) in zip(grads, pairs, strict=True)}
        alone = self._distribution_strategy.num_replicas_in_sync == 1
        replica, shard = (0, 0) if alone else (local_replica(), global_replica())
        shards = [self._step.shard(b, replica, shard, by_variable) for b in range(len(self._buckets))]
        for (bucket, indices), whole in zip(self._buckets, all_gather(shards), strict=True):
            for i, value in zip(indices, bucket.values(whole), strict=True):
                parts_of_variable(self._trainable_variables[i])[replica].assign(value)

    def get_config(self) -> dict[str, Any]:
        """The optimizer inside, and the name."""
        return {"name": self.name, "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict | None = None) -> ShardedOptimizer:
        """The reverse of `get_config`."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects=custom_objects)
        return cls(inner, name=config["name"])


def _nothing(store: Any) -> None:
    """In place of what is saved elsewhere."""
