"""Refuses, with the reason and the remedy, what a pipeline cannot train."""

from __future__ import annotations

import warnings

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from tfdist.memory.application import applied
from tfdist.strategies.guards import check_steps
from tfdist.strategies.model_parts import optimizers_of


def check(strategy: tf.distribute.Strategy, model: keras.Model, replicas: int, microbatches: int) -> None:
    """Checks a compiled model.

    Args:
        strategy: the strategy in whose scope it was created.
        model: the model.
        replicas: number of pipelines.
        microbatches: of each of them.

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
                "batches that are cut into micro-batches. Expected: stateful=False, or microbatches=1."
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
    """Checks what a model takes.

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
        rows: of a batch; `None`: not known.
        microbatches: of all pipelines together.

    Raises:
        ValueError: if there are fewer rows in a batch than micro-batches.
    """
    if rows is not None and rows < microbatches:
        raise ValueError(
            f"Received: batches of {rows} rows, for {microbatches} micro-batches. Expected: at least one row a "
            "micro-batch. Use a larger batch size, or PipelineStrategy(microbatches=...) with a smaller number."
        )
