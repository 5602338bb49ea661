"""Keras' fit under HorovodStrategy: in an elastic job it is called again when processes have come or gone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tfdist.checkpoint.backup_and_restore import BackupAndRestore, ElasticBackup
from tfdist.inspection.model_parts import optimizers_of
from tfdist.optimizers.sharded_optimizer import ShardedOptimizer
from tfdist.runtime import elastic
from tfdist.strategies.job_hooks import JobHooks
from tfdist.supervision.time_spent import time_spent


class HorovodHooks(JobHooks):
    """Models of a `HorovodStrategy`."""

    def fit(self, model: Any, args: tuple, kwargs: dict, fit: Callable) -> Any:
        with self._strategy._noting_failure():
            if self._strategy._members is None:
                return super().fit(model, args, kwargs, fit)
            arguments = inspect.signature(fit).bind(model, *args, **kwargs)
            try:
                return _again_and_again(self._strategy, model, arguments, fit)
            finally:
                time_spent().fit_ends()


def _again_and_again(strategy: Any, model: Any, arguments: inspect.BoundArguments, fit: Callable) -> Any:
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
                callback._abandon()
        strategy._regroup()
        if strategy.is_chief:
            elastic.report_regrouped(strategy.num_replicas_in_sync)
        _forget_functions(model)


def _forget_functions(model: Any) -> None:
    """Drops the compiled functions: they contain the former number of processes."""
    model.train_function = model.test_function = model.predict_function = None
    model._eval_epoch_iterator = None
