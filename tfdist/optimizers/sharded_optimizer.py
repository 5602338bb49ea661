"""An optimizer whose slots are split over the replicas (ZeRO, stage 1).

The functions at the top refuse, with the reason, what a `ShardedOptimizer` could not do exactly as its inner optimizer.
`collect_slots` fetches the slots of other processes before a model is saved.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras import hooks_of
from tfdist.compat.upstream import no_automatic_dependency_tracking
from tfdist.inspection.model_state import all_optimizers_of, parts_of_variable
from tfdist.optimizers.flat import AVERAGE, FlatSlots, FlatStep, in_buckets, is_decayed
from tfdist.optimizers.in_parts import are_finite, clip_parts
from tfdist.steps.flat_bucket import FlatBucket
from tfdist.steps.gradients import AS_THEY_ARE, GradientOptions, all_reduce_sum, own_rows_of_sums
from tfdist.steps.keras_step import global_replica, local_replica, shadowed
from tfdist.steps.reduce import all_gather

# They update each element by itself, and keep nothing but slots with a constant initial value.
ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)


def check_inner(optimizer: Any) -> None:
    """Checks the inner optimizer.

    Raises:
        ValueError: if its slots cannot be split.
    """
    kind = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        raise ValueError(
            f"Received: ShardedOptimizer({kind}(...)). Each replica sees only a shard of each variable. Expected: one "
            f"of {', '.join(c.__name__ for c in ELEMENTWISE)}, which update each element by itself."
        )
    if optimizer.built:
        raise ValueError(
            f"Received: ShardedOptimizer({kind}(...)) of an optimizer that has been built already, whole, on each "
            "replica. Expected: a new optimizer that nothing else uses."
        )
    norm = "clipnorm" if optimizer.clipnorm else "global_clipnorm"
    if optimizer.gradient_accumulation_steps and getattr(optimizer, norm):
        raise ValueError(
            f"Received: ShardedOptimizer of {kind}(gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}, {norm}={getattr(optimizer, norm)}). What is accumulated is "
            "sharded, and no replica knows the norm of the whole. Expected: clipvalue, or no gradient accumulation."
        )


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Checks the strategy in whose scope the optimizer is created.

    Raises:
        ValueError: if it does not hold all weights on all replicas in step.
    """
    if hooks_of(strategy).is_data_parallel or not tf.distribute.has_strategy():
        return
    raise ValueError(
        f"Received: a ShardedOptimizer in the scope of a {type(strategy).__name__}. Expected: no scope, or that of a "
        "tfdist.MirroredStrategy or tfdist.MultiWorkerMirroredStrategy, whose replicas hold all weights and could each "
        "hold a part of the slots. Use the optimizer inside as it is."
    )


def check_variables(variables: Sequence[Any]) -> None:
    """Checks the variables on which the optimizer is built.

    Raises:
        ValueError: if a variable cannot be laid out flat; or inside `strategy.run`.
    """
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False) or not tf.as_dtype(variable.dtype).is_floating:
            raise ValueError(
                f"Received: a ShardedOptimizer for variable '{variable.path}' of dtype {variable.dtype}, which is "
                "overwritten with its gradient, or not made of floats. Expected: floating variables, updated by the "
                "optimizer. Use the optimizer inside as it is."
            )
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Received: a ShardedOptimizer that is built by its first step, on a replica. Expected: "
            "`optimizer.build(model.trainable_variables)` in the strategy's scope before your own training loop "
            "(`fit` does so)."
        )


class _AveragesInParts:
    """Stands where Keras' callback finds the averages of weights, of which each replica has parts."""

    def __iter__(self) -> Iterator[Any]:
        raise ValueError(
            "Received: SwapEMAWeights with a ShardedOptimizer(use_ema=True), whose averages are split over the "
            "replicas. Expected: no SwapEMAWeights, since `fit` ends with the averages, and ema_overwrite_frequency= "
            "takes them over before; or the optimizer inside as it is."
        )


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
    files are those of the inner optimizer. It sends as much as plain data parallelism: each replica gets the sum of its
    n-th of the gradients only, and gathers the weights. Where that is not possible (between processes by NCCL or
    Horovod, in a training loop of your own), it sends half as much again.

    Variables are laid end to end in flat buckets, each beginning at a multiple of 64 bytes, so that parts are equal
    whatever the sizes of the variables. Without a strategy, or with one replica, it does what the inner optimizer does.

    Learning rate schedules, weight decay, clipping, averages of the weights (`use_ema`), gradient accumulation (whose
    sums are split, too), and `LossScaleOptimizer(ShardedOptimizer(...))` work. Gradients of embeddings are summed by
    row first: of a row that a batch uses several times, Keras' own optimizers square the parts one by one.

    Files hold whole slots, as if they were written without this class, and load into any number of replicas. With
    several processes no one can write them alone: all take part in `model.save`, `save_weights` and the callbacks that
    save, and the chief writes. When `fit` ends it fetches all slots to the hosts, and the chief can save alone.

    Args:
        inner_optimizer: a new Keras optimizer that updates each element by itself, or its name: SGD, RMSprop, Adam,
            AdamW, Adadelta, Adagrad, Adamax, Ftrl or Lion. Create both in the strategy's scope.
        name: name of this optimizer; by default the name of the inner optimizer.

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

    # Whether `apply` is given what `scatter` returns, as in a step of a Keras model.
    _is_given_rows = False

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
        # The formulas of the inner optimizer read its counter of steps: both optimizers share it, and this one counts.
        self._iterations = inner._iterations
        # Keras would save the inner optimizer as well. All that has to be saved are the `variables` of this one.
        for method in ("save_own_variables", "load_own_variables"):
            object.__setattr__(inner, method, lambda store: None)

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
        most = getattr(strategy, "_gradient_options", AS_THEY_ARE).bucket_bytes
        self._buckets = in_buckets(variables, strategy.num_replicas_in_sync, functools.partial(is_decayed, inner), most)
        self._slots = FlatSlots(strategy, self._buckets, variables, lambda: int(self._iterations.numpy()), self.name)
        with shadowed(inner, add_variable_from_reference=self._slots.add):
            inner.build(self._trainable_variables)
        self._step = FlatStep(inner, self._slots, self._buckets, self._trainable_variables)
        if self.use_ema:
            for optimizer in (inner, self):
                object.__setattr__(optimizer, "_model_variables_moving_average", _AveragesInParts())
        self.built = True

    @property
    def variables(self) -> list[Any]:
        """Counter, learning rate and slots, in the order and with the shapes of the inner optimizer."""
        return self.inner_optimizer.variables + (self._slots.views if self.built else [])

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Does what it does in `keras.optimizers.Optimizer`."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Does what it does in `keras.optimizers.Optimizer`; with several processes all call it with the same values.

        Raises:
            ValueError: if it is not built, or for other numbers or shapes.
        """
        if not self.built or len(weights) != len(self.variables):
            raise ValueError(
                f"Received: {len(weights)} weights for optimizer '{self.name}' ({'' if self.built else 'not yet '}"
                f"built). Expected: one for each of its {len(self.variables)} variables, after "
                "`optimizer.build(model.trainable_variables)`."
            )
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

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
        """Does what it does in `keras.optimizers.Optimizer`, and collects the slots."""
        if self.built:
            self.collect()
        super().finalize_variable_values(var_list)

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Sequence[Any]) -> None:
        averages = [slot for slot in self._slots.views if slot.kind == AVERAGE]
        for variable in trainable_variables:
            variable.assign(averages[self._get_variable_index(variable)].read_value())

    def _rows(
        self, grads: Sequence[Any], variables: Sequence[Any], rows_of: Callable[[FlatBucket, Mapping], tf.Tensor]
    ) -> list[tf.Tensor]:
        """This replica's rows of each gradient, from its shards of the buckets."""
        by_index = {self._get_variable_index(v): grad for v, grad in zip(variables, grads, strict=True)}
        found: dict[int, tf.Tensor] = {}
        for bucket, indices in self._buckets:
            if given := {place: by_index[i] for place, i in enumerate(indices) if i in by_index}:
                found |= dict(zip(indices, bucket.split(self._place[1], rows_of(bucket, given)), strict=True))
        return [found[i] for i in by_index]

    @property
    def _place(self) -> tuple[int, int]:
        """Which replica this is, of those of this process, and of all."""
        alone = self._distribution_strategy.num_replicas_in_sync == 1
        return (0, 0) if alone else (local_replica(), global_replica())

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        # On each replica: its shard of each bucket is updated, all shards are gathered, and only then is each variable
        # assigned.
        replica, shard = self._place
        if not self._is_given_rows:
            pairs = self._all_reduce_sum_gradients(list(zip(grads, trainable_variables, strict=True)))
            grads = self._rows(
                [grad for grad, _ in pairs],
                trainable_variables,
                lambda bucket, given: bucket.cut(shard, bucket.dense(given)),
            )
        if not self.gradient_accumulation_steps:
            grads = clip_parts(self, self._clip_gradients, grads)
        by_variable = {self._get_variable_index(v): g for g, v in zip(grads, trainable_variables, strict=True)}
        shards = [self._step.shard(b, replica, shard, by_variable) for b in range(len(self._buckets))]
        for (bucket, indices), whole in zip(self._buckets, all_gather(shards), strict=True):
            for i, value in zip(indices, bucket.values(whole), strict=True):
                parts_of_variable(self._trainable_variables[i])[replica].assign(value)

    def get_config(self) -> dict[str, Any]:
        """The inner optimizer, and the name."""
        return {"name": self.name, "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict | None = None) -> ShardedOptimizer:
        """The reverse of `get_config`."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects=custom_objects)
        return cls(inner, name=config["name"])


def scatter(
    sharded: ShardedOptimizer, grads: Sequence[Any], variables: Sequence[Any], weight: Any, options: GradientOptions
) -> list[tf.Tensor]:
    """Adds up gradients over the replicas, bucket by bucket; each replica gets its rows of them.

    Args:
        sharded: the optimizer of the variables.
        grads: of this replica, tensors or slices.
        variables: those of the gradients.
        weight: as in `tfdist.steps.gradients.all_reduce_sum`.
        options: how they travel.

    Returns:
        For each gradient this replica's rows of the sum, `[rows, width]`: what `apply` takes where `given_rows` runs.
    """
    if not sharded.built:
        sharded.build(variables)
    shard = sharded._place[1]

    def rows_of_sum(bucket: FlatBucket, given: Mapping[int, Any]) -> tf.Tensor:
        if all(isinstance(grad, tf.IndexedSlices) for grad in given.values()):
            # A large table: a batch has few of its rows.
            sums = all_reduce_sum(list(given.values()), options, weight)
            return bucket.cut(shard, bucket.dense(dict(zip(given, sums, strict=True))))
        return own_rows_of_sums([bucket.whole(bucket.dense(given))], options, weight)[0]

    return sharded._rows(grads, variables, rows_of_sum)


@contextlib.contextmanager
def given_rows(optimizer: Any, sharded: ShardedOptimizer) -> Iterator[None]:
    """While the block runs, `optimizer.apply`, which hands all gradients to `sharded`, takes what `scatter` returns."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(shadowed(sharded, _is_given_rows=True))
        if optimizer is not sharded:
            finite = functools.partial(are_finite, optimizer.check_finite)
            stack.enter_context(shadowed(optimizer, check_finite=finite))
        yield


def collect_slots(model: keras.Model) -> None:
    """Makes all slots readable on every process.

    Does nothing if they are readable: without a `ShardedOptimizer`, in one process, and if no step was made since they
    were collected, as at the end of `fit`. Otherwise it is a collective, before which the processes wait for each
    other: a process that saves alone gets an error instead of waiting for ever.

    Args:
        model: a model of a strategy of several processes.

    Raises:
        tfdist.runtime.peers.PeerTimeoutError: if another process does not save the model, too.
        ConnectionError: if another process has ended.
    """
    scattered = [one for one in all_optimizers_of(model) if isinstance(one, ShardedOptimizer) and not one.is_collected]
    if scattered:
        hooks_of(model.distribute_strategy).peers.gather(
            "slots", None, "save the model, too (each process has a part of the slots of its ShardedOptimizer)"
        )
    for optimizer in scattered:
        optimizer.collect()
