"""Loss and its gradient for one micro-batch, where the loss of a batch is the weighted mean of its micro-batches'.

Only such losses allow 1F1B: a micro-batch goes back as soon as it has come through, before the others are there. That
holds for Keras' own losses that are means over rows. A loss that compares rows with each other, or divides by
something that only the whole batch knows (the number of unmasked steps, the sum of the weights), does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import tree
from keras.src.backend.common.masking import get_keras_mask
from keras.src.losses import losses as keras_losses
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import func_graph

from tfdist.layer_graph.values import Gradients, Value, attached, differentiable, gradients_of, pack, unpack
from tfdist.strategies.pipeline.plan import PipelinePlan

MASKED = "the model's outputs have masks, and the number of unmasked steps is known when the whole batch is through"
# Where Keras has the class that it wraps loss functions in.
_WRAPPERS = keras_losses.LossFunctionWrapper.__module__
_ROWWISE_REDUCTIONS = ("sum_over_batch_size", "mean")
# These look at several rows at once.
_MIX_ROWS = ("dice", "tversky", "circle")


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
    return None


class LossHead:
    """Keras' compiled loss of one micro-batch and its gradient, as one function.

    Args:
        plan: of a compiled model for which `why_not_decomposable` is `None`.
    """

    def __init__(self, plan: PipelinePlan):
        self._model, self._pack = plan.model, plan.pack_outputs
        self._functions: dict[Any, atomic_function.AtomicFunction] = {}

    def add(
        self, outputs: Sequence[Value], targets: Any, sample_weight: Any, cotangent: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor], list[Gradients]]:
        """Adds a call to the graph.

        Args:
            outputs: the model's outputs, without masks.
            targets: their targets, in Keras' structure.
            sample_weight: weights of the rows, or `None`.
            cotangent: with what the gradient is multiplied: a float32 scalar.

        Returns:
            The loss, the losses of the single outputs, where Keras tracks these, and the gradients of the outputs.
        """
        given = [targets, sample_weight]
        predictions, layout = pack(outputs)
        flat = predictions + [t for t in tree.flatten(given) if t is not None]
        captured, function, trackers, used = self._function(layout, flat, given)
        loss, *results = function.call_flat(cotangent, *flat, *captured)
        found = iter(results[trackers:])
        gradients = [next(found) if is_used else None for is_used in used]
        return loss, results[:trackers], gradients_of(outputs, gradients)

    @property
    def trackers(self) -> list[keras.metrics.Mean]:
        """What Keras tracks the losses of single outputs with."""
        return self._model._compile_loss.metrics

    def track(self, losses: Sequence[tf.Tensor], rows: int | tf.Tensor) -> None:
        """Adds the losses of the single outputs, for the whole batch, to their trackers.

        Args:
            losses: one for each tracker.
            rows: number of rows of the batch.
        """
        for tracker, loss in zip(self.trackers, losses, strict=True):
            # Keras weights by rows only where their number is static.
            tracker.update_state(loss, sample_weight=rows if isinstance(rows, int) else None)

    def _function(self, layout: Sequence[tuple[bool, ...]], flat: Sequence[tf.Tensor], given: Any) -> tuple:
        present = tuple(t is not None for t in tree.flatten(given))
        key = tuple((t.dtype, tuple(t.shape)) for t in flat), tuple(layout), present
        if key not in self._functions:
            # Several pipelines call the function: what is in it runs where it is called.
            with tf.device(None):
                self._functions[key] = self._make(layout, flat, given)
        return self._functions[key]

    def _make(self, layout: Sequence[tuple[bool, ...]], flat: Sequence[tf.Tensor], given: Any) -> tuple:
        loss_object = self._model._compile_loss
        used: list[bool] = []

        def run(cotangent: tf.Tensor, *arguments: tf.Tensor) -> list[tf.Tensor]:
            rest = iter(arguments)
            outputs = unpack(rest, layout)
            leaves = [next(rest) if t is not None else None for t in tree.flatten(given)]
            targets, weights = tree.pack_sequence_as(given, leaves)
            variables = [v for tracker in self.trackers for v in (tracker.total, tracker.count)]
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

        specs = [tf.TensorSpec([], tf.float32), *(tf.TensorSpec(t.shape, t.dtype) for t in flat)]
        name = tf.compat.v1.get_default_graph().unique_name("pipeline_loss")
        graph = func_graph.func_graph_from_py_func(name, run, specs, {})
        attributes = {"_noinline": attr_value_pb2.AttrValue(b=True)}
        function = atomic_function.from_func_graph(f"__{name}_{id(graph)}", graph, attributes)
        return list(graph.external_captures), function, len(self.trackers), used
