"""Synchronous training: each batch is cut into shards, one a worker, and their gradients are applied once, together."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.strategies.parameter_server.batches import any_rows, is_dense, rows_of
from tfdist.strategies.parameter_server.dispatcher import Task, Worker
from tfdist.strategies.parameter_server.extended import COORDINATOR
from tfdist.strategies.parameter_server.gradient_step import GradientStep, ShardOutcome, ShardTrace
from tfdist.strategies.parameter_server.runner import Runner


class SynchronousRunner(Runner):
    """Trains as one process does with the same batches, whichever worker computes what.

    With backup workers there are fewer shards than workers. Workers that have nothing to do then compute shards that
    others are still at, and what comes first counts. Other than in arXiv 1604.00981, from which the idea is, no
    gradient is dropped: each shard counts, once.

    Args:
        strategy: a `ParameterServerStrategy`.
        model: the model.
    """

    def __init__(self, strategy: Any, model: keras.Model):
        super().__init__(strategy, model, "train")
        self._step: GradientStep = GradientStep(strategy, model)
        self._relaxed: tuple[Any, Any] | None = None

    def _submit(self, batches: list[list[tf.Tensor]], spec: Any) -> None:
        # A shard has fewer rows than the batches that a dataset may promise.
        trace = self._step.single(self._any_rows(spec))
        for batch in batches:
            weights, shards = _cut(batch, spec, self._strategy.num_shards)
            done = self._compute(trace, weights, shards)
            self._step.apply(trace, done, weights)
            done[-1].outcome.logs = _means([shard.outcome.logs for shard in done], weights)
            self._arrived.extend(shard.outcome for shard in done)

    def _any_rows(self, spec: Any) -> Any:
        if self._relaxed is None or self._relaxed[0] is not spec:
            self._relaxed = spec, any_rows(spec)
        return self._relaxed[1]

    def _wait(self, limit: int) -> None:
        """Does nothing: a step is done when its gradients are applied, whoever is still at a shard of it."""

    def _compute(self, trace: ShardTrace, weights: list[float], shards: list[list[tf.Tensor]]) -> list[ShardOutcome]:
        done: list[ShardOutcome | None] = [None] * len(shards)

        def task(i: int) -> Task:
            arguments = [tf.constant(i, tf.int64), tf.constant(weights[i]), *shards[i]]

            def run(worker: Worker) -> ShardOutcome | None:
                if done[i] is not None:
                    return None  # another worker was faster
                return self._step.shard_outcome(trace, trace.function(*arguments))

            def deliver(outcome: ShardOutcome | None) -> None:
                if done[i] is None:
                    done[i] = outcome

            return Task(run, deliver)

        for _ in range(2 if self._strategy.backup_workers else 1):
            for i in range(len(shards)):
                self._dispatcher.submit(task(i))
        self._dispatcher.wait_until(lambda: None not in done)
        assert None not in done
        return done


def _cut(batch: list[tf.Tensor], spec: Any, count: int) -> tuple[list[float], list[list[tf.Tensor]]]:
    """Parts of a batch with almost equally many rows, none of them empty, and their shares of the rows."""
    rows = rows_of(batch) if is_dense(spec) else None
    count = max(min(count, rows or 1), 1)
    if count == 1:
        return [1.0], [batch]
    sizes = [(i + 1) * rows // count - i * rows // count for i in range(count)]
    with tf.device(COORDINATOR):
        parts = [list(part) for part in zip(*(tf.split(tensor, sizes) for tensor in batch), strict=True)]
    return [size / rows for size in sizes], parts


def _means(logs: list[list[np.ndarray]], weights: list[float]) -> list[np.ndarray]:
    """A step's own logs over the rows of a batch; of integers the last shard's."""
    means = []
    for values in zip(*logs, strict=True):
        last = values[-1]
        is_float = tf.as_dtype(last.dtype).is_floating
        mean = sum(np.float64(w) * v for w, v in zip(weights, values, strict=True)) if is_float else last
        means.append(np.asarray(mean, last.dtype))
    return means
