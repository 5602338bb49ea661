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
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfdist.inspection.model_state import parts_of_variable
from tfdist.steps.gradients import all_reduce_sum, buckets, pack, scale, unpack, weighted
from tfdist.steps.keras_step import local_replica, shadowed
from tfdist.steps.reduce import agreed, all_reduce

# As `_make` names them: the number of a weight, and what is kept for it.
_NAME = re.compile(r"(0|[1-9][0-9]{0,5})/([a-z]+)")


@dataclasses.dataclass(frozen=True)
class Slot:
    """One of the variables that a method keeps for a weight.

    Attributes:
        shape: of the variable.
        initial: its first value; `None` for zeros.
        is_shared: whether all replicas have the same value. If not, each has its own, and their sum is what counts.
    """

    shape: tuple[int, ...]
    initial: np.ndarray | None = None
    is_shared: bool = False


# What is kept for one weight on this replica, and what is to be kept next.
Kept = Mapping[str, tf.Variable]
Next = dict[str, tf.Tensor]


class Sums(NamedTuple):
    """What a method makes of the gradients of a bucket.

    Attributes:
        gradients: sums over all replicas, after compression.
        others: sums of what is sent as it is.
        is_finite: a boolean scalar, the same on all replicas: whether all that was sent is finite.
        following: by gradient, what is to be kept if all buckets are finite.
    """

    gradients: list[tf.Tensor]
    others: list[tf.Tensor]
    is_finite: tf.Tensor
    following: list[Next]


class Method(Protocol):
    """How gradients are compressed: `PowerSGD`, `TopK`.

    Attributes:
        start_step: before this step of the optimizer, gradients are sent as they are.
    """

    start_step: int

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot] | None:
        """What is kept for a weight of this shape; `None` if it is not worth compressing."""

    def prepare(self, optimizer: Any) -> tuple[Any, dict[str, Any]]:
        """What the method has to know of an optimizer, and attributes of it to replace where it updates such weights.

        Raises:
            ValueError: if the method and the optimizer do not go together.
        """

    def whole(self, gradient: tf.Tensor, kept: Kept, settings: Any) -> tuple[tf.Tensor, Next]:
        """What stands for a gradient before `start_step`, and what is to be kept."""

    def sums(
        self, gradients: Sequence[tf.Tensor], kept: Sequence[Kept], others: Sequence[tf.Tensor], settings: Any
    ) -> Sums:
        """Sums over all replicas of compressed gradients, and of others as they are."""


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

    def make_all(self, optimizer: Any) -> None:
        """Makes what is kept for all weights of an optimizer that is built. To be called in the strategy's scope.

        Raises:
            ValueError: if the method and the optimizer do not go together.
        """
        self.method.prepare(optimizer)
        slots = {
            f"{i}/{kind}": (weight, slot)
            for i, weight in enumerate(optimizer._trainable_variables)
            for kind, slot in (self.method.slots(tuple(weight.shape)) or {}).items()
        }
        self._make(optimizer, slots)

    def make(self, optimizer: Any, name: str, shape: Sequence[int]) -> None:
        """Makes a variable that `variables_of` has named in another process, if it has one of this name and shape.

        To be called in the strategy's scope, with an optimizer that is built.
        """
        parts, weights = _NAME.fullmatch(name), optimizer._trainable_variables
        if parts is None or int(parts[1]) >= len(weights) or name in self._kept.get(optimizer, {}):
            return
        weight = weights[int(parts[1])]
        slot = (self.method.slots(tuple(weight.shape)) or {}).get(parts[2])
        if slot is not None and slot.shape == tuple(shape):
            self._make(optimizer, {name: (weight, slot)})

    def _slots(self, optimizer: Any, weights: Sequence[Any], gradients: Sequence[Any]) -> list[Kept | None]:
        """For each gradient what is kept for it on this replica, or `None` if it is sent as it is.

        Called on every replica. The first time, all of them meet here to make the variables.
        """
        numbers = {id(weight): i for i, weight in enumerate(optimizer._trainable_variables)}
        wanted: list[dict[str, str] | None] = []
        missing: dict[str, tuple[Any, Slot]] = {}
        for weight, gradient in zip(weights, gradients, strict=True):
            is_dense = isinstance(gradient, tf.Tensor) and gradient.shape.is_fully_defined()
            slots = self.method.slots(tuple(weight.shape)) if is_dense and id(weight) in numbers else None
            names = slots and {kind: f"{numbers[id(weight)]}/{kind}" for kind in slots}
            wanted.append(names)
            missing.update({names[kind]: (weight, slot) for kind, slot in (slots or {}).items()})
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
            What the method has to know of the optimizer.
        """
        # A loss scale changes neither the momentum nor who applies it.
        is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        inner = optimizer.inner_optimizer if is_scaled else optimizer
        settings, attributes = self.method.prepare(inner)
        original = inner.update_step

        def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
            numbers = {int(name.partition("/")[0]) for name in self._kept.get(optimizer, {})}
            is_compressed = inner._get_variable_index(variable) in numbers
            with shadowed(inner, **attributes) if is_compressed else contextlib.nullcontext():
                original(gradient, variable, learning_rate)

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
            bucket_bytes: as in `tfdist.steps.gradients.GradientOptions`; of what is compressed, not of what is sent.
            settings: what `prepared` has yielded.

        Returns:
            The sums of the gradients, then of the others.
        """
        values = [*gradients, *others]
        dtypes = [value.dtype for value in values]
        kept = [*self._slots(optimizer, weights, gradients), *[None] * len(others)]
        chosen = [i for i, one in enumerate(kept) if one is not None]
        # Rests are of gradients without the loss' scale, which may be another one in the next step.
        loss_scale = getattr(optimizer, "dynamic_scale", None)
        loss_scale = 1.0 if loss_scale is None else _part(loss_scale).read_value()
        for i in chosen:
            values[i] = scale(tf.cast(values[i], computed(dtypes[i])), share / tf.cast(loss_scale, share.dtype))
        results: list = [None] * len(values)
        finite: list[tf.Tensor] = []
        following: list[tuple[Kept, Next]] = []
        for bucket in buckets(values, bucket_bytes):
            compressed = [i for i in bucket if i in chosen]
            plain = [i for i in bucket if i not in chosen]
            packed = weighted(share, [pack([values[i] for i in plain])] if plain else [])
            if compressed:
                of_bucket = [values[i] for i in compressed], [kept[i] for i in compressed]
                found = self._sums(optimizer, *of_bucket, packed, settings)
                finite.append(found.is_finite)
                following += zip(of_bucket[1], found.following, strict=True)
                for i, total in zip(compressed, found.gradients, strict=True):
                    results[i] = tf.cast(total * tf.cast(loss_scale, total.dtype), dtypes[i])
                packed = found.others
            else:
                packed = sum_of(packed)
            finite += [all_finite(one) for one in packed]
            parts = unpack(*packed, [values[i] for i in plain]) if plain else []
            for i, total in zip(plain, parts, strict=True):
                results[i] = total
        rows = [i for i, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
        for i, total in zip(rows, all_reduce_sum([values[i] for i in rows], weight=share), strict=True):
            results[i] = total
            finite.append(all_finite(total.values))
        # What was made in a branch of the step does not look like it.
        agreed([one for one in results if isinstance(one, tf.Tensor)])
        if following:
            _keep(following, tf.reduce_all(finite))
        return results

    def _sums(
        self,
        optimizer: Any,
        gradients: Sequence[tf.Tensor],
        kept: Sequence[Kept],
        others: Sequence[tf.Tensor],
        settings: Any,
    ) -> Sums:
        method = self.method

        def whole() -> Sums:
            of_each = [method.whole(gradient, of, settings) for gradient, of in zip(gradients, kept, strict=True)]
            totals = sum_of([*(sent for sent, _ in of_each), *others])
            is_finite = tf.reduce_all([all_finite(total) for total in totals])
            following = [
                {kind: found.get(kind, variable.read_value()) for kind, variable in of.items()}
                for (_, found), of in zip(of_each, kept, strict=True)
            ]
            return Sums(totals[: len(gradients)], totals[len(gradients) :], is_finite, following)

        def compressed() -> Sums:
            return method.sums(gradients, kept, others, settings)

        if not method.start_step:
            return compressed()
        step = optimizer.iterations
        # With `gradient_accumulation_steps` it is computed, not a variable.
        step = _part(step).read_value() if isinstance(step, keras.Variable) else step
        return tf.cond(step < method.start_step, whole, compressed)


def _keep(following: Sequence[tuple[Kept, Next]], is_finite: tf.Tensor) -> None:
    """Assigns what is to be kept. After an overflow, of which the optimizer learns, all replicas keep what they had."""

    def assign() -> tf.Tensor:
        for kept, values in following:
            for kind, variable in kept.items():
                variable.assign(values[kind])
        return tf.constant(True)

    tf.cond(is_finite, assign, lambda: tf.constant(False))


def sum_of(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums over all replicas of tensors of one dtype, in one collective."""
    return unpack(all_reduce(pack(values), differentiable=False), values)


def computed(dtype: tf.DType) -> tf.DType:
    """What gradients of a dtype are compressed in."""
    return dtype if dtype.size >= 4 else tf.float32


def check_start(start_step: Any) -> None:
    """Raises ValueError unless it is a number of steps."""
    if isinstance(start_step, bool) or not isinstance(start_step, Integral) or start_step < 0:
        raise ValueError(f"Received: start_step={start_step!r}. Expected: a number of steps, 0 or more.")


def all_finite(value: tf.Tensor) -> tf.Tensor:
    """Whether all elements are finite, a boolean scalar."""
    return tf.reduce_all(tf.math.is_finite(value)) if value.dtype.is_floating else tf.constant(True)


def _part(variable: Any) -> tf.Variable:
    return parts_of_variable(variable)[local_replica()]
