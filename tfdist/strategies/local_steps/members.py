"""Local steps of workers that come and go: what a worker does at the rounds of `runtime/rounds.py`.

Each process is one by itself, which TensorFlow does not connect: it trains on its rows of each batch, evaluates and
predicts alone. What it exchanges, the members of the job bring to a round at the end of a period (`brought`).

A worker that comes later runs the program from its beginning. It takes the data of the steps that the others have done,
computes nothing (`_skip`), and hears what they have said at the ends of epochs; so callbacks see the same history. At
the first end of a period that the others have not come to yet, it takes rank 0's state, and is one of the members. A
worker that the others have left out does the same.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.arguments import is_new
from tfdist.inspection.datasets import has_order, rows_of_arrays, seeds
from tfdist.inspection.model_state import all_optimizers_of, held_variables, random_state, restore_random_state
from tfdist.inspection.program import check_same_program, program_of
from tfdist.runtime.chief import Arranged, without_files
from tfdist.runtime.rounds import FIRST, MEAN, Membership, Place, RoundError
from tfdist.steps.keras_step import shadowed
from tfdist.steps.reduce import values_of
from tfdist.strategies.data_parallel.dataset import ReplicaBatch, array_source, cut_for_replica
from tfdist.strategies.data_parallel.state import is_mirrored
from tfdist.strategies.hooks import not_compiled_as_a_whole
from tfdist.strategies.local_steps.hooks import LocalStepsHooks, logs_of_all, numbers, own_logs

_log = logging.getLogger("tfdist")
_NO_ORDER = (
    "Received: data without an order of their own, under LocalStepsStrategy(min_workers=...). Each worker reads them "
    "in another one, and takes its rows of other batches: some are trained on twice, others never. Expected: a seed "
    "for what shuffles them, or a dataset made after the strategy; no deterministic=False."
)
# Instead of an epoch: after all of them.
_END = 2**31


class _WithoutState(keras.callbacks.Callback):
    """A callback of which a backup has nothing."""

    def get_state(self) -> dict[str, Any]:
        """Nothing: a backup knows where it is."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing."""


class Pace(_WithoutState):
    """Where a fit is; what was done before a resumed one counts, too."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.epoch, self.step, self.evaluations = number, -1, 0, 0
        # Whether the fit has its data, and whether the workers have exchanged for the last time in this epoch, since
        # one of them stops.
        self.has_data = self.has_exchanged = False
        self._begins = True

    @property
    def place(self) -> Place:
        """Number of the fit, epoch (-1 before the first one), steps done of the epoch."""
        return self.number, self.epoch, self.step

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch, self.step, self.evaluations, self._begins = epoch, 0, 0, True
        self.has_exchanged = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._begins:
            self.step, self._begins = batch, False


class _StopTogether(_WithoutState):
    """Comes last: all stop after an epoch after which one of them does."""

    def __init__(self, hooks: MemberHooks, restore: contextlib.ExitStack) -> None:
        super().__init__()
        self._hooks, self._restore = hooks, restore

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._hooks.any_stops(bool(self.model.stop_training)):
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        self._restore.close()


class MemberHooks(LocalStepsHooks):
    """Models of workers that come and go."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._membership: Membership = strategy.membership
        self.replicas_before = self._membership.rank
        self._pace = Pace(0)
        # Whether the fit has begun, whether this worker takes no part in it now, and until where it skips in any case.
        self._has_begun, self._skips, self._resumes_at = True, False, (0, 0, 0)
        # Rank 0's state there: what callbacks do before must not change it.
        self._given: list[np.ndarray] = []
        # The epoch of which all logs are known from before this job.
        self._known: tuple[int, int] | None = None

    def fit(self, fit: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        number = self._membership.number("fit")
        with shadowed(self, _pace=Pace(number), _has_begun=False, _skips=False):
            own = program_of(fit, model, args, kwargs, own_settings=True)
            # What shuffles the data.
            program, state = self._membership.share(f"begin of fit {number}", [own, random_state()])[0]
            names = self._membership.names
            check_same_program([names[0], names[self._membership.rank]], [program, own])
            restore_random_state(state)
            history = super().fit(fit, model, *args, **kwargs)
            self._keep_history(history)
            self._end(model)
            return history

    def make_epoch_iterator(self, make: Callable, iterator: Any, **arguments: Any) -> None:
        super().make_epoch_iterator(make, iterator, **arguments)
        source = getattr(iterator._distributed_dataset, "source", None)
        off = tf.data.experimental.AutoShardPolicy.OFF
        if source is None or source.options().experimental_distribute.auto_shard_policy == off:
            raise ValueError(
                "Received: data that each process has sharded for itself (AutoShardPolicy.OFF, "
                "distribute_datasets_from_function), under LocalStepsStrategy(min_workers=...). Expected: a dataset of "
                "global batches, the same on every process, of which each worker takes its rows."
            )
        if self._strategy._is_fitting and not self._pace.has_data:
            self._pace.has_data = True
            self._check_data(source, rows_of_arrays(iterator))

    def _check_data(self, dataset: tf.data.Dataset, rows: int | None) -> None:
        """Compares the data of a fit with rank 0's."""
        if not (array_source(dataset) or has_order(dataset)) and is_new(self, "order"):
            _log.warning(_NO_ORDER)
        own = {
            "number of rows": rows,
            "number of batches": int(dataset.cardinality()),
            "components of a batch": str(dataset.element_spec),
            "seeds of its shuffling": seeds(dataset),
        }
        first = self._membership.share(f"data of fit {self._pace.number}", own)[0]
        for what, value in own.items():
            if value != first[what]:
                raise ValueError(
                    f"The processes have different datasets. Received: {what}: {value}; on "
                    f"{self._membership.names[0]}: {first[what]}. Expected: the same dataset of global batches on "
                    "every process, with the same seeds; tfdist gives each its rows."
                )

    def file_of_cache(self, path: str) -> str:
        return f"{path}.rank{self._membership.rank}"

    def _arrange(self, callback_list: Any, callbacks: list, model: Any) -> list:
        if not self._strategy._is_fitting or self._pace in callbacks:
            return callbacks
        restore = contextlib.ExitStack()
        if self._membership.rank:
            # Rank 0 writes, and goes on from its backup; the others take its state.
            kinds = (Arranged, keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
            callbacks = [one for one in callbacks if not isinstance(one, kinds)]
            callbacks, restore = without_files(callbacks)
        return [self._pace, *callbacks, _StopTogether(self, restore)]

    def save(self, write: Callable, model: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if self._membership.rank:
            return None
        return super().save(write, model, path, *args, **kwargs)

    def save_or_ask(self, save: Callable, model: Any, *args: Any, **kwargs: Any) -> None:
        if not self._membership.rank:
            save(model, *args, **kwargs)

    def make_function(self, make: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        if args[:1] != (model.train_step,):
            return super().make_function(make, model, *args, **kwargs)
        with not_compiled_as_a_whole(model):  # XLA has no rounds
            return functools.partial(self._step, super().make_function(make, model, *args, **kwargs), model)

    def call(self, method: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        if method.__name__ == "train_on_batch":
            raise ValueError(
                "Received: train_on_batch under LocalStepsStrategy(min_workers=...). Expected: fit, which a worker "
                "that comes later can follow."
            )
        if method.__name__ != "evaluate" or not self._strategy._is_fitting:
            return super().call(method, model, *args, **kwargs)
        is_known = self._known == self._pace.place[:2]
        if is_known and kwargs.get("_use_cached_eval_dataset"):
            return {}  # what Keras has found is one of the epoch's logs
        if is_known or (self._skips and self._pace.place < self._resumes_at):
            return super().call(method, model, *args, **kwargs)  # nobody says what was found before this job
        self._pace.evaluations += 1
        name = f"evaluation {self._pace.evaluations} of fit {self._pace.number}, epoch {self._pace.epoch}"
        found = None if self._skips else super().call(method, model, *args, **kwargs)
        said = None if found is None else [_structure(found), list(map(numbers, tf.nest.flatten(found)))]
        parts = [one for one in self._membership.share(name, said).values() if one is not None]
        means = [np.mean(values, 0) for values in zip(*(flat for _, flat in parts), strict=True)]
        return tf.nest.pack_sequence_as(parts[0][0], means)

    def read_metrics(self, read: Callable, model: Any, logs: Any) -> Any:
        if self._is_testing or not self._strategy._is_fitting:
            return read(model, logs)
        if self._skips and self._pace.place >= self._resumes_at:
            self._try_to_join(model)
        elif not self._skips:
            outer = self._strategy._outer_models[model]
            if outer.is_in_period or not self._pace.has_exchanged:
                outer.end_epoch()
            self._strategy._say_that_periods_are_short(outer)
            self._after(model)
        said = None if self._skips else self._own_part(model, logs)
        everyone = self._membership.share(f"logs of fit {self._pace.number}, epoch {self._pace.epoch}", said)
        if "all" in everyone[0]:
            self._known = self._pace.place[:2]
            return everyone[0]["all"]
        parts = [one for one in everyone.values() if one is not None]
        for variable, *values in zip(model.metrics_variables, *(one["metrics"] for one in parts), strict=True):
            variable.assign(np.sum(values, 0))
        logs = parts[0]["logs"]
        found = read(model, logs)
        # Keras has read the metrics, if there was nothing else.
        if found is not logs or not logs:
            return found
        # One that was taken in here has trained no step of the epoch.
        others = [one["others"] for one in parts if one["logs"] == logs]
        return logs_of_all(self._strategy._outer_models[model], logs, others)

    def any_stops(self, stops: bool) -> bool:
        """Whether one of the workers stops after this epoch."""
        if self._known == self._pace.place[:2]:
            return stops
        name = f"stop after epoch {self._pace.epoch} of fit {self._pace.number}"
        return any(self._membership.share(name, stops).values())

    def _own_part(self, model: Any, logs: Any) -> dict[str, Any]:
        """What this worker says of an epoch: its metrics' states, and what its last step has logged beside them."""
        outer = self._strategy._outer_models[model]
        has_trained = len(tf.nest.flatten(logs)) == len(outer.origins)
        return {
            "metrics": [v.numpy().tolist() for v in model.metrics_variables],
            "logs": _structure(logs),
            "others": own_logs(outer, logs) if has_trained else [],
        }

    def _keep_history(self, history: keras.callbacks.History) -> None:
        """Rank 0 keeps the logs of epochs that were trained before this job began, for those who come later."""
        if self._membership.rank or history is None:
            return
        for number, epoch in enumerate(history.epoch):
            whole = {
                name: values[number] for name, values in history.history.items() if len(values) == len(history.epoch)
            }
            # A callback may add anything else.
            found = {name: numbers(value) for name, value in whole.items() if _is_number(value)}
            self._membership.rounds.keep(f"logs of fit {self._pace.number}, epoch {epoch}", {"all": found})

    # Steps

    def _step(self, function: Callable, model: Any, iterator: Any) -> Any:
        """In place of Keras' function of a training step."""
        if not self._has_begun:
            self._begin(model)
        if self._skips:
            return self._skip(function, model, iterator)
        self._pace.step += 1  # what is brought in the step is of its end
        try:
            logs = function(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            self._pace.step -= 1
            raise
        self._after(model)
        return logs

    def _begin(self, model: Any) -> None:
        """Before the first step of a fit, all workers take rank 0's state."""
        if model.steps_per_execution > 1:
            raise ValueError(
                f"Received: steps_per_execution={model.steps_per_execution} under "
                "LocalStepsStrategy(min_workers=...). Expected: 1, since a worker comes between two steps."
            )
        self._has_begun = True
        if self._membership.rank == 0:
            self._keep_history(model.history)
            self._membership.rounds.begin(self._pace.place)
            self._give(model)
            return
        if self._pace.place <= self._resumes_at:  # it was taken in while it followed an earlier fit
            self._skips = True
            self._go_on(model)
        else:
            self._try_to_join(model)

    def _end(self, model: Any) -> None:
        """After a fit, all have rank 0's model, also what its callbacks have made of it."""
        place = (self._pace.number, _END, 0)
        if self._membership.rank == 0:
            self._membership.rounds.begin(place)
            self._give(model, place)
        elif self._resumes_at == place:  # it was taken in while it followed
            self._take(model, self._given)
        elif self._resumes_at > place:
            pass
        elif (found := self._membership.follow(place)) is not None:
            self._resumes_at, self._given = found
            self._take(model, self._given)
        else:
            _log.warning(
                "The fit was over before this worker could take part: its model is not that of the others. Expected: "
                "what rank 0 has saved"
            )

    def _skip(self, function: Callable, model: Any, iterator: Any) -> dict:
        """Takes a step's data, and computes nothing."""
        if is_new(model, "skips"):
            # But for the first one: it is traced here, where nobody waits for it. Rank 0's state overwrites the rest.
            function(iterator)
            model.reset_metrics()
        else:
            next(iterator)
        self._pace.step += 1
        if self._pace.place <= self._resumes_at:
            self._go_on(model)
        elif self._pace.step % self._strategy._sync_every == 0:
            self._try_to_join(model)
        return model.get_metrics_result()

    def _go_on(self, model: Any) -> None:
        """Takes part where it was taken in."""
        if self._pace.place == self._resumes_at:
            self._take(model, self._given)
            model.reset_metrics()
            self._skips = False

    def _try_to_join(self, model: Any) -> None:
        found = self._membership.follow(self._pace.place)
        self._skips = True
        if found is not None:
            self._resumes_at, self._given = found
            self._go_on(model)

    def _after(self, model: Any) -> None:
        """After a step, or the last period of an epoch."""
        membership, outer = self._membership, self._strategy._outer_models[model]
        if membership.rank == 0 and membership.rounds.awaits_state:
            self._give(model)
        if outer.was_left_out:
            _log.warning("The others have left this worker out. It waits for their next exchange, and goes on from it")
            outer.was_left_out, self._skips = False, True
            self._resumes_at = (0, 0, 0)
        if outer.stops:
            outer.stops, model.stop_training = False, True
            self._pace.has_exchanged = True

    def _give(self, model: Any, place: Place | None = None) -> None:
        with self._shown(model):
            state = [np.asarray(v) for v in self._state(model)]
        self._membership.rounds.give(place or self._pace.place, state)

    def _take(self, model: Any, state: Sequence[np.ndarray]) -> None:
        variables = self._state(model)
        if [tuple(v.shape) for v in variables] != [one.shape for one in state]:
            raise RoundError(
                f"Received: a model with {len(variables)} weights and other state, where rank 0 has {len(state)}, or "
                "others. Expected: the same script on every process."
            )
        for variable, value in zip(variables, state, strict=True):
            variable.assign(value)
        self._strategy._outer_models[model].taken()
        self._given = []

    def _state(self, model: Any) -> list[Any]:
        """All that a training consists of but for its metrics."""
        metrics = {id(v) for v in model.metrics_variables}
        slots = [v for optimizer in all_optimizers_of(model) for v in optimizer.variables]
        outer = self._strategy._outer_of(model).variables
        raw = filter(is_mirrored, held_variables(model))
        found = {id(v): v for v in (*model.variables, *slots, *outer, *raw) if id(v) not in metrics}
        return [v for v in found.values() if v.dtype not in ("string", tf.string)]

    # In the graph of a step

    def own_rows(self, batch: ReplicaBatch) -> ReplicaBatch:
        """This worker's rows of a batch that every process has whole."""
        whole = tf.nest.map_structure(lambda one: values_of(one)[0], batch.data)
        with tf.device("CPU:0"):
            return cut_for_replica(whole, *self._strategy.workers)

    def brought(self, model: Any, rows: tf.Tensor, means: list[tf.Tensor], firsts: list[tf.Tensor]) -> list[tf.Tensor]:
        """What the members of a round have brought: means by rows, and values of the first."""
        kinds = [MEAN] * len(means) + [FIRST] * len(firsts)

        def bring(rows: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            try:
                found = self.bring(model, float(rows), kinds, arrays)
            except (RoundError, OSError) as error:
                raise tf.errors.UnavailableError(None, None, str(error)) from None
            # One that was left out takes the others' state soon.
            return [np.zeros_like(one) for one in arrays] if found is None else found

        given = [*means, *firsts]
        with tf.device("CPU:0"):
            found = tf.numpy_function(bring, [rows, *given], [one.dtype for one in given])
        return [tf.ensure_shape(one, like.shape) for one, like in zip(found, given, strict=True)]

    def bring(
        self, model: Any, rows: float = 0.0, kinds: Sequence[str] = (), arrays: Sequence[np.ndarray] = ()
    ) -> list[np.ndarray] | None:
        """Takes part in a round; `None` if this worker was left out."""
        stops = bool(model.stop_training)
        found = self._membership.bring(self._pace.place, stops, rows, list(kinds), list(arrays))
        outer = self._strategy._outer_models[model]
        outer.was_left_out = found is None
        if found is None:
            return None
        outer.stops = found.stops and not stops
        if not arrays:  # one that stops where a period has ended has nothing of the next one
            return []
        return [one.astype(given.dtype) for one, given in zip(found.arrays, arrays, strict=True)]


def _is_number(value: Any) -> bool:
    """Whether this is a number, or an array of numbers."""
    return isinstance(value, (int, float, np.generic, np.ndarray)) and np.asarray(value).dtype.kind in "biuf"


def _structure(found: Any) -> Any:
    """The structure of logs, as JSON can hold it."""
    return tf.nest.map_structure(lambda _: 0.0, found)
