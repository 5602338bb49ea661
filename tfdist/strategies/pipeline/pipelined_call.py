"""Calling a model, pipelined: for every step that is not Keras' stock one with a loss that decomposes.

The user's code sees the outputs of the whole batch, and its tape one operation, whose gradient runs the stages
backwards, again micro-batch by micro-batch (GPipe, arXiv 1811.06965).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras.src.backend import AutocastScope
from tensorflow.python.eager import record

from tfdist.layer_graph.values import Value, attached, differentiable, gradients_of
from tfdist.strategies.pipeline.micro_batches import MicroBatches
from tfdist.strategies.pipeline.plan import PipelinePlan
from tfdist.strategies.pipeline.replicas import ReplicatedRun, read_trainable
from tfdist.strategies.sharing import static_rows


def call(plan: PipelinePlan, inputs: Any, training: bool) -> Any:
    """What `model(inputs, training=training)` returns, with masks, and gradients for any tape that watches.

    Args:
        plan: the stages.
        inputs: a batch of any number of rows, as the model takes it.
        training: whether layers behave as in training.
    """
    # The layers open autocast scopes of their own; the one of the model would hide the variables' own dtypes.
    with AutocastScope(None):
        return _call(plan, plan.functional._standardize_inputs(inputs), training)


def _call(plan: PipelinePlan, flat: list[tf.Tensor], training: bool) -> Any:
    trainable = read_trainable(plan)
    recorded = [*(value for values in trainable for value in values), *flat]
    is_recorded = record.should_record_backprop(recorded)
    with record.stop_recording():
        schedule = plan.schedule
        if not (training or is_recorded):
            rows = static_rows(flat)
            schedule = plan.inference_of(rows)
        count = plan.replicas * schedule.microbatches
        micro_batches = MicroBatches(flat, count, may_be_fewer=not (training or is_recorded))
        run = ReplicatedRun(plan, micro_batches, flat, trainable, training, is_recorded)
        order = schedule.linear_order()
        run.execute([item for item in order if item[1].kind == "forward"])
        if training:
            run.assign_state()
        values = [run.output(key) for key in plan.graph.outputs]
        # Tensors of their own, for the record and for what is attached.
        outputs = [Value(*(part if part is None else tf.identity(part) for part in value)) for value in values]
        tensors = differentiable(outputs)
        weights = [micro_batches.weight(i) for i in range(count)]
        losses = [loss * weights[i] for i in range(count) for loss in run.losses[i]]
        loss = [tf.add_n(losses)] if losses else []

    def backward(*cotangents: tf.Tensor) -> list[Any]:
        inputs = [*recorded, *cotangents]
        differentiated_again = record.should_record_backprop(inputs)
        with record.stop_recording():
            # A tape that is persistent comes here more than once.
            again = run.copy()
            of_outputs = cotangents[: len(tensors)]
            again.set_loss_cotangents([weight * cotangents[-1] for weight in weights] if loss else [])
            pieces = [micro_batches.cut_gradient(cotangent) for cotangent in of_outputs]
            for index, own in enumerate(zip(*pieces, strict=True)):
                again.add_cotangents(index, plan.graph.outputs, gradients_of(outputs, own))
            again.execute([item for item in order if item[1].kind == "backward"])
            gradients = again.gradients_of_chunks()
            gradients += [again.gradient_of_input(key) for key in plan.graph.inputs]
        if differentiated_again:
            made = [g for g in tf.nest.flatten(gradients, expand_composites=True) if g is not None]
            record.record_operation("TfdistPipelineGradient", made, inputs, _refuse_second_order)
        return gradients

    record.record_operation("TfdistPipeline", [*tensors, *loss], recorded, backward)
    plan.model._losses.extend(loss)
    return plan.pack_outputs([attached(value) for value in outputs])


def _refuse_second_order(*_: Any) -> None:
    raise NotImplementedError(
        "Received: a gradient of gradients (a gradient penalty, say) through a model under PipelineStrategy. Its "
        "backward pass keeps nothing to differentiate. Expected: first-order gradients only; train such a model under "
        "another strategy."
    )
