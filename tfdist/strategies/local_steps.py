"""`tfdist.LocalStepsStrategy`: workers that train by themselves, and put together what they have learned now and then.

A period of a worker, with `sync_every=3`; the others do the same on their rows of the same batches:

before its first step   base := weights
step 1, 2, 3            Keras' own train_step on this worker's rows, as in one process   (`_run`, `_alone`)
after its last one      differences := base - weights       of each worker             (`OuterModel._synchronize`)
                        difference  := their mean over the rows of the period           one exchange
                        weights     := base, then outer_optimizer.apply(difference)     the same on all workers

LocalStepsStrategy  `run` gives a training step to this process alone; everything else is data-parallel
LocalStepsHooks     what Keras sees between two periods is what all have learned, and in the middle of one the last base
OuterModel          base, counters and outer optimizer of a model

While a step is traced, the strategy is that of one replica (`_alone`). So Keras and tfdist add nothing to it, and it
exchanges nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.arguments import check_count
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.variables import DIRECT
from tfdist.compat.scopes import outside_of_scope
from tfdist.inspection.model_state import held_variables, metrics_of, optimizers_of, parts_of, parts_of_variable
from tfdist.memory.policy import MemoryPolicy
from tfdist.optimizers.sharded_optimizer import ShardedOptimizer
from tfdist.steps.derived_logs import marked_result, metric_of
from tfdist.steps.gradients import all_reduce_sum
from tfdist.steps.keras_step import KerasStep, marked_for_xla, recognise_step, shadowed, xla_compiles
from tfdist.steps.reduce import values_of
from tfdist.strategies.data_parallel.dataset import count_rows, static_rows, with_stand_in
from tfdist.strategies.data_parallel.replica_step import agreement_of, undone_unless
from tfdist.strategies.data_parallel.state import is_mirrored
from tfdist.strategies.data_parallel.strategy import DataParallel, DataParallelHooks, other_random_numbers
from tfdist.strategies.multi_worker import MultiWorkerExtended, MultiWorkerMirroredStrategy
from tfdist.strategies.validation import check_float8

_log = logging.getLogger("tfdist")
_ANOTHER_TRAINING = (
    "LocalStepsStrategy(sync_every=%d): workers train by themselves between two exchanges. That is another training "
    "than that of one process: compare the validation loss with that of MultiWorkerMirroredStrategy before you rely on "
    "it."
)
_SHORT_PERIODS = (
    "Received: periods of %d steps, and the default outer_optimizer, SGD(0.7, momentum=0.9, nesterov=True), which is "
    "for longer ones: if the loss goes up and down, take outer_optimizer=lambda: keras.optimizers.SGD(1.0), longer "
    "periods, or epochs of more steps."
)
# Of fewer steps, the momentum of the default adds up what is mostly the same.
_SHORT = 20
_MADE_TOO_EARLY = (
    "Received: outer_optimizer=%r, an optimizer, whose variables were made before the strategy could connect the "
    "processes. Expected: a function that makes it, such as `lambda: keras.optimizers.SGD(0.7, momentum=0.9)`."
)
_DEFAULT = {"class_name": "SGD", "config": {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}}


class _LocalStepsExtended(MultiWorkerExtended):
    """The part of `LocalStepsStrategy` that `tf.distribute` calls."""

    # Whether the strategy is that of this process alone.
    is_alone = False
    _of_one = tf.distribute.ReductionToOneDevice()

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1 if self.is_alone else super()._num_replicas_in_sync

    def _by_direct(self, name: str) -> Any:
        return None if self.is_alone else super()._by_direct(name)

    def _get_cross_device_ops(self, value: Any) -> Any:
        return self._of_one if self.is_alone else super()._get_cross_device_ops(value)

    def _call_for_each_replica(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        # Under the number that it has among all: random numbers go by it.
        return self.call_here(fn, args, kwargs) if self.is_alone else super()._call_for_each_replica(fn, args, kwargs)

    def call_here(self, fn: Callable, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Calls a function in the context of this process' replica."""
        return self._call_here(self._input_position()[1], fn, args, kwargs or {})


class LocalStepsHooks(DataParallelHooks):
    """Models whose weights differ between the processes in the middle of a period."""

    keeps_own = True
    # Whether a model is evaluated, or predicts; also in the middle of a fit.
    _is_testing = False

    def check(self, model: Any) -> None:
        super().check(model)
        for optimizer in optimizers_of(model):
            if any(isinstance(part, ShardedOptimizer) for part in [optimizer, *parts_of(optimizer)]):
                raise ValueError(
                    "Received: a ShardedOptimizer under LocalStepsStrategy, where each worker trains by itself. "
                    "Expected: the optimizer inside, as it is."
                )

    def make_function(self, make: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        if args[:1] == (model.train_step,):
            self._strategy._make_outer(model)
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
        """Logs of which some are no metrics' results: the mean over the workers of what each has logged last."""
        flat, origins = tf.nest.flatten(logs), outer.origins
        own = [
            None if origin else np.asarray(one, "float64").tolist() for one, origin in zip(flat, origins, strict=True)
        ]
        everyone = zip(*self.peers.gather("logs", own, "finish the epoch"), strict=True)
        found = [
            tf.nest.flatten(origin[0].result())[origin[1]] if origin else np.mean(values, 0)
            for origin, values in zip(origins, everyone, strict=True)
        ]
        return tf.nest.pack_sequence_as(logs, found)

    def fit(self, fit: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        before, self._strategy._is_fitting = self._strategy._is_fitting, True
        try:
            return super().fit(fit, model, *args, **kwargs)
        finally:
            self._strategy._is_fitting = before

    def call(self, method: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        trains, strategy = method.__name__ in ("fit", "train_on_batch"), self._strategy
        if trains or not strategy._is_fitting:
            # All processes come here together. What another model has learned of the same weights is not lost.
            own = strategy._outer_models.get(model) if trains else None
            for outer in strategy._outers_with(model):
                if outer is not own:
                    outer.end_period()
        if trains:
            return super().call(method, model, *args, **kwargs)
        before, self._is_testing = self._is_testing, True
        try:
            with self._shown(model):
                return super().call(method, model, *args, **kwargs)
        finally:
            self._is_testing = before

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
            for outer in self._strategy._outers_with(model):
                stack.enter_context(outer.shown())
            yield

    def more_state(self, model: Any) -> list[keras.Variable]:
        outer = self._strategy._outer_models.get(model)
        return [] if outer is None else outer.variables

    def restored_of_others(self, model: Any) -> None:
        self._strategy._outer_models[model].begin_anew()


class LocalStepsStrategy(MultiWorkerMirroredStrategy):
    """Workers that train by themselves and rarely talk: DiLoCo, local SGD, over slow networks.

    Each worker takes `sync_every` optimizer steps on its rows of the global batches, as one process does. Then the mean
    of what they have changed is the gradient of an outer optimizer's step, which all begin anew from. So the network
    carries the model once in `sync_every` steps. This is another training than that of one process: loss and accuracy
    have to be compared, not weights.

    It is used as `MultiWorkerMirroredStrategy` is: the same script on every process, global batches, plain `fit`. An
    epoch ends with an exchange, so validation, callbacks and files see what all have learned. In the middle of a
    period, `evaluate`, `predict` and files have the weights of its beginning; `get_weights` gives those of this worker.
    Optimizer states are each worker's own. Other state of layers, such as moving means, is averaged at each exchange.

    Args:
        sync_every: after how many training steps the workers exchange, 1 or more.
        outer_optimizer: a function that makes a Keras optimizer (or what `keras.optimizers.get` takes), whose gradient
            is weights before minus mean of the weights after. By default SGD(0.7, momentum=0.9, nesterov=True), as in
            the paper; `lambda: keras.optimizers.SGD(1.0)` averages the weights. Each model gets one of its own.
        compression: `None`, or `"bf16"` or `"fp16"`, to which the differences are cast for the exchange.
        cluster: the cluster and this process' place in it; by default what `tfdist.discover()` finds. One process
            alone takes the outer steps, too.
        memory: what models keep for their backward pass, see `tfdist.memory.MemoryPolicy`.
        start_timeout: how long to wait at the start until all processes are there, in seconds.
        peer_timeout: how long to wait for another process that has not yet come to the same exchange, in seconds.

    Raises:
        tfdist.ClusterError: as in `MultiWorkerMirroredStrategy`.
        ValueError: for a `sync_every` below 1, another `compression`, or a process with several devices: start one for
            each, as `tfdist run` does with GPUs.

    Source: Douillard et al., "DiLoCo: distributed low-communication training of language models" (2023, arXiv
    2311.08105); Stich, "Local SGD converges fast and communicates little" (2019, arXiv 1805.09767).

    Example (started by `tfdist run -n 2 train.py`):
        >>> import keras, numpy as np, tfdist  # doctest: +SKIP
        >>> strategy = tfdist.LocalStepsStrategy(sync_every=50)  # doctest: +SKIP
        >>> with strategy.scope():  # doctest: +SKIP
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("adam", "mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)  # doctest: +SKIP
    """

    _extended_class = _LocalStepsExtended
    _hooks_class = LocalStepsHooks
    _goes_through_host = True

    def __init__(
        self,
        sync_every: int = 50,
        *,
        outer_optimizer: Callable[[], keras.optimizers.Optimizer] | keras.optimizers.Optimizer | str | None = None,
        compression: str | None = None,
        cluster: ClusterConfig | None = None,
        memory: MemoryPolicy | str | None = None,
        start_timeout: float = 300.0,
        peer_timeout: float = 1800.0,
    ):
        check_count("sync_every", sync_every)
        if compression not in (None, "bf16", "fp16"):
            raise ValueError(f"Received: compression={compression!r}. Expected: None, 'bf16' or 'fp16'.")
        self._sync_every, self._outer_optimizer = sync_every, outer_optimizer
        self._outer_models: weakref.WeakKeyDictionary[Any, OuterModel] = weakref.WeakKeyDictionary()
        self._said_local = self._said_loop = self._said_short = self._said_hidden = self._is_fitting = False
        self._traced_outer: OuterModel | None = None
        try:
            super().__init__(
                cluster=cluster,
                compression=compression,
                batch_norm="local",
                memory=memory,
                transport=DIRECT,
                start_timeout=start_timeout,
                peer_timeout=peer_timeout,
            )
        except ClusterError as error:
            if "already initialised" in str(error) and isinstance(outer_optimizer, keras.optimizers.Optimizer):
                raise ValueError(_MADE_TOO_EARLY % outer_optimizer.name) from None
            raise
        if len(self.extended.worker_devices) > 1:
            raise ValueError(
                f"Received: a process with {len(self.extended.worker_devices)} devices under LocalStepsStrategy. "
                "Expected: one process for each device, as `tfdist run` starts them with GPUs."
            )

    def _begin(self) -> None:
        given = _DEFAULT if self._outer_optimizer is None else self._outer_optimizer
        made = given() if callable(given) else keras.optimizers.get(given)
        if not isinstance(made, keras.optimizers.Optimizer):
            raise ValueError(f"Received: an outer_optimizer that makes {made!r}. Expected: a Keras optimizer.")
        config = json.dumps([type(made).__name__, made.get_config()], default=str, sort_keys=True)
        self._make_optimizer = (
            given if callable(given) else functools.partial(type(made).from_config, made.get_config())
        )
        self._arguments |= {"sync_every": repr(self._sync_every), "outer_optimizer": config}
        super()._begin()

    def synchronize(self, model: keras.Model) -> None:
        """Ends a period of a model now: the workers exchange what they have learned since the last exchange.

        `fit` does so at the end of each epoch, and `evaluate` and `predict` outside of a fit do. A loop around
        `train_on_batch` calls it before it saves the model. All processes call it at the same point.

        Args:
            model: a model of this strategy; nothing happens if it was not trained since.
        """
        for outer in self._outers_with(model):
            outer.end_period()

    def _outers_with(self, model: Any) -> list[OuterModel]:
        """What trains a weight of a model, such as that of which it is a part, in the order in which it was made."""
        if not self._outer_models:
            return []
        weights = set(map(id, model.weights))
        return [outer for outer in list(self._outer_models.values()) if outer.trains_one_of(weights)]

    def _make_outer(self, model: Any) -> None:
        """Makes what is kept of a model beside its weights, unless it is there; all processes come here together."""
        if not self._said_local and self.is_chief:
            _log.warning(_ANOTHER_TRAINING, self._sync_every)
        self._said_local = True
        outer = self._outer_models.get(model)
        if outer is None or not outer.is_of(model):
            if outer is not None:
                outer.end_period()
            with self.scope():
                self._outer_models[model] = OuterModel(self, model, self._make_optimizer())

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While the block runs, the strategy is that of this process, which nothing is exchanged with."""
        before, self.extended.is_alone = self.extended.is_alone, True
        try:
            yield
        finally:
            self.extended.is_alone = before

    def _run(self, fn: Callable, args: tuple, kwargs: dict | None, options: Any) -> Any:
        """Gives a training step of Keras this worker's rows only."""
        step = recognise_step(fn, args, kwargs)
        if step is None or step.kind != "train":
            if step is None:
                self._warn_of_own_loop(fn)
            return super()._run(fn, args, kwargs, options)
        outer, batch = self._outer_models[step.model], self._cut(step, *args)
        parts = [values_of(one)[0] for one in tf.nest.flatten(batch)]
        data = [x for x in tf.nest.flatten(parts, expand_composites=True) if tf.is_tensor(x)]
        step.is_compiled = xla_compiles(step.model, batch)
        # Counters do not depend on the data: without this, some ranks would count the step that finds no data.
        with tf.control_dependencies(data):
            outer.begin_step()
            with (
                self._alone(),
                outer.noting(step.model),
                other_random_numbers(self.extended._input_position()[1]),
                marked_for_xla(step.is_compiled),
            ):
                # Past what the data-parallel strategies do to a step.
                on_replica = _training_alone(step, outer)
                logs, rows = super(DataParallel, self).run(on_replica, tuple(batch), None, options)
            outer.note_logs(logs)
            outer.end_step(values_of(rows)[0])
        return self._logs_for_keras(logs)

    def _say_that_periods_are_short(self, outer: OuterModel) -> None:
        """At the end of an epoch, once."""
        is_short = self._outer_optimizer is None and outer.most_steps < _SHORT
        if is_short and self.is_chief and not self._said_short:
            _log.warning(_SHORT_PERIODS, outer.most_steps)
        self._said_short |= is_short

    def _warn_of_hidden_steps(self, model: Any) -> None:
        if self._said_hidden or not any(outer.is_in_period for outer in self._outers_with(model)):
            return
        self._said_hidden = True
        warnings.warn(
            f"Received: model '{model.name}' to save, trained since the workers have exchanged last. The file has the "
            "weights with which this period has begun. Expected: strategy.synchronize(model) before, on all processes.",
            stacklevel=2,
        )

    def _warn_of_own_loop(self, fn: Callable) -> None:
        if self._said_loop or str(getattr(fn, "__module__", "")).startswith("tfdist."):
            return
        self._said_loop = True
        warnings.warn(
            "Received: strategy.run with a function of your own, under LocalStepsStrategy, which lets workers train by "
            "themselves in Keras' training steps only: this loop exchanges the gradients of every step. Expected: "
            "model.fit or model.train_on_batch, with a train_step of your own if you need one.",
            stacklevel=2,
        )


def _training_alone(step: KerasStep, outer: OuterModel) -> Callable:
    """What this worker runs of a training step: its logs, and how many rows it had."""
    model = step.model
    rows_seen = model.distribute_strategy._keras_hooks.rows_seen

    @tf.autograph.experimental.do_not_convert
    def on_replica(data: Any, rows: Any, global_rows: Any, sample: Any = ()) -> tuple[Any, tf.Tensor]:
        if tf.is_tensor(sample) and rows_seen is not None:
            rows_seen.note("train", sample)
        fixed = static_rows(data)
        if rows is None and not fixed:
            data, rows = with_stand_in(data), count_rows(data)
        elif rows is None:
            rows = count_rows(data)
        context = tf.distribute.get_replica_context()
        with contextlib.ExitStack() as stack:
            # What a step asks of all replicas it asks of this one.
            alone = {
                "all_reduce": lambda op, value, options=None: value,
                "all_gather": lambda value, axis, options=None: value,
            }
            stack.enter_context(shadowed(context, **alone))
            for metric in metrics_of(model):
                stack.enter_context(shadowed(metric, result=marked_result(metric)))
            if fixed is None or fixed <= 1:
                # Of a last batch with fewer rows than workers, a row stands in here for none: it teaches nothing.
                outer.has_rows = rows > 0
                metrics = [v for metric in metrics_of(model) for v in metric.variables]
                stack.enter_context(undone_unless(outer.has_rows, metrics))
                for optimizer in optimizers_of(model):
                    apply = functools.partial(_apply_if, outer.has_rows, optimizer.apply)
                    stack.enter_context(shadowed(optimizer, apply=apply))
            return step.function(data), rows

    return on_replica


def _apply_if(condition: tf.Tensor, apply: Callable, grads: Any, trainable_variables: Any = None) -> None:
    def applied() -> tf.Tensor:
        apply(grads, trainable_variables)
        return tf.constant(True)

    grads = list(grads)
    tf.cond(condition, applied, lambda: tf.constant(True))


def trainable_variables(model: keras.Model) -> list[keras.Variable]:
    """The weights that a model's optimizers may update, each once."""
    optimizers = [part for one in optimizers_of(model) for part in [one, *parts_of(one)]]
    of_optimizers = [v for one in optimizers for v in getattr(one, "_trainable_variables", None) or ()]
    found = {id(v): v for v in (*model.trainable_variables, *of_optimizers)}
    return list(found.values())


class OuterModel:
    """What all workers begin a period from, and the optimizer that moves it. To be made in the strategy's scope.

    Which weights the training step updates, and what other state it writes, is seen while it is traced.

    Args:
        strategy: whose model it is.
        model: a model that is built, with its optimizers.
        optimizer: the outer optimizer.

    Attributes:
        is_shown: whether the model has the weights of the period's beginning now.
        has_rows: in the step that is traced, whether this worker has rows of the batch; `None` if it certainly has.
        origins: for each of the step's logs, the metric whose result it is, and which of its numbers, or `None`.
    """

    def __init__(self, strategy: LocalStepsStrategy, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
        self._strategy, self._optimizer, self._model = strategy, optimizer, weakref.ref(model)
        self._trainable = trainable_variables(model)
        check_float8(self._trainable)
        make = functools.partial(keras.Variable, initializer="zeros", trainable=False)
        self._base = [make(shape=v.shape, dtype=v.dtype, name="base") for v in self._trainable]
        self._steps = make(shape=(), dtype="int64", name="steps")
        self._rows = make(shape=(), dtype="int64", name="rows")
        self._longest = make(shape=(), dtype="int64", name="longest")
        optimizer.build(self._trainable)
        # Ids of what optimizers have updated, and what else was written, with what it was when the period began.
        self._updated: set[int] = set()
        self._state: dict[int, tuple[Any, tf.Variable]] = {}
        self.is_shown, self.has_rows, self.origins = False, None, []

    def is_of(self, model: keras.Model) -> bool:
        """Whether it was made for these weights of a model; another optimizer may train others."""
        return list(map(id, trainable_variables(model))) == list(map(id, self._trainable))

    def trains_one_of(self, weights: set[int]) -> bool:
        """Whether it trains one of the weights with these ids."""
        return any(id(v) in weights and self._is_trained(v) for v in self._trainable)

    def _is_trained(self, variable: keras.Variable) -> bool:
        return id(variable) in self._updated or not self._updated  # not traced yet, after a backup was restored

    @property
    def _trained(self) -> list[tuple[keras.Variable, keras.Variable]]:
        """The weights that optimizers have updated, each with its base."""
        pairs = zip(self._trainable, self._base, strict=True)
        return [(variable, base) for variable, base in pairs if self._is_trained(variable)]

    @property
    def variables(self) -> list[keras.Variable]:
        """Its own state, for backups."""
        return [self._steps, self._rows, self._longest, *self._base, *self._optimizer.variables]

    @property
    def is_in_period(self) -> bool:
        """Whether this worker has trained since the last exchange."""
        return int(_part(self._steps)) > 0

    # While a step is traced

    @contextlib.contextmanager
    def noting(self, model: keras.Model) -> Iterator[None]:
        """While a step is traced, notes which weights of the model it writes; without rows it writes none."""
        strategy = self._strategy

        def assign(variable: keras.Variable, original: Callable, value: Any) -> Any:
            self._note_state(variable)
            if self.has_rows is not None:
                value = tf.where(self.has_rows, tf.cast(value, variable.dtype), variable.value)
            return original(value)

        with contextlib.ExitStack() as stack:
            for variable in model.weights:
                noting = functools.partial(assign, variable, variable._direct_assign)
                stack.enter_context(shadowed(variable, _direct_assign=noting))
            before, strategy._traced_outer, self.has_rows = strategy._traced_outer, self, None
            try:
                yield
            finally:
                strategy._traced_outer, self.has_rows = before, None
        for variable in filter(is_mirrored, held_variables(model)):
            self._note_state(variable)

    def _note_state(self, variable: Any) -> None:
        if id(variable) not in self._state and id(variable) not in self._updated:
            with tf.init_scope(), outside_of_scope(), tf.device(self._strategy.extended.worker_devices[0]):
                self._state[id(variable)] = variable, tf.Variable(_part(variable), trainable=False)

    def note_update(self, variables: Any) -> None:
        """Notes that an optimizer updates variables."""
        known = set(map(id, self._trainable))
        for variable in variables:
            if id(variable) not in known:
                raise ValueError(
                    f"Received: a train_step that updates '{getattr(variable, 'path', variable.name)}', which is no "
                    "trainable weight of the model, and not of an optimizer that is built. Expected: layers and "
                    "optimizers as attributes of the model."
                )
            self._updated.add(id(variable))

    def note_logs(self, logs: Any) -> None:
        """Notes which of a step's logs are results of metrics."""
        self.origins = list(map(metric_of, tf.nest.flatten(logs)))

    def begin_step(self) -> None:
        """Before a training step: the first one of a period keeps the weights."""
        tf.cond(tf.equal(_part(self._steps).read_value(), 0), self._keep_base, lambda: tf.constant(True))

    def _keep_base(self) -> tf.Tensor:
        for base, variable in zip(self._base, self._trainable, strict=True):
            _part(base).assign(_part(variable).read_value())
        return tf.constant(True)

    def end_step(self, rows: tf.Tensor) -> None:
        """After a training step: the last one of a period exchanges.

        Args:
            rows: how many this worker has had in it.
        """
        _part(self._steps).assign_add(1)
        _part(self._rows).assign_add(tf.cast(rows, tf.int64))
        is_last = _part(self._steps).read_value() >= self._strategy._sync_every
        tf.cond(is_last, self._synchronize, lambda: tf.constant(True))

    # Exchanges

    def end_period(self) -> None:
        """Exchanges now, if the workers have trained since the last time; all come here after the same step."""
        if self.is_in_period:
            self._synchronize()

    @property
    def most_steps(self) -> int:
        """How many steps the longest period had."""
        return int(_part(self._longest))

    def _synchronize(self) -> tf.Tensor:
        self._strategy.extended.call_here(self._exchange)
        longest, steps = _part(self._longest), _part(self._steps)
        longest.assign(tf.maximum(longest.read_value(), steps.read_value()))
        for count in (self._steps, self._rows):
            _part(count).assign(0)
        return tf.constant(True)

    def _exchange(self) -> None:
        strategy, model = self._strategy, self._model()
        rows = tf.cast(_part(self._rows).read_value(), tf.float64)
        agreement = agreement_of(model)
        total, *requests = all_reduce_sum([rows, *([agreement.read()] if agreement else [])])
        if agreement:
            agreement.keep_sum(requests[0])
        share = tf.math.divide_no_nan(rows, total)
        trained = [(variable, _part(variable), _part(base)) for variable, base in self._trained]
        differences = [base.read_value() - weight.read_value() for _, weight, base in trained]
        means = all_reduce_sum(differences, strategy._gradient_options, share)
        self._average_state(model, share)
        with strategy._alone():
            for _, weight, base in trained:
                weight.assign(base.read_value())
            self._optimizer.apply(means, [variable for variable, *_ in trained])

    def _average_state(self, model: keras.Model, share: tf.Tensor) -> None:
        """Other state: means over the rows; of what is not a float, rank 0's value."""
        if self._updated and not model.run_eagerly:
            written = [variable for key, (variable, _) in self._state.items() if key not in self._updated]
        else:
            # Rows may decide what a step that runs eagerly writes; and after a restart, none was seen.
            trained = {id(variable) for variable, _ in self._trained}
            written = [v for v in (*model.weights, *filter(is_mirrored, held_variables(model))) if id(v) not in trained]
        averages = [
            variable
            for optimizer in optimizers_of(model)
            for part in [optimizer, *parts_of(optimizer)]
            for variable in getattr(part, "_model_variables_moving_average", None) or ()
        ]
        parts = list(map(_part, [*written, *averages]))
        floats = [v for v in parts if v.dtype.is_floating]
        others = [v for v in parts if not v.dtype.is_floating and v.dtype != tf.string]
        for variable, mean in zip(floats, all_reduce_sum([v.read_value() for v in floats], weight=share), strict=True):
            variable.assign(mean)
        is_first = int(self._strategy.extended._input_position()[1] == 0)
        values = [tf.cast(v.read_value(), tf.int64) * is_first for v in others]
        for variable, value in zip(others, all_reduce_sum(values), strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        for variable, base in self._state.values():
            base.assign(_part(variable).read_value())

    # What others see in the middle of a period

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """While the block runs, the model has the weights and state of the period's beginning, as on all workers."""
        if self.is_shown or not self.is_in_period:
            yield
            return
        pairs = [(_part(variable), _part(base)) for variable, base in [*self._trained, *self._state.values()]]
        own = [tf.identity(variable) for variable, _ in pairs]
        self.is_shown = True
        try:
            for variable, base in pairs:
                variable.assign(base.read_value())
            yield
        finally:
            for (variable, _), value in zip(pairs, own, strict=True):
                variable.assign(value)
            self.is_shown = False

    def begin_anew(self) -> None:
        """Begins another period from where this one has begun: a backup is of another number of workers."""
        if self.is_in_period:
            for variable, base in self._trained:
                _part(variable).assign(_part(base).read_value())
        for count in (self._steps, self._rows):
            _part(count).assign(0)


def _part(variable: Any) -> tf.Variable:
    """This worker's copy of a variable."""
    return parts_of_variable(variable)[0]
