"""The Keras hooks of `ParameterServerStrategy`: steps and predictions run on the workers."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import TFDatasetAdapter, in_stateless_scope
from tfdist.strategies.keras_hooks import StrategyHooks
from tfdist.strategies.parameter_server import validation
from tfdist.strategies.parameter_server.batches import CoordinatorDataset
from tfdist.strategies.parameter_server.predict_runner import PredictRunner
from tfdist.strategies.parameter_server.runner import Runner
from tfdist.strategies.parameter_server.synchronous import SynchronousRunner
from tfdist.strategies.parameter_server.variables import adopt


class ParameterServerHooks(StrategyHooks):
    """Models of a `ParameterServerStrategy`."""

    runs_whole_steps = False

    def make_epoch_iterator(self, iterator: Any, arguments: Mapping[str, Any], make: Callable[..., None]) -> None:
        x = arguments.get("x")
        if callable(x) and not hasattr(x, "__getitem__"):
            arguments = {**arguments, "x": self._strategy.distribute_datasets_from_function(x)}
        make(**arguments)
        dataset = iterator._distributed_dataset
        if isinstance(dataset, CoordinatorDataset):
            dataset.steps = iterator.steps_per_epoch
            if isinstance(iterator.data_adapter, TFDatasetAdapter):
                iterator._distributed_dataset = self._strategy._on_workers(dataset)

    def check(self, model: Any) -> None:
        validation.check(self._strategy, model)

    def prepare(self, model: Any) -> None:
        # Steps of an interrupted fit must not change what callbacks restore at the beginning of this one.
        self._strategy._dispatcher.join()
        _install_runners(self._strategy, model)

    def make_predict_function(self, model: Any, force: bool, make: Callable[[], Any]) -> Any:
        if force:
            model.predict_function = None
        if not isinstance(model.predict_function, PredictRunner):
            model.predict_function = PredictRunner(self._strategy, model)
        return model.predict_function

    def save(self, model: Any, path: Any, with_optimizer: bool, write: Callable[[], Any]) -> Any:
        self.settle(model)
        return write()

    def settle(self, model: Any) -> None:
        # What is saved belongs together once all steps that were handed out are done.
        if self._strategy._is_used:
            self._strategy._dispatcher.join()  # also of another model, of which this one is a part
            _finish(model)

    def initialize_variable(self, variable: Any, initialize: Callable[[], None]) -> None:
        with self._strategy.extended.unpartitioned():
            initialize()
        adopt([variable])


def _install_runners(strategy: Any, model: keras.Model) -> None:
    """Sets a model's train and test functions to runners, unless it has them; `compile` removes them.

    Args:
        strategy: the strategy.
        model: a model that was created in its scope.
    """
    make_trainer = SynchronousRunner if strategy._mode == "sync" else Runner
    if not isinstance(model.train_function, Runner):
        model.train_function = make_trainer(strategy, model)
    if not isinstance(model.test_function, Runner):
        model.test_function = Runner(strategy, model, "test")

    def get_metrics_result(model: keras.Model) -> Any:
        # Keras calls this at the end of an epoch, before anything else reads what was trained.
        if tf.executing_eagerly() and not in_stateless_scope():
            _finish(model)
        return type(model).get_metrics_result(model)

    def reset_metrics(model: keras.Model) -> None:
        # Steps that were handed out before belong to the old state, also if a fit was interrupted.
        for runner in _runners(model):
            runner.forget()
        type(model).reset_metrics(model)

    # Past Keras' attribute tracking.
    object.__setattr__(model, "get_metrics_result", types.MethodType(get_metrics_result, model))
    object.__setattr__(model, "reset_metrics", types.MethodType(reset_metrics, model))


def _finish(model: keras.Model) -> None:
    """Waits until all steps of a model are done, if it has runners; then its metrics are complete.

    Raises:
        Exception: what a step has raised.
    """
    for runner in _runners(model):
        runner.finish()


def _runners(model: keras.Model) -> list[Runner]:
    return [function for function in (model.train_function, model.test_function) if isinstance(function, Runner)]
