"""Slots that other processes hold parts of are fetched before a model is saved, by all processes together."""

from __future__ import annotations

import keras

from tfdist.optimizers.sharded_optimizer import ShardedOptimizer
from tfdist.strategies.model_parts import optimizers_of, parts_of


def collect_slots(model: keras.Model) -> None:
    """Makes all slots readable on every process.

    Nothing if they are already: without a `ShardedOptimizer`, in one process, and as long as no step was made since the
    last time; `fit` ends so. Otherwise a collective, for which the processes wait for each other first: a process that
    saves alone is told so, instead of standing still.

    Args:
        model: a model of a strategy of several processes.

    Raises:
        tfdist.strategies.peers.PeerTimeout: if another process does not save the model, too.
        ConnectionError: if it has ended.
    """
    optimizers = [part for optimizer in optimizers_of(model) for part in (optimizer, *parts_of(optimizer))]
    scattered = [one for one in optimizers if isinstance(one, ShardedOptimizer) and not one.is_collected]
    if scattered:
        model.distribute_strategy.peers.gather(
            "slots", None, "save the model, too (each process has a part of the slots of its ShardedOptimizer)"
        )
    for optimizer in scattered:
        optimizer.collect()
