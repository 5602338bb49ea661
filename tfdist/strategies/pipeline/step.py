"""The two ways in which a step of Keras runs on the stages.

`train_step` stands in for Keras' own train step where the loss decomposes over micro-batches. Any schedule is possible:
a micro-batch has its own loss (`LossHead`), and goes back before the others are there.

    F0 F1 F2 ... L0 B0 F3 L1 B1 ...                        F, B: a forward or backward; L: loss and its gradient

`call_model` stands in for calling the model, in any other step: one with a loss that does not decompose, a `train_step`
or a loop of the user's own, `evaluate` and `predict`. The user's code sees the outputs of the whole batch, and its tape
one operation, whose gradient runs the stages backwards, again micro-batch by micro-batch (GPipe, arXiv 1811.06965).

    F0 F1 F2 F3   loss of the whole batch, by Keras or the user   B0 B1 B2 B3

A loss decomposes if that of a batch is the weighted mean of its micro-batches' losses, as Keras' own means over rows
do. One that compares rows, or divides by what only the whole batch knows (the number of unmasked steps, or of labels
that are not ignored; the sum of the weights), does not: `why_not_decomposable` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfdist.compat.upstream import (
    AutocastScope,
    data_adapter_utils,
    func_graph,
    get_keras_mask,
    record,
)
from tfdist.compat.upstream import losses as keras_losses
from tfdist.layer_graph.chunk import (
    Gradients,
    Value,
    as_one_operation,
    attached,
    differentiable,
    gradients_of,
    pack,
    unpack,
)
from tfdist.strategies.data_parallel.dataset import static_rows
from tfdist.strategies.pipeline.chunk import added, define
from tfdist.strategies.pipeline.engine import MicroBatches, PipelineRun, read_trainable
from tfdist.strategies.pipeline.plan import PipelinePlan

MASKED = "the model's outputs have masks, and the number of unmasked steps is known when the whole batch is through"
# The module of the class that Keras wraps loss functions in.
_WRAPPERS = keras_losses.LossFunctionWrapper.__module__
_ROWWISE_REDUCTIONS = ("sum_over_batch_size", "mean")
# The losses of Keras that look at several rows at once.
_MIX_ROWS = ("dice", "tversky", "circle")


class MaskedOutputs(Exception):
    """The model's outputs turn out to have masks when its layers are called: the loss does not decompose."""


def train_step(plan: PipelinePlan, head: LossHead, data: Any) -> dict[str, Any]:
    """Does what `keras.Model.train_step` does with a batch, where the loss decomposes.

    Args:
        plan: the stages.
        head: the loss of a micro-batch.
        data: the batch.

    Returns:
        The logs.

    Raises:
        MaskedOutputs: if the outputs of the model have masks.
    """
    model = plan.model
    x, y, sample_weight = data_adapter_utils.unpack_x_y_sample_weight(data)
    inputs = plan.functional._standardize_inputs(x)
    micro_batches = MicroBatches(inputs, plan.replicas * plan.schedule.microbatches)
    trainable = read_trainable(plan)
    # A model whose `call` does not ask for it is not told, and its layers do as they do by themselves.
    training = True if model._call_has_training_arg else None
    run = PipelineRun(plan, micro_batches, inputs, trainable, training, differentiable=True)
    count = micro_batches.count
    # A `LossScaleOptimizer` wants its gradients multiplied.
    scale = tf.cast(1.0 if model.optimizer is None else model.optimizer.scale_loss(tf.ones([])), tf.float64)
    # The loss of the batch is the mean of the micro-batches' losses, weighted by rows: so are the gradients.
    targets = micro_batches.cut((y, sample_weight))
    weights = [micro_batches.weight(i) for i in range(count)]
    cotangents = [weight * scale for weight in weights]
    run.loss_cotangents = cotangents
    losses, trackers = [], []

    def after_model(index: int) -> list[tf.Tensor]:
        # Runs on the last stage, between the forward and the backward pass of the micro-batch there.
        outputs = run.outputs_of(index)
        if any(value.mask is not None for value in outputs):
            raise MaskedOutputs
        loss, tracked, gradients = head.add(outputs, *targets[index], cotangents[index])
        losses.append(loss * weights[index])
        trackers.append([value * weights[index] for value in tracked])
        run.add_cotangents(index, plan.graph.outputs, gradients)
        return [loss]

    run.execute(plan.schedule.linear_order(), after_model=after_model)
    run.assign_state()
    # The losses are on the last stage, so the sum is made there; the gradients are on the stages of their variables.
    with tf.device(plan.device_of(len(plan.chunks) - 1)):
        added_losses = [loss * weights[i] for i in range(count) for loss in run.losses[i]]
        of_weights, gradients = _regularized(plan, trainable, run.gradients_of_variables(), scale)
        loss = tf.add_n([tf.cast(part, tf.float64) for part in (*losses, *added_losses, *of_weights)])
    head.track([tf.add_n(list(parts)) for parts in zip(*trackers, strict=True)], micro_batches.rows)
    model._loss_tracker.update_state(loss, sample_weight=micro_batches.rows)
    trained, predictions = model.trainable_weights, None
    if trained:
        model.optimizer.apply_gradients([(gradients.get(id(v)), v) for v in trained])
    if model._compile_metrics is not None:  # without metrics, predictions of all micro-batches need not be kept
        predictions = plan.pack_outputs([attached(run.output(key)) for key in plan.graph.outputs])
    return model.compute_metrics(x, y, predictions, sample_weight=sample_weight)


def _regularized(
    plan: PipelinePlan, trainable: list, gradients: dict[int, Any], scale: tf.Tensor
) -> tuple[list[tf.Tensor], dict[int, Any]]:
    """The regularization losses of the weights, and the gradients with those of these losses added.

    They are computed once a step, not once a micro-batch, and on the device of each weight.
    """
    losses, total = [], dict(gradients)
    trained = {id(v): v for v in plan.model.trainable_weights}
    places = [
        (variable, value, plan.device_of(chunk.index))
        for chunk, values in zip(plan.chunks, trainable, strict=True)
        for variable, value in zip(chunk.trainable, values, strict=True)
        if plan.homes[id(variable)] == chunk.index and id(variable) in trained
    ]
    # Weights that no stage uses: those of a layer that is an attribute of the model, say.
    places += [(v, tf.identity(v._value), v._value.device) for key, v in trained.items() if key not in plan.homes]
    for variable, value, device in places:
        if variable.regularizer is None:
            continue
        with tf.device(device):
            with tf.GradientTape() as tape:
                tape.watch(value)
                # What has several elements counts as their sum, as in Keras.
                loss = tf.reduce_sum(variable.regularizer(value))
            if (gradient := tape.gradient(loss, value)) is not None:
                gradient *= tf.cast(scale, gradient.dtype)
                total[id(variable)] = added(total.get(id(variable)), gradient)
        losses.append(loss)
    return losses, total


class LossHead:
    """Keras' compiled loss of one micro-batch and its gradient, as one function that is called for each micro-batch.

    Args:
        plan: of a compiled model for which `why_not_decomposable` is `None`.
    """

    def __init__(self, plan: PipelinePlan):
        self._model, self._pack = plan.model, plan.pack_outputs
        self._functions: dict[Any, tuple] = {}

    def add(
        self, outputs: Sequence[Value], targets: Any, sample_weight: Any, cotangent: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor], list[Gradients]]:
        """Adds a call to the graph, on the current device: that of the last stage.

        Args:
            outputs: the model's outputs, without masks.
            targets: their targets, in Keras' structure.
            sample_weight: weights of the rows, or `None`.
            cotangent: the factor of the gradient, a float64 scalar.

        Returns:
            The loss, the losses of the single outputs (none if Keras does not track these), and the gradients of the
            outputs.
        """
        given = [targets, sample_weight]
        predictions, layout = pack(outputs)
        flat = predictions + [t for t in tree.flatten(given) if t is not None]
        present = tuple(t is not None for t in tree.flatten(given))
        key = tuple((t.dtype, tuple(t.shape)) for t in flat), tuple(layout), present
        if key not in self._functions:
            # Without a device in it, the function runs where it is called: several pipelines call it.
            with tf.device(None):
                self._functions[key] = self._make(layout, flat, given)
        captured, function, trackers, used = self._functions[key]
        loss, *results = function.call_flat(cotangent, *flat, *captured)
        found = iter(results[trackers:])
        gradients = [next(found) if is_used else None for is_used in used]
        return loss, results[:trackers], gradients_of(outputs, gradients)

    def track(self, losses: Sequence[tf.Tensor], rows: int | tf.Tensor) -> None:
        """Adds the losses of the single outputs, for the whole batch, to the metrics with which Keras tracks them.

        Args:
            losses: one for each of these metrics.
            rows: number of rows of the batch.
        """
        for tracker, loss in zip(self._model._compile_loss.metrics, losses, strict=True):
            # Keras weights by rows only where their number is static.
            tracker.update_state(loss, sample_weight=rows if isinstance(rows, int) else None)

    def _make(self, layout: Sequence[tuple[bool, ...]], flat: Sequence[tf.Tensor], given: Any) -> tuple:
        loss_object = self._model._compile_loss
        trackers = loss_object.metrics
        used: list[bool] = []

        def run(cotangent: tf.Tensor, *arguments: tf.Tensor) -> list[tf.Tensor]:
            rest = iter(arguments)
            outputs = unpack(rest, layout)
            leaves = [next(rest) if t is not None else None for t in tree.flatten(given)]
            targets, weights = tree.pack_sequence_as(given, leaves)
            variables = [v for tracker in trackers for v in (tracker.total, tracker.count)]
            # Keras adds the losses of single outputs to metrics. In this scope the metrics begin with 0, and the scope
            # keeps what they become: the means of this micro-batch. `track` adds those of the batch to the metrics.
            mapping = [(v, tf.zeros(v.shape, v.dtype)) for v in variables]
            with keras.StatelessScope(mapping) as scope, tf.GradientTape() as tape:
                tape.watch(differentiable(outputs))
                # Models of float64 have losses of float64.
                predictions = self._pack([attached(value) for value in outputs])
                loss = tf.cast(loss_object(targets, predictions, weights), cotangent.dtype)
                scaled = loss * cotangent
            gradients = tape.gradient(scaled, differentiable(outputs))
            used.extend(gradient is not None for gradient in gradients)
            values = [tf.convert_to_tensor(scope.get_current_value(v)) for v in variables]
            means = [total / count for total, count in zip(values[::2], values[1::2], strict=True)]
            tracked = [tf.cast(mean, cotangent.dtype) for mean in means]
            return [loss, *tracked, *(gradient for gradient in gradients if gradient is not None)]

        specs = [tf.TensorSpec([], tf.float64), *(tf.TensorSpec(t.shape, t.dtype) for t in flat)]
        graph = func_graph.func_graph_from_py_func("pipeline_loss", run, specs, {})
        return list(graph.external_captures), define("pipeline_loss", graph), len(trackers), used


def call_model(plan: PipelinePlan, inputs: Any, training: bool | None) -> Any:
    """Calls a model, pipelined: the outputs have masks, and gradients for any tape that records.

    Args:
        plan: the stages.
        inputs: a batch of any number of rows, as the model takes it.
        training: whether layers behave as in training; with `None`, each as it does by itself.
    """
    # Reads variables in their own dtypes: the layers open autocast scopes of their own.
    with AutocastScope(None):
        return _call_model(plan, plan.functional._standardize_inputs(inputs), training)


def _call_model(plan: PipelinePlan, flat: list[tf.Tensor], training: bool | None) -> Any:
    trainable = read_trainable(plan)
    recorded = [*(value for values in trainable for value in values), *flat]
    is_recorded = record.should_record_backprop(recorded)
    # A tape does not see the operations of the forward pass. It sees one operation, recorded below, whose gradient
    # is `backward`.
    with record.stop_recording():
        schedule = plan.schedule
        if not (training or is_recorded):
            schedule = plan.inference_of(static_rows(flat))
        count = plan.replicas * schedule.microbatches
        micro_batches = MicroBatches(flat, count)
        run = PipelineRun(plan, micro_batches, flat, trainable, training, is_recorded)
        order = schedule.linear_order()
        run.execute([item for item in order if item[1].kind == "forward"])
        # Layers may draw random numbers in inference, too.
        run.assign_state()
        values = [run.output(key) for key in plan.graph.outputs]
        # New tensors: masks are attached to them.
        outputs = [Value(*(part if part is None else tf.identity(part) for part in value)) for value in values]
        tensors = differentiable(outputs)
        weights = [micro_batches.weight(i) for i in range(count)]
        losses = [loss * weights[i] for i in range(count) for loss in run.losses[i]]
        loss = [tf.cast(tf.add_n(losses), keras.config.floatx())] if losses else []

    plan.check_captures()

    def backward(cotangents: Sequence[Any]) -> list[Any]:
        inputs = [*recorded, *(cotangent for cotangent in cotangents if cotangent is not None)]
        differentiated_again = record.should_record_backprop(inputs)
        with record.stop_recording():
            # A persistent tape comes here more than once, so each backward pass has a copy of the run.
            again = run.copy()
            of_outputs = cotangents[: len(tensors)]
            if loss and cotangents[-1] is not None:
                again.loss_cotangents = [weight * tf.cast(cotangents[-1], tf.float64) for weight in weights]
            pieces = [[None] * count if c is None else micro_batches.cut_gradient(c) for c in of_outputs]
            for index, own in enumerate(zip(*pieces, strict=True)):
                again.add_cotangents(index, plan.graph.outputs, gradients_of(outputs, own))
            again.execute([item for item in order if item[1].kind != "forward"])
            gradients = again.gradients_of_chunks()
            gradients += [again.gradient_of_input(key) for key in plan.graph.inputs]
        if differentiated_again:
            made = [g for g in tf.nest.flatten(gradients, expand_composites=True) if g is not None]
            record.record_operation("TfdistPipelineGradient", made, inputs, _refuse_second_order)
        return gradients

    passed = as_one_operation("TfdistPipeline", [*tensors, *loss], recorded, backward)
    plan.model._losses.extend(passed[len(tensors) :])
    new = {id(tensor): other for tensor, other in zip(tensors, passed, strict=False)}
    outputs = [Value(*(new.get(id(part), part) for part in value)) for value in outputs]
    return plan.pack_outputs([attached(value) for value in outputs])


def _refuse_second_order(*_: Any) -> None:
    raise NotImplementedError(
        "Received: a gradient of gradients (a gradient penalty, say) through a model under PipelineStrategy. Its "
        "backward pass keeps nothing to differentiate. Expected: first-order gradients only; train such a model under "
        "another strategy."
    )


def why_not_decomposable(model: keras.Model, functional: Any) -> str | None:
    """Why a compiled model's loss cannot be computed micro-batch by micro-batch; `None` if it can."""
    if type(model).train_step is not keras.Model.train_step or "train_step" in vars(model):
        return "the model has a train_step of its own"
    if model.activity_regularizer is not None:
        return "the model has an activity_regularizer of its own"
    for name in ("compute_loss", "compute_metrics"):
        if getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model):
            return f"the model has a {name} of its own"
    if model._compile_loss is None:
        return "the model is compiled without a loss"
    if any(get_keras_mask(output) is not None for output in functional.outputs):
        return MASKED
    for loss in tree.flatten(model._compile_loss._user_loss):
        found = keras.losses.get(loss)
        if found is None:
            continue
        function = getattr(found, "fn", found)
        name = getattr(function, "__name__", type(function).__name__)
        own = isinstance(found, keras.Loss) and type(found).__module__ not in (keras_losses.__name__, _WRAPPERS)
        if own or getattr(function, "__module__", "") != keras_losses.__name__ or name in _MIX_ROWS:
            return f"the loss '{name}' may look at several rows at once"
        reduction = getattr(found, "reduction", "sum_over_batch_size")
        if reduction not in _ROWWISE_REDUCTIONS:
            return f"the loss '{name}' has reduction={reduction!r}"
        if (ignored := getattr(found, "_fn_kwargs", {}).get("ignore_class")) is not None:
            return f"the loss '{name}' has ignore_class={ignored!r}, and is divided by the number of all other labels"
    return None
