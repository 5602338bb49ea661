"""Refuses, with the reason and the remedy, what cannot be right before Keras builds or runs a model."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable

from tfdist.strategies.data_parallel import DataParallel
from tfdist.strategies.job import joined
from tfdist.strategies.keras_step import recognise
from tfdist.strategies.model_parts import metrics_of, optimizers_of, parts_of

# Their modules need this one.
_OTHERS = ("PipelineStrategy", "ParameterServerStrategy", "HostOffloadStrategy")


def check(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Checks a compiled model, before it is built or after, with its optimizers and metrics.

    Raises:
        ValueError: if they cannot be trained under this strategy.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    check_steps(model)
    _check_stateful(strategy, model)
    for optimizer in optimizers_of(model):
        for part in [optimizer, *parts_of(optimizer)]:
            _check_optimizer(strategy, part)
    for variable in [variable for metric in metrics_of(model) for variable in metric.variables]:
        _check_variable(strategy, variable, f"metric variable '{variable.path}'")
    for variable in model.variables:
        _check_variable(strategy, variable, f"model variable '{variable.path}'")


def check_without_strategy(model: keras.Model) -> None:
    """Checks a model that was created outside of every scope, before Keras builds or runs it.

    Raises:
        ValueError: if its optimizers, metrics or variables were created in the scope of a tfdist strategy.
    """
    owners = {f"optimizer '{optimizer.name}'": optimizer._distribution_strategy for optimizer in optimizers_of(model)}
    for variable in [*model.metrics_variables, *model.variables]:
        owners[f"variable '{variable.path}'"] = getattr(variable.value, "distribute_strategy", None)
    for owner, created_under in owners.items():
        if isinstance(created_under, DataParallel) or type(created_under).__name__ in _OTHERS:
            raise ValueError(
                f"Received: model '{model.name}', created outside of strategy.scope(), with {owner}, created "
                f"in the scope of a {type(created_under).__name__}. Expected: the model is created and compiled in one "
                "scope, `with strategy.scope(): model = ...; model.compile(...)`."
            )


def warn_without_scope() -> None:
    """Warns, once, that Keras works without a strategy in a process of a multi-worker job."""
    job = joined()
    if job is None or job.warned_without_scope:
        return
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals["__name__"].split(".")[0] in ("tfdist", "keras"):
        if frame.f_globals["__name__"] == "tfdist.testing.transparency":
            return  # it compares with one process, and means it
        frame, level = frame.f_back, level + 1
    job.warned_without_scope = True
    warnings.warn(
        "Received: a call of fit, evaluate or predict for a model that was created outside of strategy.scope(). Each "
        f"of the {len(job.peers.names)} processes does all the work by itself, on a model of its own, and all of "
        "them write their files. Expected: `with strategy.scope(): model = ...; model.compile(...)`, around "
        "load_model, too, unless this is meant.",
        stacklevel=level,
    )


def _check_stateful(strategy: tf.distribute.Strategy, model: Any) -> None:
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"Received: layer '{layer.name}' with stateful=True, which keeps a state for each row of a batch, "
                f"under a strategy whose {strategy.num_replicas_in_sync} replicas share the rows. Expected: "
                "stateful=False, and states that the model takes and returns (return_state=True); or one replica."
            )


def _check_optimizer(strategy: tf.distribute.Strategy, optimizer: Any) -> None:
    created_under = optimizer._distribution_strategy
    if created_under is not strategy:
        raise ValueError(
            f"Received: optimizer '{optimizer.name}', created {_where(created_under)}. Its variables would not "
            "follow the model's. Expected: an optimizer created in this strategy's scope, "
            "`with strategy.scope(): optimizer = ...`, or its name, `compile('adam', ...)`."
        )


def check_steps(model: keras.Model) -> None:
    """Checks that a strategy can tell which model the steps belong to that Keras hands to it.

    Raises:
        ValueError: if a step is not a method.
    """
    for name in ("train_step", "test_step"):
        if recognise(getattr(model, name)) is None:
            raise ValueError(
                f"Received: a model whose {name} is {getattr(model, name)!r}, not a method of its class. tfdist would "
                "not know that it is a step of this model. Expected: a plain method, without @tf.function or other "
                "decorators (Keras compiles the step itself)."
            )


def _check_variable(strategy: tf.distribute.Strategy, variable: Any, owner: str) -> None:
    value = variable.value
    created_under = value.distribute_strategy if isinstance(value, DistributedVariable) else None
    if created_under is not strategy:
        raise ValueError(
            f"Received: {owner}, created {_where(created_under)}; each replica would work on a variable of its own, or "
            "all on one. Expected: model, metrics and loss objects are created in this strategy's scope: "
            "`with strategy.scope(): ...`."
        )


def _where(strategy: tf.distribute.Strategy | None) -> str:
    if strategy is None or type(strategy).__name__.startswith("_Default"):
        return "outside of strategy.scope()"
    return f"in the scope of another {type(strategy).__name__}"
