"""What Keras sees of workers that train by themselves: between two periods what all have learned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.inspection.model_state import all_optimizers_of
from tfdist.optimizers.sharded_optimizer import ShardedOptimizer
from tfdist.steps.keras_step import shadowed
from tfdist.strategies.data_parallel.strategy import DataParallelHooks
from tfdist.strategies.local_steps.outer_model import OuterModel


class LocalStepsHooks(DataParallelHooks):
    """Models whose weights differ between the processes in the middle of a period."""

    keeps_own = True
    # Whether a model is evaluated, or predicts; also in the middle of a fit.
    _is_testing = False

    def check(self, model: Any) -> None:
        super().check(model)
        if any(isinstance(optimizer, ShardedOptimizer) for optimizer in all_optimizers_of(model)):
            raise ValueError(
                "Received: a ShardedOptimizer under LocalStepsStrategy, where each worker trains by itself. "
                "Expected: the optimizer inside, as it is."
            )

    def make_function(self, make: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        if args[:1] == (model.train_step,):
            self._strategy._outer_of(model)
        return super().make_function(make, model, *args, **kwargs)

    def note_update(self, variables: Any) -> None:
        if self._strategy._traced_outer is not None:
            self._strategy._traced_outer.note_update(variables)

    def read_metrics(self, read: Callable, model: Any, logs: Any) -> Any:
        outer = None if self._is_testing else self._strategy._outer_models.get(model)
        if outer is not None:
            outer.end_period()
            self._strategy._say_that_periods_are_short(outer)
        found = super().read_metrics(read, model, logs)
        # Keras has read the metrics of all processes, if there was nothing else.
        return found if self.peers is None or outer is None or found is not logs else self._of_all(outer, logs)

    def _of_all(self, outer: OuterModel, logs: Any) -> Any:
        everyone = self.peers.gather("logs", own_logs(outer, logs), "finish the epoch")
        return logs_of_all(outer, logs, everyone)

    def fit(self, fit: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        with shadowed(self._strategy, _is_fitting=True):
            return super().fit(fit, model, *args, **kwargs)

    def call(self, method: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        trains, strategy = method.__name__ in ("fit", "train_on_batch"), self._strategy
        if trains or not strategy._is_fitting:
            # All processes come here together. What another model has learned of the same weights is not lost.
            own = strategy._outer_models.get(model) if trains else None
            # A frozen part, such as the discriminator in a GAN's generator step, goes on with its own period.
            for outer in strategy._outers_with(model.trainable_variables if trains else model.weights):
                if outer is not own:
                    outer.end_period()
            if own is not None:
                own.begin_fit()
        if trains:
            return super().call(method, model, *args, **kwargs)
        with shadowed(self, _is_testing=True), self._shown(model):
            return super().call(method, model, *args, **kwargs)

    def save(self, write: Callable, model: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._strategy._is_fitting:
            self._strategy._warn_of_hidden_steps(model)
        with self._shown(model):
            return super().save(write, model, path, *args, **kwargs)

    @contextlib.contextmanager
    def collected(self, model: Any) -> Iterator[None]:
        with super().collected(model), self._shown(model):
            yield

    @contextlib.contextmanager
    def _shown(self, model: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for outer in self._strategy._outers_with(model.variables):
                stack.enter_context(outer.shown())
            yield

    def more_state(self, model: Any) -> list[keras.Variable]:
        outer = self._strategy._outer_models.get(model)
        return [] if outer is None else outer.variables

    def steps_alone(self, model: Any) -> int | None:
        outer = self._strategy._outer_models.get(model)
        return None if outer is None else outer.steps_in_period

    def restored(self, model: Any, of_others: bool) -> None:
        self._strategy._outer_models[model].restored(of_others)


def own_logs(outer: OuterModel, logs: Any) -> list[Any]:
    """What this worker has logged last; `None` for results of metrics."""
    pairs = zip(tf.nest.flatten(logs), outer.origins, strict=True)
    return [None if origin else numbers(one) for one, origin in pairs]


def logs_of_all(outer: OuterModel, logs: Any, everyone: Sequence[list[Any]]) -> Any:
    """Logs of which some are no metrics' results: the mean over the workers of what each has logged last."""
    found = [
        tf.nest.flatten(origin[0].result())[origin[1]] if origin else np.mean(values, 0)
        for origin, values in zip(outer.origins, zip(*everyone, strict=True), strict=True)
    ]
    return tf.nest.pack_sequence_as(logs, found)


def numbers(value: Any) -> Any:
    """A number, or an array of numbers, as JSON can hold it."""
    return np.asarray(value, "float64").tolist()
