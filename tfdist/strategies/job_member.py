"""What the strategies of several processes have in common: a job, whose processes tell each other things."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from tfdist.strategies.agreement import Agreement
from tfdist.strategies.chief_files import ChiefFiles
from tfdist.strategies.data_parallel import DataParallel, DataParallelExtended
from tfdist.strategies.epoch_iterators import glance_at_arrays, rows_of_arrays
from tfdist.strategies.input_meter import InputMeter
from tfdist.strategies.job import Job
from tfdist.strategies.peers import Peers
from tfdist.strategies.sigterm import heed_sigterm


class JobMember(DataParallel):
    """Mixin for subclasses of `tf.distribute.Strategy`."""

    _job: Job | None

    def _begin_as_member(self) -> None:
        """Makes random numbers and signals those of the job; to be called once TensorFlow's strategy is made."""
        self.agreement = Agreement() if self._job else None
        self.input_meter = InputMeter()
        if self._job:
            if context.global_seed() != self._job.seed:
                tf.random.set_seed(self._job.seed)
            heed_sigterm()

    @property
    def seed_is_given(self) -> bool:
        """Whether the program has set a global seed, before the strategy or since."""
        return self._job is None or self._job.seed_is_given or context.global_seed() != self._job.seed

    @property
    def peers(self) -> Peers | None:
        """The other processes of the job; `None` without a cluster."""
        return self._job.peers if self._job else None

    @property
    def chief_files(self) -> ChiefFiles | None:
        """Who writes which file; `None` without a cluster."""
        return self._job.files if self._job else None

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files (rank 0; always true without a cluster)."""
        return self.peers is None or self.peers.rank == 0

    @contextlib.contextmanager
    def keras_input(self, epoch_iterator: Any = None) -> Iterator[None]:
        if self.peers:
            heed_sigterm()
            self.peers.share_random_state()
        with super().keras_input(epoch_iterator):
            yield


class JobMemberExtended(DataParallelExtended):
    """Mixin for subclasses of `tf.distribute.StrategyExtended`."""

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> Any:
        distributed = super()._experimental_distribute_dataset(dataset, options)
        strategy = self._container_strategy()
        if strategy.peers and strategy._keras_asks_for_data:
            own = getattr(distributed, "own", True)
            iterator = strategy._epoch_iterator
            rows, glance = rows_of_arrays(iterator), glance_at_arrays(iterator)
            strategy.peers.check_same_dataset(getattr(distributed, "source", dataset), own, rows, glance)
        return distributed
