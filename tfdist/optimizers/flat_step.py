"""One step of an optimizer on one replica's shards of weights, gradients and slots.

The graph of a step, on the device of each replica, for each bucket of variables:

    gradients, summed over the replicas -> cut out this replica's rows --+
    weights                             -> cut out this replica's rows --+-> update of the shard -> all_gather
    slots                                  (are shards already)        --+                          -> all weights

The summed gradients and the weights are the same on all replicas, so cutting needs no communication: `all_gather` is
the only collective here. What it returns is assigned to the variables by `ShardedOptimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.inspection.replica_values import parts_of_variable
from tfdist.optimizers.flat_bucket import FlatBucket
from tfdist.optimizers.flat_slots import FlatSlots, ShardedSlot


class FlatWeights:
    """A shard of the weights that `Optimizer.update_step` takes for a variable. It exists within a step only.

    A real variable would stay between the steps, and take as much memory as a slot.

    Args:
        key: the key by which the optimizer finds the slots.
        value: the weights before the update.
    """

    def __init__(self, key: str, value: tf.Tensor):
        # The name that TFOptimizer._var_key reads.
        self._unique_id = key
        self.value = value

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the weights."""
        return self.value.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the shard."""
        return self.value.shape

    def assign(self, value: Any) -> None:
        """Sets the value."""
        self.value = tf.convert_to_tensor(value)

    def assign_add(self, value: Any) -> None:
        """Adds to the value."""
        self.value = self.value + value

    def assign_sub(self, value: Any) -> None:
        """Subtracts from the value."""
        self.value = self.value - value

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.value, dtype=dtype, name=name)


# Names that Keras' base class gives to slots of its own.
AVERAGE, ACCUMULATOR = "average", "gradient_accumulator"


class FlatStep:
    """Updates shards as `Optimizer._backend_apply_gradients` updates variables, by the same formulas.

    Args:
        optimizer: the optimizer that updates, built on the variables. Its lists of slots are replaced by lists of the
            shards of this process.
        slots: its slots.
        buckets: the buckets with the indices of their variables.
        variables: the Keras variables.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        slots: FlatSlots,
        buckets: Sequence[tuple[FlatBucket, list[int]]],
        variables: Sequence[Any],
    ) -> None:
        self._optimizer, self._buckets, self._variables = optimizer, buckets, variables
        # Keras builds an optimizer without variables when it loads an .h5 file.
        self._replicas = len(parts_of_variable(variables[0])) if variables else 0
        self._slots = {kind: slots.of_replicas(kind) for kind in dict.fromkeys(slot.kind for slot in slots.views)}
        for attribute, value in list(vars(optimizer).items()):
            if isinstance(value, list) and value and isinstance(value[0], ShardedSlot):
                object.__setattr__(optimizer, attribute, self._slots[value[0].kind])
        for b in range(len(buckets)):
            for replica in range(self._replicas):
                optimizer._trainable_variables_indices[_key(b, replica)] = self._index(b, replica)

    def shard(self, b: int, replica: int, shard: int, grads: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """Updates one replica's shard of a bucket, on this replica's device and without communication.

        Rows of variables that have no gradient are computed as well, with a gradient of 0, and then put back by a mask.

        Args:
            b: index of a bucket.
            replica: index of the current replica among those of this process.
            shard: index of the current replica among all.
            grads: the gradients by the indices of the variables; those that have none keep weights and slots.

        Returns:
            The weights of the shard after the step.
        """
        (bucket, indices), optimizer = self._buckets[b], self._optimizer
        inside = [indices[place] for place, _, _ in bucket.within(shard)]

        def weight(place: int) -> tf.Tensor:
            return parts_of_variable(self._variables[indices[place]])[replica].read_value()

        def gradient(place: int) -> tf.Tensor:
            grad = grads.get(indices[place])
            return tf.zeros(bucket.shapes[place], bucket.dtype) if grad is None else tf.cast(grad, bucket.dtype)

        def is_updated(place: int) -> tf.Tensor:
            return tf.fill(bucket.shapes[place], tf.constant(indices[place] in grads, bucket.dtype))

        weights = bucket.cut(shard, weight)
        if any(i in grads for i in inside):
            grad = bucket.cut(shard, gradient)
            mask = None if all(i in grads for i in inside) else bucket.cut(shard, is_updated) > 0
            if optimizer.gradient_accumulation_steps:
                weights = self._accumulated(b, replica, grad, weights, mask)
            else:
                weights = self._updated(b, replica, grad, weights, mask)
        return self._averaged(b, replica, weights) if optimizer.use_ema else weights

    def _accumulated(self, b: int, replica: int, grad: tf.Tensor, weights: tf.Tensor, mask: Any) -> tf.Tensor:
        steps = self._optimizer.gradient_accumulation_steps
        accumulator = self._slots[ACCUMULATOR][self._index(b, replica)]

        def update() -> tf.Tensor:
            # Clipping by norm is refused together with accumulation, so that a shard can be clipped by itself.
            mean = self._optimizer._clip_gradients([(grad + accumulator.read_value()) / steps])[0]
            accumulator.assign(tf.zeros_like(mean))
            return self._updated(b, replica, mean, weights, mask)

        def accumulate() -> tf.Tensor:
            accumulator.assign(grad + accumulator.read_value())
            return tf.identity(weights)

        return tf.cond(tf.equal((self._optimizer._iterations.value + 1) % steps, 0), update, accumulate)

    def _updated(self, b: int, replica: int, grad: tf.Tensor, weights: tf.Tensor, mask: Any) -> tf.Tensor:
        optimizer, dtype = self._optimizer, weights.dtype
        kept = [s[self._index(b, replica)] for kind, s in self._slots.items() if kind not in (AVERAGE, ACCUMULATOR)]
        before = [slot.read_value() for slot in kept] if mask is not None else []
        flat = FlatWeights(_key(b, replica), weights)
        if optimizer.weight_decay is not None and optimizer._use_weight_decay(self._variables[self._buckets[b][1][0]]):
            rate, decay = tf.cast(optimizer.learning_rate, dtype), tf.cast(optimizer.weight_decay, dtype)
            flat.assign_sub(flat.value * decay * rate)
        optimizer.update_step(grad, flat, optimizer.learning_rate)
        if mask is None:
            return flat.value
        for slot, value in zip(kept, before, strict=True):
            slot.assign(tf.where(mask, slot.read_value(), value))
        return tf.where(mask, flat.value, weights)

    def _averaged(self, b: int, replica: int, weights: tf.Tensor) -> tf.Tensor:
        optimizer = self._optimizer
        iterations = tf.convert_to_tensor(optimizer.iterations)
        slot = self._slots[AVERAGE][self._index(b, replica)]
        momentum = tf.cast(tf.not_equal(iterations, 0), weights.dtype) * optimizer.ema_momentum
        average = momentum * slot.read_value() + (1 - momentum) * weights
        slot.assign(average)
        if not optimizer.ema_overwrite_frequency:
            return weights
        return tf.where(tf.equal((iterations + 1) % optimizer.ema_overwrite_frequency, 0), average, weights)

    def _index(self, b: int, replica: int) -> int:
        return b * self._replicas + replica


def _key(b: int, replica: int) -> str:
    return f"tfdist_bucket_{b}_of_replica_{replica}"
