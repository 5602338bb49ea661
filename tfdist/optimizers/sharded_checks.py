"""Refuses, with the reason, what a `ShardedOptimizer` cannot do as the optimizer inside of it would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.data_parallel import DataParallel

# Their update of an element depends on no other element, and all that they keep are slots that begin with a constant.
ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)
_REASONS = {
    "Adafactor": "factors the second moments of a matrix into its rows and columns",
    "Lamb": "scales the update of a variable by norms of the whole variable",
    "Muon": "makes the update of a matrix orthogonal",
    "MultiOptimizer": "has other optimizers inside",
    "Nadam": "keeps a product over the steps, which is no slot",
    "ScheduleFreeAdamW": "begins with momenta that are copies of the weights",
    "LazyAdam": "updates only the rows that a batch has used",
}


def check_inner(optimizer: Any) -> None:
    """Checks the optimizer inside.

    Raises:
        ValueError: if its slots cannot be split.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "Received: ShardedOptimizer(LossScaleOptimizer(...)), which would test shards of the gradients for "
            "overflow. Expected: LossScaleOptimizer(ShardedOptimizer(...)), the other way round."
        )
    if kind == "ShardedOptimizer":
        inner = type(optimizer.inner_optimizer).__name__
        raise ValueError(
            f"Received: ShardedOptimizer(ShardedOptimizer({inner}(...))), which has split its slots already. Expected: "
            f"ShardedOptimizer({inner}(...)), once."
        )
    if type(optimizer) not in ELEMENTWISE:
        reason = _REASONS.get(kind, "may do so: tfdist does not know it")
        raise ValueError(
            f"Received: ShardedOptimizer({kind}(...)). {kind} {reason}, and each replica sees only a shard of each "
            f"variable. Expected: one of {', '.join(c.__name__ for c in ELEMENTWISE)}; or use {kind} without "
            "ShardedOptimizer."
        )
    if optimizer.built:
        raise ValueError(
            f"Received: ShardedOptimizer({kind}(...)) of an optimizer that has been built already, whole, on each "
            "replica. Expected: a new optimizer that nothing else uses."
        )
    norm = "clipnorm" if optimizer.clipnorm else "global_clipnorm"
    if optimizer.gradient_accumulation_steps and getattr(optimizer, norm):
        raise ValueError(
            f"Received: ShardedOptimizer of {kind}(gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}, {norm}={getattr(optimizer, norm)}). What is accumulated is "
            "sharded, and no replica knows the norm of the whole. Expected: clipvalue, or no gradient accumulation."
        )


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Checks the strategy in whose scope the optimizer is created.

    Raises:
        ValueError: if it does not hold all weights on all replicas in step.
    """
    if isinstance(strategy, DataParallel) or not tf.distribute.has_strategy():
        return
    raise ValueError(
        f"Received: a ShardedOptimizer in the scope of a {type(strategy).__name__}. Expected: no scope, or that of a "
        "tfdist.MirroredStrategy or tfdist.MultiWorkerMirroredStrategy, whose replicas hold all weights and could each "
        "hold a part of the slots. Use the optimizer inside as it is."
    )


def check_variables(variables: Sequence[Any]) -> None:
    """Checks what the optimizer is built on.

    Raises:
        ValueError: if a variable cannot be laid out flat; or inside of `strategy.run`.
    """
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False) or not tf.as_dtype(variable.dtype).is_floating:
            raise ValueError(
                f"Received: a ShardedOptimizer for variable '{variable.path}' of dtype {variable.dtype}, which is "
                "overwritten with its gradient, or not made of floats. Expected: floating variables, updated by the "
                "optimizer. Use the optimizer inside as it is."
            )
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Received: a ShardedOptimizer that is built by its first step, on a replica. Expected: "
            "`optimizer.build(model.trainable_variables)` in the strategy's scope before a training loop of one's own "
            "(`fit` does so)."
        )
