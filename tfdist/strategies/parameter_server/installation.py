"""Gives a model the runners that stand in for Keras' train and test functions."""

from __future__ import annotations

import types
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope

from tfdist.strategies.parameter_server.predict_runner import PredictRunner
from tfdist.strategies.parameter_server.runner import Runner
from tfdist.strategies.parameter_server.synchronous import SynchronousRunner


def install(strategy: Any, model: keras.Model) -> None:
    """Gives a model its runners, unless it has them.

    Keras takes the functions that it finds, and `compile` removes them.

    Args:
        strategy: a `ParameterServerStrategy`.
        model: created in its scope.
    """
    make_trainer = SynchronousRunner if strategy.mode == "sync" else Runner
    if not isinstance(model.train_function, Runner):
        model.train_function = make_trainer(strategy, model)
    if not isinstance(model.test_function, Runner):
        model.test_function = Runner(strategy, model, "test")

    def get_metrics_result(model: keras.Model) -> Any:
        # Keras asks at the end of an epoch, before anybody else looks at what was trained.
        if tf.executing_eagerly() and not in_stateless_scope():
            finish(model)
        return type(model).get_metrics_result(model)

    def reset_metrics(model: keras.Model) -> None:
        # What was handed out before belongs to the state that ends here, also if a fit has come to no proper end.
        for runner in _runners(model):
            runner.forget()
        type(model).reset_metrics(model)

    # Past Keras' attribute tracking.
    object.__setattr__(model, "get_metrics_result", types.MethodType(get_metrics_result, model))
    object.__setattr__(model, "reset_metrics", types.MethodType(reset_metrics, model))


def install_predict(strategy: Any, model: keras.Model) -> None:
    """Gives a model its runner for predictions, unless it has it."""
    if not isinstance(model.predict_function, PredictRunner):
        model.predict_function = PredictRunner(strategy, model)


def finish(model: keras.Model) -> None:
    """Waits until all steps of a model are done, if it has runners; then its metrics are complete.

    Raises:
        Exception: what a step has raised.
    """
    for runner in _runners(model):
        runner.finish()


def _runners(model: keras.Model) -> list[Runner]:
    return [function for function in (model.train_function, model.test_function) if isinstance(function, Runner)]
