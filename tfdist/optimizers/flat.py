"""Weights, gradients and slots laid end to end in one matrix for each dtype, and dealt out to the replicas by rows.

steps/flat_bucket.py has the layout. The graph of a step, on the device of each replica, for each bucket of variables:

    gradients of this replica -> reduce_scatter: this replica's rows of the sum --+
    weights                   -> cut out this replica's rows                    --+-> update of the shard -> all_gather
    slots                        (are shards already)                           --+               -> all weights

The weights are the same on all replicas, so cutting needs no communication. Between the reduce-scatter and the update,
a replica has some rows of each gradient: on the way through Keras they are a matrix for each variable, which is empty
where other replicas have all. What `all_gather` returns is assigned to the variables by `ShardedOptimizer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.inspection.model_state import gather, own_copy, parts_of_variable
from tfdist.steps.flat_bucket import FlatBucket
from tfdist.steps.gradients import buckets


def in_buckets(
    variables: Sequence[Any], shards: int, kind_of: Callable[[Any], Hashable], most: int | None = None
) -> list[tuple[FlatBucket, list[int]]]:
    """Buckets of variables of one kind and one dtype, each with the indices of its variables; `most` bytes as sent."""
    groups: dict[Hashable, list[int]] = {}
    for i, variable in enumerate(variables):
        groups.setdefault(kind_of(variable), []).append(i)
    found = []
    for group in groups.values():
        specs = [tf.TensorSpec(variables[i].shape, variables[i].dtype) for i in group]
        for places in buckets(specs, most):
            bucket = FlatBucket(specs[places[0]].dtype, tuple(specs[place].shape for place in places), shards)
            found.append((bucket, [group[place] for place in places]))
    return found


def is_decayed(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Whether weight decay acts on a variable. Keras asks TensorFlow's variable, whose name has the layers' in it."""
    return optimizer._use_weight_decay(own_copy(variable))


class FlatSlots:
    """The slots of an optimizer by kind ("momentum", ...) and bucket: one Keras variable that differs by replica.

    Args:
        strategy: the strategy of the variables; each of its replicas has a shard.
        buckets: the buckets with the indices of their variables.
        variables: the Keras variables.
        step: returns how many steps were made. What was collected is out of date after another step.
        owner: name of the optimizer, the beginning of the slots' paths.

    Attributes:
        views: every slot of every variable, in the order in which Keras' optimizers keep and save theirs.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        buckets: Sequence[tuple[FlatBucket, list[int]]],
        variables: Sequence[Any],
        step: Callable[[], int],
        owner: str,
    ) -> None:
        self._strategy = strategy
        self._buckets = [bucket for bucket, _ in buckets]
        self._places = {
            id(variables[i]): (b, place) for b, (_, indices) in enumerate(buckets) for place, i in enumerate(indices)
        }
        self._step, self._owner = step, owner
        self._shards: dict[str, list[Any]] = {}
        self._collected: dict[int, np.ndarray] = {}
        self._collected_after = -1
        self.views: list[ShardedSlot] = []

    def add(self, reference_variable: Any, name: str | None = None, initializer: Any = "zeros") -> ShardedSlot:
        """Does what `Optimizer.add_variable_from_reference` does, for all variables of a bucket at a time."""
        kind = name or "var"
        if kind not in self._shards:
            self._shards[kind] = [self._new_shards(b, kind, initializer) for b in range(len(self._buckets))]
        bucket, place = self._places[id(reference_variable)]
        slot = ShardedSlot(self, kind, bucket, place, self._owner, reference_variable)
        self.views.append(slot)
        return slot

    def of_replicas(self, kind: str) -> list[tf.Variable]:
        """The shards of a kind of slot that are in this process: by bucket, and by replica within the bucket."""
        return [part for shards in self._shards[kind] for part in parts_of_variable(shards)]

    def collect(self) -> None:
        """With several processes: fetches the shards of all others, so that slots can be read until the next step.

        A collective: all processes call it after the same step. What is fetched is kept on the host.
        """
        if self._is_local:
            return
        # First frees the copies of an earlier step, which are as large as all slots.
        self._collected = {}
        every = [shards for kind in self._shards.values() for shards in kind]
        self._collected = {
            id(shards): value.numpy().reshape(-1, value.shape[-1])
            for shards, value in zip(every, gather(self._strategy, every), strict=True)
        }
        self._collected_after = self._step()

    @property
    def is_readable(self) -> bool:
        """Whether this process can read slots by itself."""
        return self._is_local or self._collected_after == self._step()

    def read(self, kind: str, bucket: int, place: int) -> np.ndarray:
        """The slot of one variable.

        Raises:
            RuntimeError: if other processes have shards of it, and `collect` was not called after the last step.
        """
        if not self.is_readable:
            raise RuntimeError(
                f"Received: a process that reads the slots '{kind}' of optimizer '{self._owner}' by itself, while the "
                "other processes hold shards of them. Expected: `model.optimizer.collect()` on every process before, "
                "after the last step (`fit` does so when it ends, and so do `model.save`, `save_weights`, "
                "keras.callbacks.ModelCheckpoint and tfdist.callbacks.BackupAndRestore, on every process)."
            )
        layout, shards = self._buckets[bucket], self._shards[kind][bucket]
        begin, end = layout.begins[place], layout.begins[place + 1]
        if self._is_local:
            rows = [part[low:high].numpy() for part, low, high, _ in self._overlaps(shards, layout, begin, end)]
        else:
            rows = [self._collected[id(shards)][begin:end]]
        shape = layout.shapes[place]
        return np.concatenate(rows).reshape(-1)[: shape.num_elements()].reshape(shape)

    def write(self, kind: str, bucket: int, place: int, value: np.ndarray) -> None:
        """Sets the slot of one variable; with several processes all call it with the same value."""
        layout, shards = self._buckets[bucket], self._shards[kind][bucket]
        begin, end = layout.begins[place], layout.begins[place + 1]
        rows = np.zeros((end - begin) * layout.width, layout.dtype.as_numpy_dtype)
        rows[: value.size] = value.reshape(-1)
        rows = rows.reshape(end - begin, layout.width)
        for part, low, high, offset in self._overlaps(shards, layout, begin, end):
            part[low:high].assign(rows[offset : offset + high - low])
        self._collected_after = -1

    @property
    def _is_local(self) -> bool:
        return self._strategy.num_replicas_in_sync == self._local_replicas

    @property
    def _local_replicas(self) -> int:
        # The default strategy has no list of devices.
        return 1 if self._strategy.num_replicas_in_sync == 1 else len(self._strategy.extended.worker_devices)

    def _overlaps(
        self, shards: Any, layout: FlatBucket, begin: int, end: int
    ) -> list[tuple[tf.Variable, int, int, int]]:
        """This process' shards that have some of the rows: `(shard, its first such row, the end, rows before)`."""
        first = 0 if self._is_local else self._strategy.extended._input_position()[1] * self._local_replicas
        found = []
        for shard, part in enumerate(parts_of_variable(shards), first):
            start = shard * layout.shard_rows
            low, high = max(begin - start, 0), min(end - start, layout.shard_rows)
            if low < high:
                found.append((part, low, high, start + low - begin))
        return found

    def _new_shards(self, bucket: int, kind: str, initializer: Any) -> Any:
        layout = self._buckets[bucket]
        inside = self._strategy is tf.distribute.get_strategy() or self._strategy.num_replicas_in_sync == 1
        with contextlib.nullcontext() if inside else self._strategy.scope(), tf.init_scope():
            return keras.Variable(
                keras.initializers.get(initializer),
                shape=(layout.shard_rows, layout.width),
                dtype=layout.dtype.name,
                trainable=False,
                autocast=False,
                # Each replica has a value of its own, and reads and writes it without the others.
                synchronization="on_read",
                aggregation="sum",
                name=f"{kind}_shards_{bucket}",
            )


class ShardedSlot:
    """Takes the place of a slot variable among the variables of an optimizer.

    It has what Keras and `tfdist.callbacks.BackupAndRestore` need of a variable to save and load it.

    Args:
        slots: where its rows are.
        kind: name of the slot, such as "momentum".
        bucket: index of the bucket of the variable.
        place: index of the variable in the bucket.
        owner: name of the optimizer.
        variable: the variable.
    """

    trainable = False

    def __init__(self, slots: FlatSlots, kind: str, bucket: int, place: int, owner: str, variable: Any) -> None:
        self._slots, self._where = slots, (kind, bucket, place)
        self.kind = kind
        # The names and shapes that Optimizer.add_variable_from_reference gives.
        self.name = f"{variable.path.replace('/', '_')}_{kind}"
        self.path = f"{owner}/{self.name}"
        self.shape, self.dtype = tf.TensorShape(variable.shape), variable.dtype

    @property
    def _value(self) -> ShardedSlot:
        # There is no TensorFlow variable behind it.
        return self

    @property
    def value(self) -> tf.Tensor:
        """The whole slot, as `read_value`; `model.get_state_tree()` asks for it."""
        return self.read_value()

    def numpy(self) -> np.ndarray:
        """A copy of the whole slot.

        Raises:
            RuntimeError: if other processes have parts of it, see `ShardedOptimizer.collect`.
        """
        return self._slots.read(*self._where)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The same as `numpy`; `model.save("x.h5")` reads variables this way."""
        return self.numpy().astype(dtype or self.dtype, copy=False)

    def read_value(self) -> tf.Tensor:
        """The whole slot; with several processes a collective, which all of them call after the same step."""
        if not self._slots.is_readable:
            self._slots.collect()
        return tf.constant(self.numpy())

    def assign(self, value: Any) -> None:
        """Sets the whole slot; with several processes all of them call it with the same value.

        Raises:
            ValueError: if `value` has another shape.
        """
        value = np.asarray(value)
        if value.shape != tuple(self.shape):
            raise ValueError(
                f"Received: a value of shape {value.shape} for '{self.path}'. Expected: {tuple(self.shape)}. Load what "
                "was saved of the same model and optimizer; the number of replicas does not matter."
            )
        self._slots.write(*self._where, value)


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

        `replica` is the current replica's index among those of this process, `shard` among all. `grads` are what the
        shard has of each gradient, by the indices of the variables; those that have none keep weights and slots.
        Returns the weights after the step.
        """
        (bucket, indices), optimizer = self._buckets[b], self._optimizer
        inside = [indices[place] for place, _, _ in bucket.within(shard)]

        def weight(place: int) -> tf.Tensor:
            return parts_of_variable(self._variables[indices[place]])[replica].read_value()

        weights = bucket.cut(shard, weight)
        if any(i in grads for i in inside):
            parts = {place: grads[i] for place, i in enumerate(indices) if i in grads}
            grad = bucket.join(shard, parts)
            is_updated = {place: tf.ones_like(part) for place, part in parts.items()}
            mask = None if all(i in grads for i in inside) else bucket.join(shard, is_updated) > 0
            apply = self._accumulated if optimizer.gradient_accumulation_steps else self._updated
            weights = apply(b, replica, shard, grad, weights, mask)
        return self._averaged(b, replica, weights) if optimizer.use_ema else weights

    def _accumulated(
        self, b: int, replica: int, shard: int, grad: tf.Tensor, weights: tf.Tensor, mask: Any
    ) -> tf.Tensor:
        steps = self._optimizer.gradient_accumulation_steps
        accumulator = self._slots[ACCUMULATOR][self._index(b, replica)]

        def update() -> tf.Tensor:
            # Clipping by norm is refused together with accumulation, so that a shard can be clipped by itself.
            mean = self._optimizer._clip_gradients([(grad + accumulator.read_value()) / steps])[0]
            accumulator.assign(tf.zeros_like(mean))
            return self._updated(b, replica, shard, mean, weights, mask)

        def accumulate() -> tf.Tensor:
            accumulator.assign(grad + accumulator.read_value())
            return tf.identity(weights)

        return tf.cond(tf.equal((self._optimizer._iterations.value + 1) % steps, 0), update, accumulate)

    def _updated(self, b: int, replica: int, shard: int, grad: tf.Tensor, weights: tf.Tensor, mask: Any) -> tf.Tensor:
        optimizer, dtype = self._optimizer, weights.dtype
        kept = [s[self._index(b, replica)] for kind, s in self._slots.items() if kind not in (AVERAGE, ACCUMULATOR)]
        before = [slot.read_value() for slot in kept] if mask is not None else []
        flat = FlatWeights(_key(b, replica), weights)
        if optimizer.weight_decay is not None and (decaying := self._decaying(b, shard)) is not None:
            rate, decay = tf.cast(optimizer.learning_rate, dtype), tf.cast(optimizer.weight_decay, dtype)
            flat.assign_sub(flat.value * decay * rate * decaying)
        optimizer.update_step(grad, flat, optimizer.learning_rate)
        if mask is None:
            return flat.value
        for slot, value in zip(kept, before, strict=True):
            slot.assign(tf.where(mask, slot.read_value(), value))
        return tf.where(mask, flat.value, weights)

    def _decaying(self, b: int, shard: int) -> Any:
        """1 where the weights of a shard decay, else 0; `None`: none of the bucket does.

        Buckets part those that decay from the others, but variables may be excluded later, as after `load_model`.
        """
        bucket, indices = self._buckets[b]
        decays = [is_decayed(self._optimizer, self._variables[i]) for i in indices]
        if not any(decays) or all(decays):
            return 1 if all(decays) else None
        within = bucket.within(shard)
        ones = {place: tf.ones([end - begin, bucket.width], bucket.dtype) for place, begin, end in within}
        return bucket.join(shard, {place: one for place, one in ones.items() if decays[place]})

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
