"""Stands in for the functions of a model's steps: batches go to the workers, metrics and predictions come back."""

from __future__ import annotations

import collections
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.strategies.parameter_server.data import (
    COORDINATOR,
    BatchIterator,
    Shard,
    WorkerIterator,
    fetch,
    flatten,
    flatten_spec,
    is_dense,
    local_constant,
    rows_of,
    spec_of,
    unflatten,
)
from tfdist.strategies.parameter_server.dispatcher import Dispatcher, Task, Worker
from tfdist.strategies.parameter_server.step import StepFunction, StepOutcome, Trace, place_python

# How often results of metrics are computed during an epoch: that takes as long as handing out a step.
_LOG_SECONDS = 0.1


class Runner:
    """Hands the steps of an epoch to the workers, in any order, and adds up what they return.

    Args:
        strategy: a `ParameterServerStrategy`.
        model: the model.
        kind: "train" or "test".

    Example:
        >>> model.train_function = Runner(strategy, model, "train")  # doctest: +SKIP
        >>> logs = model.train_function(iterator)  # doctest: +SKIP
    """

    def __init__(self, strategy: Any, model: keras.Model, kind: str = "train"):
        self._strategy, self._model = strategy, model
        self._step = StepFunction(strategy, model, getattr(model, f"{kind}_step"))
        self._dispatcher: Dispatcher = strategy._dispatcher
        self._arrived: collections.deque[StepOutcome] = collections.deque()
        self._shards: WorkerIterator | None = None
        self._missing = 0
        self._sums: list[np.ndarray] | None = None
        self._handed_out = 0
        self._last: StepOutcome | None = None
        self._logs: Any = None
        self._previous: Any = None
        self._logged_at = 0.0
        self._returned: Any = None

    def __call__(self, iterator: Any) -> Any:
        """One execution, of `steps_per_execution` steps.

        Args:
            iterator: the iterator of a dataset that the strategy has distributed, or any iterator of batches.

        Returns:
            The logs of the steps of this epoch that have been done so far. While there are none, those of the epoch
            before: if it waited for a step, the other workers would be idle at the beginning of each epoch.

        Raises:
            StopIteration: if there are no data.
            Exception: what a step has raised.
        """
        try:
            return self._execute(iterator)
        except KeyboardInterrupt:
            self._dispatcher.abandon()
            raise

    def _execute(self, iterator: Any) -> Any:
        on_batch = not isinstance(iterator, (BatchIterator, WorkerIterator))
        if isinstance(iterator, BatchIterator):
            self._submit(iterator.draw(self._model.steps_per_execution), iterator.spec)
        elif isinstance(iterator, WorkerIterator):
            self._submit_shards(iterator, self._model.steps_per_execution)
            self._shards = iterator
        else:
            batch = next(iter(iterator))
            self._submit([flatten(batch)], spec_of(batch))
        self._wait(1 if on_batch else self._strategy._max_inflight)
        self._collect()
        return self._current_logs(fresh=on_batch)

    def finish(self) -> None:
        """Waits until all steps are done; then the metrics are complete.

        Raises:
            Exception: what a step has raised.
        """
        self._dispatcher.join()
        self._submit_missing()
        self._collect()
        self._write_metrics()
        self._shards, self._missing = None, 0
        if self._returned is not None:
            self._previous = self._read_logs()
            if isinstance(self._returned, dict):
                # Keras takes the logs of a custom step, which it holds already, for those of the epoch.
                self._returned.update(self._previous)
        self._logs = self._returned = None

    def forget(self) -> None:
        """Waits until all steps are done, and drops what they add to the metrics, which begin at 0.

        Raises:
            Exception: what a step has raised.
        """
        self._dispatcher.join()
        self._arrived.clear()
        self._shards, self._missing = None, 0
        self._sums = self._logs = self._returned = None

    def forget_logs(self) -> None:
        """Drops the logs of an earlier fit: until a step is done, they would be those of the next one."""
        self._previous = None

    def _wait(self, limit: int) -> None:
        """Waits until fewer than `limit` tasks are handed out, and something can be logged."""
        self._dispatcher.wait_below(limit)
        if self._logs is None and (self._previous is None or self._strategy._max_inflight == 1):
            # Callbacks get logs after the first step, too.
            self._dispatcher.wait_until(lambda: self._arrived)

    def _submit(self, batches: list[list[tf.Tensor]], spec: Any) -> None:
        single = self._step.single(spec)
        can_join = len(batches) > 1 and self._step.is_loopable and is_dense(spec)
        for group in _groups(batches) if can_join else [[batch] for batch in batches]:
            if len(group) == 1:
                self._hand_out(single, group[0])
            else:
                with tf.device(COORDINATOR):
                    joined = [tf.concat(tensors, 0) for tensors in zip(*group, strict=True)]
                rows = np.cumsum([0, *(batch[0].shape[0] for batch in group)], dtype=np.int32)
                self._hand_out(self._step.several(spec), [tf.constant(rows), *joined])

    def _submit_shards(self, iterator: WorkerIterator, steps: int) -> None:
        wanted = steps
        while wanted:
            self._dispatcher.wait_until(lambda: iterator.free() or iterator.is_over)
            shard = iterator.free()
            if shard is None:
                if wanted == steps:
                    raise StopIteration
                return
            count = wanted if shard.remaining is None else min(wanted, shard.remaining)
            wanted -= count
            self._hand_out_shard(iterator, shard, count)

    def _submit_missing(self) -> None:
        """Does the steps that Keras has counted but that a shard at its end could not do, on other shards."""
        while self._shards is not None and self._missing:
            missing, self._missing = self._missing, 0
            try:
                self._submit_shards(self._shards, missing)
            except StopIteration:
                return
            self._dispatcher.join()

    def _hand_out_shard(self, iterator: WorkerIterator, shard: Shard, steps: int) -> None:
        trace = self._step.on_iterator(iterator.element_spec, iterator.spec)
        self._dispatcher.wait_below(self._strategy._max_inflight)
        shard.is_busy = True
        if shard.remaining is not None:
            shard.remaining -= steps

        count, position = tf.constant(steps), self._next_position()

        def run(worker: Worker) -> tuple[StepOutcome, int]:
            done, *outputs = trace.function(shard.iterator_on(worker), count)
            return self._step.outcome(trace, outputs), int(fetch(done))

        def deliver(result: tuple[StepOutcome, int]) -> None:
            outcome, done = result
            shard.done += done
            shard.is_busy, shard.is_exhausted = False, done < steps
            self._missing += steps - done
            if done:
                self._deliver(position, outcome)

        self._dispatcher.submit(Task(run, deliver, self._home_of(shard, iterator)))

    def _home_of(self, shard: Shard, iterator: WorkerIterator) -> Worker | None:
        """The worker that reads a shard next: its own, or one without a shard if its own has several."""
        homes = [other.home for other in iterator.shards if other is shard or not other.is_over]
        if shard.home is not None and homes.count(shard.home) == 1:
            return shard.home
        return next((w for w in self._dispatcher.workers if not w.is_lost and w not in homes), shard.home)

    def _hand_out(self, trace: Trace, arguments: list[tf.Tensor]) -> None:
        self._dispatcher.wait_below(self._strategy._max_inflight)

        def run(worker: Worker) -> StepOutcome:
            return self._step.outcome(trace, trace.function(*arguments))

        self._dispatcher.submit(Task(run, functools.partial(self._deliver, self._next_position())))

    def _next_position(self) -> int:
        self._handed_out += 1
        return self._handed_out

    def _deliver(self, position: int, outcome: StepOutcome) -> None:
        outcome.position = position
        self._arrived.append(outcome)

    def _collect(self) -> None:
        while self._arrived:
            self._add(self._arrived.popleft())

    def _add(self, outcome: StepOutcome) -> None:
        if self._sums is None:
            self._sums = [np.array(array) for array in outcome.additions]
        else:
            for total, array in zip(self._sums, outcome.additions, strict=True):
                total += array
        for metric, args, kwargs in outcome.updates:
            metric.update_state(*args, **kwargs)
        # The last batch counts, as in one process, whichever worker ends last.
        if self._last is None or outcome.position > self._last.position:
            self._last = outcome

    def _write_metrics(self) -> None:
        if self._sums is None:
            return
        for variable, total in zip(self._step.variables, self._sums, strict=True):
            variable._value.assign_add(tf.constant(total, variable._value.dtype))
        self._sums = None

    def _current_logs(self, fresh: bool) -> Any:
        now = time.monotonic()
        logs = self._logs
        if logs is None and self._sums is None and self._previous is not None:
            logs = self._previous
        elif fresh or self._logs is None or now - self._logged_at > _LOG_SECONDS or self._strategy._max_inflight == 1:
            self._write_metrics()
            logs = self._logs = self._read_logs()
            self._logged_at = now
        self._returned = dict(logs) if isinstance(logs, dict) else logs
        return self._returned

    def _read_logs(self) -> Any:
        return {} if self._last is None else self._last.logs.read(self._last.own)


def _groups(batches: list[list[tf.Tensor]]) -> list[list[list[tf.Tensor]]]:
    """Groups of neighbouring batches that differ at most in their number of rows, so that they can be concatenated."""
    groups: list[list[list[tf.Tensor]]] = []
    last = None
    for tensors in batches:
        key = [tensor.shape[1:] for tensor in tensors] if rows_of(tensors) is not None else None
        if key is not None and key == last:
            groups[-1].append(tensors)
        else:
            groups.append([tensors])
        last = key
    return groups


class PredictRunner:
    """Lets the workers predict some batches ahead of the one that Keras asks for, and returns them in their order.

    Args:
        strategy: a `ParameterServerStrategy`.
        model: the model.

    Example:
        >>> model.predict_function = PredictRunner(strategy, model)  # doctest: +SKIP
        >>> outputs = model.predict_function([next(iterator)])  # doctest: +SKIP
    """

    def __init__(self, strategy: Any, model: keras.Model):
        self._strategy, self._model = strategy, model
        self._dispatcher: Dispatcher = strategy._dispatcher
        self._functions: dict[str, tuple[Any, list]] = {}
        # Weak: data must not live longer for it.
        self._iterator: Callable[[], BatchIterator | None] = lambda: None
        # By the position of a batch: its predictions; `None` while a worker computes them.
        self._results: dict[int, list[tf.Tensor] | None] = {}

    def __call__(self, data: list[Any]) -> Any:
        """Predicts.

        Args:
            data: batches, as Keras draws them for one execution.

        Returns:
            The outputs of all of them, concatenated.

        Raises:
            Exception: what the step has raised.
        """
        # Keras passes batches, not the iterator that they are from.
        iterator = self._strategy._latest_batches()
        if iterator is None or iterator.last is not data[-1]:
            iterator = None
        if iterator is not self._iterator() or iterator is None:
            self._iterator = (lambda: None) if iterator is None else weakref.ref(iterator)
            self._results = {}
        first = iterator.issued - len(data) if iterator else 0
        spec = iterator.spec if iterator else spec_of(data[0])
        key = repr(spec)
        if key not in self._functions:
            self._functions[key] = self._traced(spec)
        function, traced = self._functions[key]
        for i, batch in enumerate(data):
            self._ask(function, first + i, flatten(batch))
        for ahead in range(self._strategy._max_inflight - 1 if iterator else 0):
            batch = iterator.look_ahead(ahead)
            if batch is not None:
                self._ask(function, iterator.issued + ahead, batch)
        positions = range(first, first + len(data))
        self._dispatcher.wait_until(lambda: all(self._results[position] is not None for position in positions))
        outputs = [unflatten(traced[-1], self._results.pop(position)) for position in positions]
        return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    def _ask(self, function: Callable, position: int, tensors: list[tf.Tensor]) -> None:
        if position in self._results:
            return
        # Layers may draw random numbers, or keep something, from batch to batch.
        self._dispatcher.wait_below(self._strategy._max_inflight)
        results = self._results
        results[position] = None

        def run(worker: Worker) -> list[tf.Tensor]:
            return [local_constant(fetch(value)) for value in function(*tensors)]

        def deliver(result: list[tf.Tensor]) -> None:
            results[position] = result

        self._dispatcher.submit(Task(run, deliver))

    def _traced(self, spec: Any) -> tuple[Callable, list]:
        """The predict step for batches of one kind, on dense tensors; the specification of what it returns is last."""
        traced: list[Any] = []

        def predict(*flat: tf.Tensor) -> list[tf.Tensor]:
            step = self._model.predict_step
            outputs = self._strategy._run_replica(lambda flat: step(unflatten(spec, flat)), list(flat))
            place_python()
            traced.append(tf.nest.map_structure(tf.type_spec_from_value, outputs))
            return flatten(outputs)

        with self._strategy.scope():
            return tf.function(predict, autograph=False).get_concrete_function(*flatten_spec(spec)), traced
