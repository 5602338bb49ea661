"""Refuses what a pipeline cannot train, with the reason and the remedy; tells which losses allow 1F1B.

1F1B needs the loss of a batch to be the weighted mean of its micro-batches' losses: a micro-batch goes back as soon as
it has come through, before the others are there. That holds for Keras' own losses that are means over rows. A loss that
compares rows with each other, or divides by something that only the whole batch knows (the number of unmasked steps,
the sum of the weights), does not decompose so: `why_not_decomposable` says why.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfdist.compat.upstream import Functional, get_keras_mask
from tfdist.compat.upstream import losses as keras_losses
from tfdist.inspection.model_parts import optimizers_of
from tfdist.memory.modes import applied
from tfdist.steps.validation import check_steps

MASKED = "the model's outputs have masks, and the number of unmasked steps is known when the whole batch is through"
# The module of the class that Keras wraps loss functions in.
_WRAPPERS = keras_losses.LossFunctionWrapper.__module__
_ROWWISE_REDUCTIONS = ("sum_over_batch_size", "mean")
# The losses of Keras that look at several rows at once.
_MIX_ROWS = ("dice", "tversky", "circle")


def check(strategy: tf.distribute.Strategy, model: keras.Model, replicas: int, microbatches: int) -> None:
    """Checks a compiled model.

    Args:
        strategy: the strategy in whose scope it was created.
        model: the model.
        replicas: the number of pipelines.
        microbatches: the number of micro-batches of each pipeline.

    Raises:
        ValueError: if it cannot be trained under this strategy.
    """
    if model.run_eagerly:
        warnings.warn(
            "Received: run_eagerly=True under PipelineStrategy. The layers run one after the other, each on its "
            "variables' device, with the whole batch at once. Expected: run_eagerly=False for a pipeline.",
            stacklevel=2,
        )
    if applied(model) is not None:
        raise ValueError(
            "Received: a memory policy for a model under PipelineStrategy, whose stages keep what they keep for each "
            "micro-batch. Expected: `tfdist.memory.remove(model)`, and PipelineStrategy(memory=...) with a mode."
        )
    check_steps(model)
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False) and replicas * microbatches > 1:
            raise ValueError(
                f"Received: layer '{layer.name}' with stateful=True, which keeps a state for each row of a batch, and "
                "batches that are cut into micro-batches. Expected: stateful=False, or num_microbatches=1."
            )
        if getattr(layer, "synchronized", False) and replicas > 1:
            raise ValueError(
                f"Received: layer '{layer.name}' with synchronized=True and replicas={replicas}. A pipeline uses the "
                "statistics of each micro-batch. Expected: synchronized=False, or LayerNormalization."
            )
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise NotImplementedError(
                f"Variable {variable.path} is overwritten with its gradient (float8 scaling factors), of which "
                "micro-batches have several. Use the dtype policy 'mixed_bfloat16' or 'mixed_float16' instead."
            )
    for optimizer in optimizers_of(model):
        if optimizer._distribution_strategy is not strategy:
            raise ValueError(
                f"Received: optimizer '{optimizer.name}', created outside of this strategy's scope. Its variables "
                "would not follow the model's to the stages. Expected: an optimizer created in the scope, "
                "`with strategy.scope(): optimizer = ...`, or its name, `compile('adam', ...)`."
            )


def check_inputs(functional: Functional) -> None:
    """Checks the inputs of a model.

    Raises:
        ValueError: if it cannot be cut into micro-batches.
    """
    for tensor in functional.inputs:
        if getattr(tensor, "sparse", False) or getattr(tensor, "ragged", False):
            raise ValueError(
                f"Received: input '{tensor.name}' of sparse or ragged tensors, which are not cut into micro-batches. "
                "Expected: dense inputs; use `dataset.map` with tf.sparse.to_dense or `.to_tensor()`."
            )


def check_batch_size(rows: int | None, microbatches: int) -> None:
    """Checks the training data, where its batch size is known beforehand.

    Args:
        rows: the rows of a batch; `None`: not known.
        microbatches: the number of micro-batches of all pipelines together.

    Raises:
        ValueError: if there are fewer rows in a batch than micro-batches.
    """
    if rows is not None and rows < microbatches:
        raise ValueError(
            f"Received: batches of {rows} rows, for {microbatches} micro-batches. Expected: at least one row a "
            "micro-batch. Use a larger batch size, or PipelineStrategy(num_microbatches=...) with a smaller number."
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
    return None
