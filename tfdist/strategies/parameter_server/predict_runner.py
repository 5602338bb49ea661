"""Stands in for a model's `predict_function`: workers compute the next batches before Keras asks for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.parameter_server.batches import (
    BatchIterator,
    flatten,
    flatten_spec,
    spec_of,
    unflatten,
)
from tfdist.strategies.parameter_server.dispatcher import Dispatcher, Task, Worker
from tfdist.strategies.parameter_server.transfer import fetch, local_constant


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
        self._functions: dict[str, _PredictFunction] = {}
        # Weak: data must not live longer for it.
        self._iterator: Callable[[], BatchIterator | None] = lambda: None
        self._results: dict[int, list[tf.Tensor]] = {}
        self._asked: set[int] = set()

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
            self._results, self._asked = {}, set()
        first = iterator.issued - len(data) if iterator else 0
        spec = iterator.spec if iterator else spec_of(data[0])
        function = self._function(spec)
        for i, batch in enumerate(data):
            self._ask(function, first + i, flatten(batch))
        if iterator:
            self._look_ahead(function, iterator)
        positions = range(first, first + len(data))
        self._dispatcher.wait_until(lambda: all(position in self._results for position in positions))
        outputs = [unflatten(function.outputs, self._results.pop(position)) for position in positions]
        self._asked -= set(positions)
        return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    def _function(self, spec: Any) -> _PredictFunction:
        key = repr(spec)
        if key not in self._functions:
            self._functions[key] = _PredictFunction(self._strategy, self._model, spec)
        return self._functions[key]

    def _look_ahead(self, function: _PredictFunction, iterator: BatchIterator) -> None:
        for ahead in range(self._strategy._max_inflight):
            batch = iterator.look_ahead(ahead)
            if batch is None:
                return
            self._ask(function, iterator.issued + ahead, batch)

    def _ask(self, function: _PredictFunction, position: int, tensors: list[tf.Tensor]) -> None:
        if position in self._asked:
            return
        self._asked.add(position)
        results = self._results

        def run(worker: Worker) -> tuple[int, list[tf.Tensor]]:
            return position, [local_constant(fetch(value)) for value in function.concrete(*tensors)]

        def deliver(result: tuple[int, list[tf.Tensor]]) -> None:
            results[result[0]] = result[1]

        self._dispatcher.submit(Task(run, deliver))


class _PredictFunction:
    """A model's `predict_step`, traced for batches of one kind.

    Attributes:
        concrete: takes and returns dense tensors.
        outputs: the specification of what the step returns.
    """

    def __init__(self, strategy: Any, model: keras.Model, spec: Any):
        self.outputs: Any = None

        def predict(*flat: tf.Tensor) -> list[tf.Tensor]:
            outputs = strategy._run_replica(lambda flat: model.predict_step(unflatten(spec, flat)), list(flat))
            self.outputs = tf.nest.map_structure(tf.type_spec_from_value, outputs)
            return flatten(outputs)

        with strategy.scope():
            self.concrete = tf.function(predict, autograph=False).get_concrete_function(*flatten_spec(spec))
