"""What tfdist's strategies do in place of Keras, see `tfdist.compat.hooks`.

StrategyHooks        models of any tfdist strategy: checked, built from the data's specification, prepared
  DataParallelHooks  several replicas: global batches, seeds, metrics, XLA between the collectives
    JobHooks         several processes: files and callbacks (job_hooks.py); HorovodHooks: fit (horovod/)
  the hooks of pipelines, parameter servers and host offload are beside their strategies
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfdist.compat.upstream import TFDatasetAdapter
from tfdist.inspection import epoch_iterators, global_seeds
from tfdist.memory.application import apply
from tfdist.memory.modes import applied, automatic_of
from tfdist.steps import building, common_hooks, validation
from tfdist.steps.common_hooks import CommonHooks
from tfdist.strategies import xla
from tfdist.strategies.global_batches import GlobalBatchDataset


class StrategyHooks(CommonHooks):
    """Models of a tfdist strategy.

    Args:
        strategy: whose models they are.
    """

    def __init__(self, strategy: Any):
        self._strategy = strategy

    def make_epoch_iterator(self, iterator: Any, arguments: Mapping[str, Any], make: Callable[..., None]) -> None:
        make(**arguments)

    def build(self, model: Any, iterator: Any, data_batch: Any, build: Callable[[], None]) -> None:
        if not self._is_new(model, iterator):
            self.begin(model)
            return
        self.check(model)
        # Keras takes a batch from the iterator to learn its shapes: a generator has then lost its first one, a shuffled
        # dataset begins with its second order, and of several workers' batches it cannot make one. The dataset's
        # specification says the same.
        with self._strategy.scope():
            building.build(model, data_batch if iterator is None else epoch_iterators.batch_specification(iterator))
        self.begin(model)
        # Once more: Keras builds metrics, and shows their variables, only now.
        self.check(model)
        policy = getattr(self._strategy, "_memory", None)
        if policy is not None and applied(model) is None:
            apply(model, policy)
            automatic = automatic_of(model)
            if automatic is not None:
                automatic.note(iterator, data_batch)
        self.prepare(model)
        common_hooks.note(model)

    def check(self, model: Any) -> None:
        """Refuses what cannot be right under this strategy; called before a model is built, and after."""
        raise NotImplementedError

    def begin(self, model: Any) -> None:
        """Called for a model that is built, before each call of Keras that trains or evaluates it."""

    def prepare(self, model: Any) -> None:
        """Called after a model was built, and its memory policy applied."""


class DataParallelHooks(StrategyHooks):
    """Models on several replicas."""

    is_data_parallel = True

    def __init__(self, strategy: Any):
        super().__init__(strategy)
        self.compressor = strategy._wire.compressor

    def make_epoch_iterator(self, iterator: Any, arguments: Mapping[str, Any], make: Callable[..., None]) -> None:
        with self._strategy._keras_input(iterator):
            make(**arguments)
        dataset = iterator._distributed_dataset
        if isinstance(dataset, GlobalBatchDataset) and isinstance(iterator.data_adapter, TFDatasetAdapter):
            # Keras counts the steps of an epoch here; a worker's own shards have more of them than the user's dataset.
            iterator.data_adapter._dataset = dataset.source
            iterator._num_batches = iterator.data_adapter.num_batches

    def check(self, model: Any) -> None:
        validation.check(self._strategy, model)

    def begin(self, model: Any) -> None:
        self._strategy._metric_totals.forget()
        global_seeds.make(self._strategy)

    def decide_jit_compile(self, model: Any, decide: Callable[[], bool]) -> bool:
        return xla.automatic(model)

    def making_function(self, model: Any) -> Any:
        if self._strategy.num_replicas_in_sync > 1:
            return xla.not_as_a_whole(model)
        return super().making_function(model)

    def make_predict_function(self, model: Any, force: bool, make: Callable[[], Any]) -> Any:
        global_seeds.make(self._strategy)
        return make()

    def before_metrics_are_read(self, model: Any) -> None:
        self._strategy._metric_totals.settle(model)
