"""Keras' fit under HorovodStrategy: in an elastic job it is called again when processes have come or gone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from tfdist.callbacks.backup_and_restore import BackupAndRestore
from tfdist.callbacks.elastic_backup import ElasticBackup
from tfdist.compat.patch import Patch
from tfdist.optimizers.sharded_optimizer import ShardedOptimizer
from tfdist.strategies.horovod import elastic
from tfdist.strategies.horovod.strategy import HorovodStrategy
from tfdist.strategies.model_parts import optimizers_of


def _fit(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = self._distribute_strategy
        if not isinstance(strategy, HorovodStrategy):
            return original(self, *args, **kwargs)
        with strategy.noting_failure():
            if strategy.members is None:
                return original(self, *args, **kwargs)
            return _again_and_again(strategy, self, signature.bind(self, *args, **kwargs), original)

    return fit


def _again_and_again(strategy: HorovodStrategy, model: Any, arguments: inspect.BoundArguments, fit: Callable) -> Any:
    if any(isinstance(optimizer, ShardedOptimizer) for optimizer in optimizers_of(model)):
        raise ValueError(
            "Received: a ShardedOptimizer in an elastic job. Its slots are spread over the processes, and are lost "
            "with one of them. Expected: the optimizer itself."
        )
    callbacks = list(arguments.arguments.get("callbacks") or [])
    if not any(isinstance(callback, BackupAndRestore) for callback in callbacks):
        callbacks.append(ElasticBackup())
    arguments.arguments["callbacks"] = callbacks
    while True:
        try:
            return fit(*arguments.args, **arguments.kwargs)
        except Exception as error:
            if not isinstance(error, elastic.MembersChanged) and not elastic.is_lost_process(error):
                raise
            elastic.report(error, strategy.num_replicas_in_sync)
        for callback in callbacks:
            if isinstance(callback, BackupAndRestore):
                callback.abandon()
        strategy.regroup()
        if strategy.is_chief:
            elastic.report_regrouped(strategy.num_replicas_in_sync)
        _forget_functions(model)


def _forget_functions(model: Any) -> None:
    """What is compiled knows how many processes there were."""
    model.train_function = model.test_function = model.predict_function = None
    model._eval_epoch_iterator = None


PATCHES = [
    Patch(
        "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.fit",
        _fit,
        "keras",
        "no upstream hook: fit cannot be told to go on",
    )
]
