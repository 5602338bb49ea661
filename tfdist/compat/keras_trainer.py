"""Keras' TensorFlow trainer: how it builds its input, and how it builds a model that has no shapes yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from tfdist.compat.patch import Patch
from tfdist.memory import application as memory
from tfdist.strategies import epoch_iterators, global_seeds, guards, known_models, xla
from tfdist.strategies.building import build
from tfdist.strategies.data_parallel import DataParallel
from tfdist.strategies.global_batches import GlobalBatchDataset
from tfdist.strategies.horovod import refusals
from tfdist.strategies.host_offload import HostOffloadStrategy
from tfdist.strategies.parameter_server import strategy as parameter_server
from tfdist.strategies.parameter_server.batches import CoordinatorDataset
from tfdist.strategies.parameter_server.strategy import ParameterServerStrategy
from tfdist.strategies.pipeline import strategy as pipeline
from tfdist.strategies.pipeline.strategy import PipelineStrategy

_MODULE = "keras.src.backend.tensorflow.trainer"


def _epoch_iterator(original: Callable) -> Callable:
    def __init__(self: Any, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(distribute_strategy, ParameterServerStrategy):
            if callable(kwargs.get("x")) and not hasattr(kwargs["x"], "__getitem__"):
                kwargs["x"] = distribute_strategy.distribute_datasets_from_function(kwargs["x"])
            original(self, distribute_strategy, *args, **kwargs)
            dataset = self._distributed_dataset
            if isinstance(dataset, CoordinatorDataset):
                dataset.steps = self.steps_per_epoch
                if isinstance(self.data_adapter, TFDatasetAdapter):
                    self._distributed_dataset = distribute_strategy.on_workers(dataset)
            return
        if not isinstance(distribute_strategy, DataParallel):
            guards.warn_without_scope()
            original(self, distribute_strategy, *args, **kwargs)
            return
        with distribute_strategy.keras_input(self):
            original(self, distribute_strategy, *args, **kwargs)
        dataset = self._distributed_dataset
        if isinstance(dataset, GlobalBatchDataset) and isinstance(self.data_adapter, TFDatasetAdapter):
            # Keras counts the steps of an epoch here; a worker's own shards have more of them than the user's dataset.
            self.data_adapter._dataset = dataset.source
            self._num_batches = self.data_adapter.num_batches

    return __init__


def _maybe_symbolic_build(original: Callable) -> Callable:
    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        strategy = self._distribute_strategy
        if iterator is not None:
            epoch_iterators.note(self, iterator)
        elif known_models.is_known(self):
            if isinstance(strategy, DataParallel):
                strategy._metric_totals.forget()
                global_seeds.make(strategy)
            return
        refusals.check_optimizers(self)
        if not isinstance(strategy, (DataParallel, PipelineStrategy, ParameterServerStrategy, HostOffloadStrategy)):
            guards.warn_without_scope()
            guards.check_without_strategy(self)
            pipeline.warn_without_scope()
            parameter_server.warn_without_scope()
            original(self, iterator=iterator, data_batch=data_batch)
            known_models.note(self)
            return
        _check(strategy, self)
        if isinstance(strategy, DataParallel):
            strategy._metric_totals.forget()
        # Keras takes a batch from the iterator to learn its shapes: a generator has then lost its first one, a shuffled
        # dataset begins with its second order, and of several workers' batches it cannot make one. The dataset's
        # specification says the same.
        with strategy.scope():
            build(self, data_batch if iterator is None else epoch_iterators.batch_specification(iterator))
        if isinstance(strategy, DataParallel):
            global_seeds.make(strategy)
        # Once more: Keras builds metrics, and shows their variables, only now.
        _check(strategy, self)
        policy = getattr(strategy, "memory", None)
        if policy is not None and memory.applied(self) is None:
            memory.apply(self, policy)
            automatic = memory.automatic_of(self)
            if automatic is not None:
                automatic.note(iterator, data_batch)
        if isinstance(strategy, (ParameterServerStrategy, HostOffloadStrategy)):
            strategy.prepare(self)
        known_models.note(self)

    return _maybe_symbolic_build


def _resolve_auto_jit_compile(original: Callable) -> Callable:
    def _resolve_auto_jit_compile(self: Any) -> bool:
        known = isinstance(self._distribute_strategy, (DataParallel, PipelineStrategy))
        return xla.automatic(self) if known else original(self)

    return _resolve_auto_jit_compile


def _make_function(original: Callable) -> Callable:
    def _make_function(self: Any, step_function: Callable) -> Callable:
        with _compiled_in_parts(self):
            return original(self, step_function)

    return _make_function


def _compiled_in_parts(model: Any) -> Any:
    strategy = model._distribute_strategy
    has_replicas = isinstance(strategy, DataParallel) and strategy.num_replicas_in_sync > 1
    in_parts = has_replicas or isinstance(strategy, PipelineStrategy)
    return xla.not_as_a_whole(model) if in_parts else contextlib.nullcontext()


def _make_predict_function(original: Callable) -> Callable:
    def make_predict_function(self: Any, force: bool = False) -> Any:
        if isinstance(self._distribute_strategy, DataParallel):
            global_seeds.make(self._distribute_strategy)
        if not isinstance(self._distribute_strategy, ParameterServerStrategy):
            with _compiled_in_parts(self):
                return original(self, force)
        if force:
            self.predict_function = None
        self._distribute_strategy.prepare_predict(self)
        return self.predict_function

    return make_predict_function


def _get_metrics_result_or_logs(original: Callable) -> Callable:
    def _get_metrics_result_or_logs(self: Any, logs: Any) -> Any:
        if isinstance(self._distribute_strategy, DataParallel):
            self._distribute_strategy._metric_totals.settle(self)
        return original(self, logs)

    return _get_metrics_result_or_logs


def _check(strategy: Any, model: Any) -> None:
    if isinstance(strategy, (PipelineStrategy, ParameterServerStrategy, HostOffloadStrategy)):
        strategy.check_model(model)
    else:
        guards.check(strategy, model)


PATCHES = [
    Patch(
        f"{_MODULE}:TFEpochIterator.__init__",
        _epoch_iterator,
        "keras",
        "no upstream hook tells a strategy that Keras asks for a dataset",
    ),
    Patch(
        f"{_MODULE}:TensorFlowTrainer._maybe_symbolic_build",
        _maybe_symbolic_build,
        "keras",
        "keras issue 20585",
    ),
    Patch(
        f"{_MODULE}:TensorFlowTrainer.make_predict_function",
        _make_predict_function,
        "keras",
        "no upstream hook tells a strategy which model predicts",
    ),
    Patch(
        f"{_MODULE}:TensorFlowTrainer._make_function",
        _make_function,
        "keras",
        "Keras compiles the whole step with XLA, which has no collectives",
    ),
    Patch(
        "keras.src.trainers.trainer:Trainer._resolve_auto_jit_compile",
        _resolve_auto_jit_compile,
        "keras",
        "jit_compile='auto' means False under every strategy",
    ),
    Patch(
        "keras.src.trainers.trainer:Trainer._get_metrics_result_or_logs",
        _get_metrics_result_or_logs,
        "keras",
        "no upstream hook tells a strategy that an epoch has ended",
    ),
]
