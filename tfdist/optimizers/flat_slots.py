"""The slots of an optimizer (momenta, accumulators, averages), of which each replica keeps a shard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.inspection.replica_values import gather, parts_of_variable
from tfdist.optimizers.flat_bucket import FlatBucket


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
