"""What is different about a Keras model while a strategy traces its step: shadows on instances, gone afterwards.

optimizer.scale_loss   divides the loss by the number of replicas
optimizer.apply        receives the gradient of the global batch: weighted by the replicas' rows and reduced once,
                       before loss-scale test, clipping, accumulation and update, so that all of these act on the same
                       values on every replica
BatchNormalization     uses the statistics of the global batch
SeedGenerator.next     folds the replica's index into the seed: a different Dropout mask on every replica
Variable.assign        does what the variable's `aggregation` says
Layer._losses          is another list for each replica
Loss.call              warns of losses that mix the rows of a batch
Metric.result          marks what it returns, so that logs that are metrics' results are told from others
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.inspection.model_parts import metrics_of, optimizers_of, parts_of, seed_generators_of
from tfdist.runtime.control_signals import Agreement
from tfdist.steps import layer_state, losses_that_mix_rows
from tfdist.steps.batch_normalization import global_moments
from tfdist.steps.gradients import Wire, all_reduce_sum
from tfdist.steps.keras_step import KerasStep, global_replica, local_replica, shadowed
from tfdist.steps.step_logs import marked_result

# Any odd constant with well-mixed bits keeps the replicas' seeds apart (2**32 divided by the golden ratio).
SEED_STRIDE = 0x9E3779B9


@contextlib.contextmanager
def shadows(step: KerasStep, *, wire: Wire, global_batch_norm: bool) -> Iterator[None]:
    """Applies all shadows of a train or test step for as long as the block runs."""
    with contextlib.ExitStack() as stack:
        if step.kind == "train":
            for optimizer in optimizers_of(step.model):
                _shadow_optimizer(stack, step, optimizer, wire)
        for layer in step.model._flatten_layers():
            stack.enter_context(_losses_of_replicas(layer))
            if isinstance(layer, keras.layers.BatchNormalization) and (global_batch_norm or layer.synchronized):
                stack.enter_context(shadowed(layer, _moments=global_moments(layer)))
        for generator in seed_generators_of(step.model):
            stack.enter_context(shadowed(generator, next=_next_of_replica(generator.next)))
        stack.enter_context(losses_that_mix_rows.noticed(step.model))
        stack.enter_context(layer_state.aggregated(step))
        for metric in metrics_of(step.model):
            stack.enter_context(shadowed(metric, result=marked_result(metric)))
        yield


class _LossesOfReplicas(collections.UserList):
    """What a layer adds to the loss of the replica that asks."""

    def __init__(self) -> None:
        self._of: dict[int, list] = {}

    @property
    def data(self) -> list:
        return self._of.setdefault(local_replica(), [])

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]


@contextlib.contextmanager
def _losses_of_replicas(layer: keras.Layer) -> Iterator[None]:
    """Keeps apart what replicas add: they take turns in the middle of a forward pass, wherever they exchange values."""
    before = layer._losses
    object.__setattr__(layer, "_losses", _LossesOfReplicas())
    try:
        yield
    finally:
        object.__setattr__(layer, "_losses", before)


def _next_of_replica(original: Callable) -> Callable:
    def next_seed(*args: Any, **kwargs: Any) -> tf.Tensor:
        seed = original(*args, **kwargs)
        if tf.distribute.in_cross_replica_context():
            return seed
        return seed_of_replica(seed)

    return next_seed


def seed_of_replica(seed: tf.Tensor) -> tf.Tensor:
    """The seed that this replica has instead of one that all have: replica 0 draws what one process draws."""
    offset = global_replica() * SEED_STRIDE % 2**32
    return seed + tf.constant([offset, 0], seed.dtype)


def _shadow_optimizer(stack: contextlib.ExitStack, step: KerasStep, optimizer: Any, wire: Wire) -> None:
    original_scale, original_apply = optimizer.scale_loss, optimizer.apply
    settings = None if wire.compressor is None else stack.enter_context(wire.compressor.prepared(optimizer))

    def scale_loss(loss: tf.Tensor) -> tf.Tensor:
        # As many rows as one process has, on average: loss scaling sees gradients of the same size. The weight itself
        # comes later. A custom step need not call this, and back-propagation must be the same in both cases.
        step.scaled_losses.add((id(optimizer), local_replica()))
        return original_scale(loss / tf.distribute.get_replica_context().num_replicas_in_sync)

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        scaled = (id(optimizer), local_replica()) in step.scaled_losses
        reduced = _global_gradients(step, list(grads), variables, scaled, wire, optimizer, settings)
        original_apply(reduced, trainable_variables)
        step.states[local_replica()].skip()

    stack.enter_context(shadowed(optimizer, scale_loss=scale_loss, apply=apply))
    for part in [optimizer, *parts_of(optimizer)]:
        stack.enter_context(shadowed(part, _all_reduce_sum_gradients=list))


def _global_gradients(
    step: KerasStep, grads: list, variables: list, scaled: bool, wire: Wire, optimizer: Any, settings: Any
) -> list:
    """Gradients of the global batch's loss, on every replica; averages the state that the step has updated, too.

    Args:
        step: the step that is traced.
        grads: gradients of this replica's loss, `None` where there is none.
        variables: what they are gradients of.
        scaled: whether the loss was divided by the number of replicas before.
        wire: as in `all_reduce_sum`.
        optimizer: which applies them.
        settings: what the compressor takes from it.
    """
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise NotImplementedError(
                f"Variable {variable.path} is overwritten with its gradient (float8 scaling factors); a sum over "
                "replicas of such a value has no meaning, and tfdist does not train float8 layers. "
                "Use the dtype policy 'mixed_bfloat16' or 'mixed_float16' instead."
            )
    present = [i for i, g in enumerate(grads) if g is not None]
    values = [grads[i] for i in present]
    state = step.states[local_replica()]
    averaged = state.take_averaged()
    state_values = layer_state.values_of(averaged)
    # All travel with one weight. If the loss has the number of replicas in it, the state needs it as well.
    weight = step.relative_weight if scaled else step.weight
    if scaled:
        state_values = [value / step.replicas for value in state_values]
    agreement = _agreement_of(step.model)
    if agreement is not None:
        state_values.append(agreement.read())
    if wire.compressor is not None:
        weights = [variables[i] for i in present]
        sums = wire.compressor.all_reduce_sum(
            optimizer, values, weights, state_values, weight, wire.bucket_bytes, settings
        )
    elif wire.dtype is None:
        sums = all_reduce_sum([*values, *state_values], wire, weight=weight)
    else:
        # The state is kept from step to step: it must not be rounded to the wire's dtype.
        sums = all_reduce_sum(values, wire, weight=weight) + all_reduce_sum(state_values, weight=weight)
    if agreement is not None:
        total = sums.pop()
        if local_replica() == 0:
            agreement.note(total)
    layer_state.assign(averaged, sums[len(values) :])
    result: list = [None] * len(grads)
    for i, value in zip(present, sums[: len(values)], strict=True):
        result[i] = value
    return result


def _agreement_of(model: keras.Model) -> Agreement | None:
    agreement = getattr(model.distribute_strategy, "_agreement", None)
    return agreement if agreement is not None and model in agreement.models else None
