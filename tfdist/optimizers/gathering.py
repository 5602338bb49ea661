"""All shards of a value on every replica, in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils

from tfdist.strategies import exchange
from tfdist.strategies.keras_step import global_replica, local_replica


def all_gather(shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Stacks the shards of all replicas, with one collective for each.

    Args:
        shards: matrices of this replica, with the same shapes on all of them.

    Returns:
        For each matrix those of all replicas, one below the other, in the order of the replicas.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return list(shards)
    context = tf.distribute.get_replica_context()
    extended = context.strategy.extended
    if not extended._use_merge_call():
        # Compiled by XLA, or in a branch: what is left there is the all-reduce.
        return [_by_all_reduce(context, shard) for shard in shards]
    exchange.note_other()
    if len(extended.worker_devices) == context.num_replicas_in_sync:
        return list(context.merge_call(_copy_to_all_devices, args=tuple(shards)))
    if tf.executing_eagerly():
        return [context.all_gather(shard, axis=0) for shard in shards]
    # As the strategy does for an all-reduce. Its public all_gather sends the shapes around, too, and transposes.
    launcher = extended._cross_device_ops._launchers[local_replica()]
    return [_with_rows(launcher._all_gather(shard, None), shard, context) for shard in shards]


def _with_rows(whole: tf.Tensor, shard: tf.Tensor, context: Any) -> tf.Tensor:
    return tf.ensure_shape(whole, [shard.shape[0] * context.num_replicas_in_sync, *shard.shape[1:]])


def _by_all_reduce(context: Any, shard: tf.Tensor) -> tf.Tensor:
    before, rows = global_replica() * shard.shape[0], shard.shape[0]
    after = (context.num_replicas_in_sync - 1) * rows - before
    return exchange.all_reduce(tf.pad(shard, [[before, after], [0, 0]]))


def _copy_to_all_devices(strategy: tf.distribute.Strategy, *shards: Any) -> tuple:
    """In one process, shards are copied from device to device."""
    gathered = []
    for shard in shards:
        parts, whole = strategy.experimental_local_results(shard), []
        for device in strategy.extended.worker_devices:
            with tf.device(device):
                whole.append(tf.concat(parts, 0))
        gathered.append(distribute_utils.regroup(tuple(whole), always_wrap=True))
    return tuple(gathered)
