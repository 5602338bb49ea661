"""What the strategies of several processes have in common: the job that the processes form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.compat.upstream import context
from tfdist.inspection.epoch_iterators import glance_at_arrays, rows_of_arrays
from tfdist.runtime.chief_io import ChiefIO
from tfdist.runtime.control_signals import Agreement, heed_sigterm
from tfdist.runtime.job import Job
from tfdist.runtime.meters.input import InputMeter
from tfdist.runtime.peers import Peers
from tfdist.strategies.data_parallel import DataParallel, DataParallelExtended


class JobMember(DataParallel):
    """Mixin for subclasses of `tf.distribute.Strategy`."""

    _job: Job | None

    def _begin_as_member(self) -> None:
        """Takes over the job's seed, and the handling of signals; called when TensorFlow's strategy was made."""
        # Requests that all workers obey after the same step.
        self._agreement = Agreement() if self._job else None
        self._input_meter = InputMeter()
        if self._job:
            if context.global_seed() != self._job.seed:
                tf.random.set_seed(self._job.seed)
            heed_sigterm()

    @property
    def _seed_is_given(self) -> bool:
        """Whether the program has set a global seed, before the strategy or since."""
        return self._job is None or self._job.seed_is_given or context.global_seed() != self._job.seed

    @property
    def _peers(self) -> Peers | None:
        """The other processes of the job; `None` without a cluster."""
        return self._job.peers if self._job else None

    @property
    def _chief_io(self) -> ChiefIO | None:
        """Who writes which file; `None` without a cluster."""
        return self._job.chief_io if self._job else None

    @property
    def is_chief(self) -> bool:
        """Whether this process prints, uploads and writes files for all: rank 0, and always without a cluster."""
        return self._peers is None or self._peers.rank == 0

    @contextlib.contextmanager
    def _keras_input(self, epoch_iterator: Any = None) -> Iterator[None]:
        if self._peers:
            heed_sigterm()
            self._peers.share_random_state()
        with super()._keras_input(epoch_iterator):
            yield


class JobMemberExtended(DataParallelExtended):
    """Mixin for subclasses of `tf.distribute.StrategyExtended`."""

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
        distributed = super()._experimental_distribute_dataset(dataset, options)
        strategy = self._container_strategy()
        if strategy._peers and strategy._keras_asks_for_data:
            manual = getattr(distributed, "manual", True)
            iterator = strategy._epoch_iterator
            rows, glance = rows_of_arrays(iterator), glance_at_arrays(iterator)
            strategy._peers.check_same_dataset(getattr(distributed, "source", dataset), manual, rows, glance)
        return distributed

    def _gather_of_rows(self) -> Callable[[tf.Tensor], tf.Tensor] | None:
        """A function that stacks the matrices of all replicas, of one shape, by rank; `None` where TensorFlow does it.

        It is called in a replica's context.
        """
        return None
