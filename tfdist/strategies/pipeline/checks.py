"""Refuses, with the reason and the remedy, what a pipeline cannot train."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.strategies.step_shadows import optimizers_of


def check(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Checks a compiled model.

    Raises:
        ValueError: if it cannot be trained under this strategy.
    """
    if model.jit_compile is True:
        raise ValueError(
            "Received: compile(jit_compile=True) under PipelineStrategy. XLA compiles for one device, and the step of "
            "a pipeline runs on several. Expected: jit_compile=False or 'auto' (the default)."
        )
    for optimizer in optimizers_of(model):
        if optimizer._distribution_strategy is not strategy:
            raise ValueError(
                f"Received: optimizer '{optimizer.name}', created outside of this strategy's scope. Its variables "
                "would not follow the model's to the stages. Expected: an optimizer created in the scope, "
                "`with strategy.scope(): optimizer = ...`, or its name, `compile('adam', ...)`."
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
