"""Refuses, with the reason and the remedy, what cannot be right before Keras builds or runs a model."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.hooks import has_hooks
from tfdist.compat.upstream import DistributedVariable
from tfdist.inspection.model_parts import metrics_of, optimizers_of, parts_of
from tfdist.runtime.job import joined
from tfdist.steps.keras_step import recognise

# Strategies of one process for which models are expected that have not come yet.
_unused: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()
# Packages whose lines are not the user's.
_INNER = ("tfdist", "keras")


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
        if has_hooks(created_under):
            raise ValueError(
                f"Received: model '{model.name}', created outside of strategy.scope(), with {owner}, created "
                f"in the scope of a {type(created_under).__name__}. Expected: the model is created and compiled in one "
                "scope, `with strategy.scope(): model = ...; model.compile(...)`."
            )


def expect_use(strategy: tf.distribute.Strategy) -> None:
    """Lets `warn_without_scope` warn as long as no model has used a strategy.

    Args:
        strategy: says by `_is_used` whether one has, and by `_alone` what a model without it does.
    """
    _unused.add(strategy)


def warn_without_scope() -> None:
    """Warns, once, that a model has no strategy although the program has made one."""
    job = joined()
    if job is not None and not job.warned_without_scope:
        job.warned_without_scope = _warn(
            f"Each of the {len(job.peers.names)} processes does all the work by itself, on a model of its own, and all "
            "of them write their files."
        )
    for strategy in list(_unused):
        if strategy._is_used or _warn(f"{strategy._alone}, and no model has used the {type(strategy).__name__} yet."):
            _unused.discard(strategy)


def _warn(what_happens: str) -> bool:
    """Warns at the user's line; returns whether it did."""
    frame, level = sys._getframe(), 1
    # Code that is run by `exec` may have no __name__.
    while frame.f_back is not None and (name := frame.f_globals.get("__name__", "")).split(".")[0] in _INNER:
        if name == "tfdist.testing.transparency":
            return False  # it compares with one process, and means it
        frame, level = frame.f_back, level + 1
    warnings.warn(
        "Received: a call of fit, evaluate or predict for a model that was created outside of strategy.scope(). "
        f"{what_happens} Expected: `with strategy.scope(): model = ...; model.compile(...)`, around load_model, too, "
        "unless this is meant.",
        stacklevel=level,
    )
    return True


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
    """Checks that a strategy can tell to which model the steps belong that Keras gives it.

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


# Refuses Horovod's own Keras layer, which was written for Keras 2.
#
# With Keras 3, `horovod.keras.DistributedOptimizer` overrides a method that Keras no longer calls: it reduces nothing,
# says nothing, and the ranks drift apart. Horovod's callbacks read attributes that Keras 3 does not have.

_EXPECTED = (
    "Expected: plain Keras code in the scope of tfdist's strategy, which averages the gradients, broadcasts the "
    "variables and averages the metrics itself: `with tfdist.HorovodStrategy().scope(): model = ...; "
    "model.compile(optimizer='adam', ...)`"
)


def check_optimizers(model: keras.Model) -> None:
    """Checks a model's optimizers, and those inside of them.

    Raises:
        ValueError: if one was made by Horovod's `DistributedOptimizer`.
    """
    if "horovod" not in sys.modules:
        return  # nothing can be Horovod's; looking through all layers takes its time, at each call of Keras
    for optimizer in (part for whole in optimizers_of(model) for part in [whole, *parts_of(whole)]):
        if _is_horovods(optimizer):
            raise ValueError(
                f"Received: optimizer '{optimizer.name}', made by horovod.keras.DistributedOptimizer. With Keras 3 it "
                f"reduces nothing: every rank would train a model of its own. {_EXPECTED}, with the optimizer itself."
            )


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Checks the callbacks of a fit.

    Raises:
        ValueError: if one is Horovod's.
    """
    for callback in callbacks:
        if _is_horovods(callback):
            raise ValueError(
                f"Received: callback {type(callback).__name__} of {type(callback).__module__}, which does not work "
                f"with Keras 3. {_EXPECTED}, without this callback."
            )


def _is_horovods(thing: Any) -> bool:
    # DistributedOptimizer makes a class of the optimizer's own name, with what is in a class of Horovod's.
    return any(kind.__module__.split(".")[0] == "horovod" for kind in type(thing).__mro__)
