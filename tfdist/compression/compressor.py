"""Sums of compressed gradients, and what of each gradient was not sent yet: error feedback.

step 1   gradient 1 ---------------------- + -> compressed, sent -> update 1
                                           |
                                           +-> rest 1 --+
                                                        |
step 2   gradient 2 ---------------------- + <----------+
                                           +-> compressed, sent -> update 2 ...

Nothing is lost, only late: the sum of all updates differs from the sum of all gradients by the last rest. Karimireddy
et al., "Error feedback fixes SignSGD and other gradient compression schemes" (2019, arXiv 1901.09847).

Each replica has a rest of its own. They are variables like those of metrics, kept per replica and added up where they
are read: that is how a backup has them, and how another number of replicas takes them over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfdist.inspection.replica_values import parts_of_variable
from tfdist.steps.collectives import all_reduce
from tfdist.steps.gradients import all_reduce_sum, buckets, pack, scale, unpack, weighted
from tfdist.steps.keras_step import local_replica, shadowed


@dataclasses.dataclass(frozen=True)
class Slot:
    """One of the variables that a method keeps for a weight.

    Attributes:
        shape: of the variable.
        initial: what it is at first; `None` for zeros.
        is_shared: whether it is the same on all replicas. Others are kept per replica, and add up.
    """

    shape: tuple[int, ...]
    initial: np.ndarray | None = None
    is_shared: bool = False


class Method(Protocol):
    """How gradients are compressed: `PowerSGD`, `TopK`.

    Attributes:
        start_step: before this step of the optimizer, gradients are sent as they are.
        local_clipnorm: the largest norm of a replica's gradients, times the square root of the number of replicas;
            `None` for any.
    """

    start_step: int
    local_clipnorm: float | None

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot] | None:
        """What is kept for a weight of this shape; `None` if it is not worth compressing."""

    def prepare(self, optimizer: Any) -> tuple[Any, dict[str, Any]]:
        """Settings that it takes from the optimizer, and attributes that it has instead for what is compressed."""

    def whole(self, gradient: tf.Tensor, kept: Mapping[str, tf.Variable], settings: Any) -> tf.Tensor:
        """What stands for a gradient as long as everything is sent."""

    def sums(
        self,
        gradients: Sequence[tf.Tensor],
        kept: Sequence[Mapping[str, tf.Variable]],
        others: Sequence[tf.Tensor],
        settings: Any,
    ) -> list[tf.Tensor]:
        """Sums over all replicas of compressed gradients, then of the others as they are."""


class Compressor:
    """A method of compression, and what it keeps between the steps of each optimizer of a strategy.

    Args:
        method: how to compress.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        # By optimizer, then by name: the number of the weight and what is kept for it. Weak: no optimizer has to live
        # longer for it.
        self._kept: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Slot]]] = weakref.WeakKeyDictionary()

    def variables_of(self, optimizer: Any) -> dict[str, keras.Variable]:
        """What is kept for the weights of an optimizer, by name; empty before its first step."""
        return {name: variable for name, (variable, _) in sorted(self._kept.get(optimizer, {}).items())}

    def reset(self, optimizer: Any) -> None:
        """Puts all that is kept for an optimizer into its first state."""
        for variable, slot in self._kept.get(optimizer, {}).values():
            for part in parts_of_variable(variable):
                part.assign(tf.zeros_like(part) if slot.initial is None else tf.cast(slot.initial, part.dtype))

    def make(self, optimizer: Any, name: str, shape: Sequence[int]) -> None:
        """Makes a variable that `variables_of` has named in another process, if it has one of this name and shape.

        To be called in the strategy's scope, with an optimizer that is built.
        """
        number, _, kind = name.partition("/")
        weights = optimizer._trainable_variables
        if not number.isdecimal() or int(number) >= len(weights):
            return
        slot = (self.method.slots(tuple(weights[int(number)].shape)) or {}).get(kind)
        is_new = name not in self._kept.get(optimizer, {})
        if is_new and slot is not None and slot.shape == tuple(shape):
            self._make(optimizer, {name: (weights[int(number)], slot)})

    def _slots(
        self, optimizer: Any, weights: Sequence[Any], gradients: Sequence[Any]
    ) -> list[dict[str, tf.Variable] | None]:
        """For each gradient what is kept for it on this replica, or `None` if it is sent as it is.

        Called on every replica. The first time, all of them meet here to make the variables.
        """
        numbers = {id(weight): i for i, weight in enumerate(optimizer._trainable_variables)}
        wanted: list[dict[str, str] | None] = []
        missing: dict[str, tuple[Any, Slot]] = {}
        for weight, gradient in zip(weights, gradients, strict=True):
            of_weight = None
            is_dense = isinstance(gradient, tf.Tensor) and gradient.shape.is_fully_defined()
            if is_dense and id(weight) in numbers:
                of_weight = self.method.slots(tuple(weight.shape))
            if of_weight is None:
                wanted.append(None)
                continue
            names = {kind: f"{numbers[id(weight)]}/{kind}" for kind in of_weight}
            wanted.append(names)
            missing.update({names[kind]: (weight, slot) for kind, slot in of_weight.items()})
        kept = self._kept.get(optimizer, {})
        missing = {name: slot for name, slot in missing.items() if name not in kept}
        if missing:
            # Variables of all replicas are made where none of them is alone.
            tf.distribute.get_replica_context().merge_call(lambda strategy: self._make(optimizer, missing))
        kept = self._kept.get(optimizer, {})
        return [names and {kind: _part(kept[name][0]) for kind, name in names.items()} for names in wanted]

    def _make(self, optimizer: Any, slots: Mapping[str, tuple[Any, Slot]]) -> None:
        kept = self._kept.setdefault(optimizer, {})
        with tf.init_scope(), tf.distribute.get_strategy().scope():
            for name, (weight, slot) in slots.items():
                dtype = computed(tf.as_dtype(keras.backend.standardize_dtype(weight.dtype)))
                shared = {} if slot.is_shared else {"synchronization": "on_read", "aggregation": "sum"}
                variable = keras.Variable(
                    "zeros" if slot.initial is None else slot.initial.astype(dtype.as_numpy_dtype),
                    shape=slot.shape if slot.initial is None else None,
                    dtype=dtype.name,
                    trainable=False,
                    name=f"{weight.name}_{name.partition('/')[2]}",
                    **shared,
                )
                kept[name] = variable, slot

    @contextlib.contextmanager
    def prepared(self, optimizer: Any) -> Iterator[Any]:
        """As long as the block runs, an optimizer leaves to the method what that does for compressed weights.

        Yields:
            The method's settings.
        """
        # A loss scale changes neither the momentum nor who applies it.
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        settings, attributes = self.method.prepare(inner)
        original = inner.update_step

        def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
            number = inner._get_variable_index(variable)
            is_compressed = any(name.startswith(f"{number}/") for name in self._kept.get(optimizer, {}))
            before = {name: getattr(inner, name) for name in attributes}
            for name, value in attributes.items() if is_compressed else ():
                setattr(inner, name, value)
            try:
                original(gradient, variable, learning_rate)
            finally:
                for name, value in before.items():
                    setattr(inner, name, value)

        with shadowed(inner, update_step=update_step) if attributes else contextlib.nullcontext():
            yield settings

    def all_reduce_sum(
        self,
        optimizer: Any,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        weights: Sequence[Any],
        others: Sequence[tf.Tensor],
        share: tf.Tensor,
        bucket_bytes: int | None,
        settings: Any,
    ) -> list:
        """Sums over all replicas, each in its replica's context.

        Args:
            optimizer: which applies the gradients.
            gradients: of this replica.
            weights: the variables that these are gradients of.
            others: what else is added up; it is not compressed.
            share: with what this replica's values are multiplied (float32 scalar).
            bucket_bytes: as in `tfdist.steps.gradients.Wire`; of what is compressed, not of what is sent.
            settings: what `prepared` has yielded.

        Returns:
            The sums of the gradients, then of the others.
        """
        values = [*gradients, *others]
        kept = [*self._slots(optimizer, weights, gradients), *[None] * len(others)]
        chosen = [i for i, one in enumerate(kept) if one is not None]
        # Rests are of gradients without the loss' scale, which may be another one in the next step.
        loss_scale = getattr(optimizer, "dynamic_scale", None)
        loss_scale = None if loss_scale is None else _part(loss_scale).read_value()
        factor = share if loss_scale is None else share / loss_scale
        for i in chosen:
            values[i] = scale(values[i], factor)
        if self.method.local_clipnorm is not None:
            clipped = _clipped([values[i] for i in chosen], self.method.local_clipnorm)
            for i, one in zip(chosen, clipped, strict=True):
                values[i] = one
        results: list = [None] * len(values)
        for bucket in buckets(values, bucket_bytes):
            compressed = [i for i in bucket if i in chosen]
            plain = [i for i in bucket if i not in chosen]
            packed = [weighted(share, pack([values[i] for i in plain]))] if plain else []
            if compressed:
                of_bucket = [values[i] for i in compressed], [kept[i] for i in compressed]
                sums, packed = self._sums(optimizer, *of_bucket, packed, settings)
            else:
                sums, packed = [], sum_of(packed)
            parts = unpack(*packed, [values[i] for i in plain]) if plain else []
            for i, total in zip([*compressed, *plain], [*sums, *parts], strict=True):
                results[i] = total
        if loss_scale is not None:
            for i in chosen:
                results[i] = results[i] * tf.cast(loss_scale, results[i].dtype)
        rows = [i for i, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
        for i, total in zip(rows, all_reduce_sum([values[i] for i in rows], weight=share), strict=True):
            results[i] = total
        return results

    def _sums(
        self,
        optimizer: Any,
        gradients: Sequence[tf.Tensor],
        kept: Sequence[Mapping[str, tf.Variable]],
        others: Sequence[tf.Tensor],
        settings: Any,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        method, dtype = self.method, gradients[0].dtype
        gradients = [tf.cast(value, computed(dtype)) for value in gradients]
        others = [tf.cast(value, computed(dtype)) for value in others]

        def whole() -> list[tf.Tensor]:
            sent = [method.whole(gradient, of, settings) for gradient, of in zip(gradients, kept, strict=True)]
            return sum_of([*sent, *others], noted=False)

        def compressed() -> list[tf.Tensor]:
            return method.sums(gradients, kept, others, settings)

        if method.start_step:
            step = _part(optimizer.iterations).read_value()
            sums = tf.cond(step < method.start_step, whole, compressed)
        else:
            sums = compressed()
        sums = [tf.cast(total, dtype) for total in sums]
        return sums[: len(gradients)], sums[len(gradients) :]


def sum_of(values: Sequence[tf.Tensor], noted: bool = True) -> list[tf.Tensor]:
    """Sums over all replicas of tensors of one dtype, in one collective."""
    return unpack(all_reduce(pack(values), differentiable=False, noted=noted), values)


def computed(dtype: tf.DType) -> tf.DType:
    """What gradients of a dtype are compressed in."""
    return dtype if dtype.size >= 4 else tf.float32


def _clipped(gradients: Sequence[Any], norm: float) -> list[Any]:
    """This replica's weighted gradients, clipped together to `norm / sqrt(replicas)`.

    Each replica has a part of the global gradient, and independent parts of N replicas have a norm that is smaller by
    sqrt(N). What is clipped is lost: it does not come back as a rest. Lin et al., section 3.3.
    """
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    return tf.clip_by_global_norm(gradients, norm / math.sqrt(replicas))[0]


def check_method(start_step: Any, local_clipnorm: Any) -> None:
    """Raises ValueError for what no method can use."""
    if isinstance(start_step, bool) or not isinstance(start_step, Integral) or start_step < 0:
        raise ValueError(f"Received: start_step={start_step!r}. Expected: a number of steps, 0 or more.")
    if local_clipnorm is not None and not (isinstance(local_clipnorm, Real) and local_clipnorm > 0):
        raise ValueError(f"Received: local_clipnorm={local_clipnorm!r}. Expected: a positive number, or None.")


def _part(variable: Any) -> tf.Variable:
    return parts_of_variable(variable)[local_replica()]
