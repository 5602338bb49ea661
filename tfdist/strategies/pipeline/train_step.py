"""Keras' stock train step, micro-batch by micro-batch."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters import data_adapter_utils

from tfdist.layer_graph.values import attached
from tfdist.strategies.pipeline.clock import Clock
from tfdist.strategies.pipeline.gradient_sums import added
from tfdist.strategies.pipeline.loss_head import LossHead
from tfdist.strategies.pipeline.micro_batches import MicroBatches
from tfdist.strategies.pipeline.plan import PipelinePlan
from tfdist.strategies.pipeline.replicas import ReplicatedRun, read_trainable


class MaskedOutputs(Exception):
    """The model's outputs have masks that show only when its layers are called: the loss does not decompose."""


def train_step(plan: PipelinePlan, head: LossHead, data: Any, clock: Clock | None) -> dict[str, Any]:
    """What `keras.Model.train_step` does with a batch, where the loss decomposes.

    Returns:
        The logs.
    """
    model = plan.model
    x, y, sample_weight = data_adapter_utils.unpack_x_y_sample_weight(data)
    inputs = plan.functional._standardize_inputs(x)
    micro_batches = MicroBatches(inputs, plan.replicas * plan.schedule.microbatches)
    trainable = read_trainable(plan)
    run = ReplicatedRun(plan, micro_batches, inputs, trainable, training=True, differentiable=True, clock=clock)
    count = micro_batches.count
    scale = tf.ones([]) if model.optimizer is None else tf.cast(model.optimizer.scale_loss(tf.ones([])), tf.float32)
    targets = micro_batches.cut((y, sample_weight))
    weights = [micro_batches.weight(i) for i in range(count)]
    cotangents = [weight * scale for weight in weights]
    run.set_loss_cotangents(cotangents)
    losses, trackers = [], []

    def after_model(index: int) -> list[tf.Tensor]:
        outputs = run.outputs_of(index)
        if any(value.mask is not None for value in outputs):
            raise MaskedOutputs
        loss, tracked, gradients = head.add(outputs, *targets[index], cotangents[index])
        losses.append(loss * weights[index])
        trackers.append([value * weights[index] for value in tracked])
        run.add_cotangents(index, plan.graph.outputs, gradients)
        return [loss]

    run.execute(plan.schedule.linear_order(), after_model=after_model)
    if clock is not None:
        clock.store()
    run.assign_state()
    with tf.device(plan.device_of(len(plan.chunks) - 1)):
        added_losses = [loss * weights[i] for i in range(count) for loss in run.losses[i]]
        of_weights, gradients = _regularized(plan, trainable, run.gradients_of_variables(), scale)
        loss = tf.add_n([tf.cast(part, tf.float32) for part in (*losses, *added_losses, *of_weights)])
    head.track([tf.add_n(list(parts)) for parts in zip(*trackers, strict=True)], micro_batches.rows)
    model._loss_tracker.update_state(loss, sample_weight=micro_batches.rows)
    _update_weights(model, gradients)
    predictions = _predictions(plan, run) if _needs_predictions(model) else None
    return model.compute_metrics(x, y, predictions, sample_weight=sample_weight)


def _regularized(
    plan: PipelinePlan, trainable: list, gradients: dict[int, Any], scale: tf.Tensor
) -> tuple[list[tf.Tensor], dict[int, Any]]:
    """The losses of the weights themselves, once a step, where the weights are; and the gradients with theirs."""
    losses, total = [], dict(gradients)
    trained = {id(v) for v in plan.model.trainable_weights}
    for chunk, values in zip(plan.chunks, trainable, strict=True):
        for variable, value in zip(chunk.trainable, values, strict=True):
            at_home = plan.homes[id(variable)] == chunk.index
            if not at_home or variable.regularizer is None or id(variable) not in trained:
                continue
            with tf.device(plan.device_of(chunk.index)):
                with tf.GradientTape() as tape:
                    tape.watch(value)
                    loss = variable.regularizer(value)
                gradient = tape.gradient(loss, value)
                if gradient is not None:
                    gradient *= tf.cast(scale, gradient.dtype)
                    known = total.get(id(variable))
                    total[id(variable)] = gradient if known is None else added(known, gradient)
            losses.append(loss)
    return losses, total


def _update_weights(model: keras.Model, gradients: dict[int, Any]) -> None:
    trained = model.trainable_weights
    if trained:
        model.optimizer.apply_gradients([(gradients.get(id(v)), v) for v in trained])


def _needs_predictions(model: keras.Model) -> bool:
    """Whether a metric looks at the predictions; otherwise they need not be kept for all micro-batches."""
    return model._compile_metrics is not None


def _predictions(plan: PipelinePlan, run: ReplicatedRun) -> Any:
    return plan.pack_outputs([attached(run.output(key)) for key in plan.graph.outputs])
