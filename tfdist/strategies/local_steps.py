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
from tfdist.inspection.model_state import metrics_of, optimizers_of, parts_of, parts_of_variable
from tfdist.memory.policy import MemoryPolicy
from tfdist.steps.gradients import all_reduce_sum
from tfdist.steps.keras_step import KerasStep, marked_for_xla, recognise_step, shadowed, xla_compiles
from tfdist.steps.reduce import values_of
from tfdist.strategies.data_parallel.dataset import count_rows, static_rows, with_stand_in
from tfdist.strategies.data_parallel.replica_step import undone_unless
from tfdist.strategies.data_parallel.strategy import DataParallel, DataParallelHooks, other_random_numbers
from tfdist.strategies.multi_worker import MultiWorkerExtended, MultiWorkerMirroredStrategy

_log = logging.getLogger("tfdist")
_ANOTHER_TRAINING = (
    "LocalStepsStrategy(sync_every=%d): each worker takes %d optimizer steps by itself before they exchange what they "
    "have learned. That is another training than that of one process: compare the validation loss with that of "
    "MultiWorkerMirroredStrategy before you rely on it."
)
_MADE_TOO_EARLY = (
    "Received: outer_optimizer=%r, an optimizer, whose variables were made before the strategy could connect the "
    "processes. Expected: a function that makes it, such as `lambda: keras.optimizers.SGD(0.7, momentum=0.9)`."
)
_DEFAULT = {"class_name": "SGD", "config": {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}}
_SHOWS = ("evaluate", "predict", "test_on_batch", "predict_on_batch")


class _LocalStepsExtended(MultiWorkerExtended):
    """The part of `LocalStepsStrategy` that `tf.distribute` calls."""

    # Whether the strategy is that of this process alone.
    is_alone = False

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1 if self.is_alone else super()._num_replicas_in_sync

    def _by_direct(self, name: str) -> Any:
        return None if self.is_alone else super()._by_direct(name)

    def _get_cross_device_ops(self, value: Any) -> Any:
        return tf.distribute.ReductionToOneDevice() if self.is_alone else super()._get_cross_device_ops(value)

    def _replica_ctx_all_gather(self, value: Any, axis: int, options: Any) -> Any:
        return value if self.is_alone else super()._replica_ctx_all_gather(value, axis, options)

    def _call_for_each_replica(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        # Under the number that it has among all: random numbers go by it.
        return self.call_here(fn, args, kwargs) if self.is_alone else super()._call_for_each_replica(fn, args, kwargs)

    def call_here(self, fn: Callable, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Calls a function in the context of this process' replica."""
        return self._call_here(self._input_position()[1], fn, args, kwargs or {})


class LocalStepsHooks(DataParallelHooks):
    """Models whose weights differ between the processes in the middle of a period."""

    keeps_own = True

    def make_function(self, make: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        if args[:1] == (model.train_step,):
            self._strategy._make_outer(model)
        return super().make_function(make, model, *args, **kwargs)

    def read_metrics(self, read: Callable, model: Any, logs: Any) -> Any:
        outer = self._strategy._outer_of(model)
        if outer is not None and not outer.is_shown:
            outer.end_period()
        found = super().read_metrics(read, model, logs)
        # Keras has read the metrics of all processes; what else a step has logged is of its own rows.
        return found if self.peers is None or found is not logs else self._mean_of_logs(logs)

    def _mean_of_logs(self, logs: Any) -> Any:
        flat = [np.asarray(one, "float64") for one in tf.nest.flatten(logs)]
        everyone = self.peers.gather("logs", [one.tolist() for one in flat], "finish the epoch")
        means = [
            np.mean(values, 0) if np.ptp(values) else np.asarray(values[0]) for values in zip(*everyone, strict=True)
        ]
        return tf.nest.pack_sequence_as(logs, [float(one) if one.ndim == 0 else one for one in means])

    def call(self, method: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        with self._shown(model) if method.__name__ in _SHOWS else contextlib.nullcontext():
            return super().call(method, model, *args, **kwargs)

    def save(self, write: Callable, model: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        with self._shown(model):
            return super().save(write, model, path, *args, **kwargs)

    @contextlib.contextmanager
    def collected(self, model: Any) -> Iterator[None]:
        with super().collected(model), self._shown(model):
            yield

    def _shown(self, model: Any) -> contextlib.AbstractContextManager:
        outer = self._strategy._outer_of(model)
        return contextlib.nullcontext() if outer is None else outer.shown()

    def more_state(self, model: Any) -> list[keras.Variable]:
        outer = self._strategy._outer_of(model)
        return [] if outer is None else outer.variables

    def restored_of_others(self, model: Any) -> None:
        self._strategy._outer_of(model).begin_anew()


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
        self._said_local = self._said_loop = False
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
        given = self._outer_optimizer
        made = given() if callable(given) else keras.optimizers.get(_DEFAULT if given is None else given)
        config = json.dumps([type(made).__name__, made.get_config()], default=str, sort_keys=True)
        self._make_optimizer = functools.partial(type(made).from_config, made.get_config())
        self._arguments |= {"sync_every": repr(self._sync_every), "outer_optimizer": config}
        super()._begin()

    def _outer_of(self, model: Any) -> OuterModel | None:
        """What is kept of a model beside its weights; `None` before its training function was made."""
        return self._outer_models.get(model)

    def _make_outer(self, model: Any) -> None:
        """Makes what is kept of a model beside its weights, unless it is there; all processes come here together."""
        if not self._said_local and self.is_chief:
            _log.warning(_ANOTHER_TRAINING, self._sync_every, self._sync_every)
        self._said_local = True
        outer = self._outer_models.get(model)
        if outer is None or not outer.is_of(model):
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
        step.is_compiled = xla_compiles(step.model, batch)
        outer.begin_step()
        with (
            self._alone(),
            outer.noting_state(step.model),
            other_random_numbers(self.extended._input_position()[1]),
            marked_for_xla(step.is_compiled),
        ):
            # Past what the data-parallel strategies do to a step.
            logs, rows = super(DataParallel, self).run(_training_alone(step), tuple(batch), None, options)
        outer.end_step(values_of(rows)[0])
        return self._logs_for_keras(logs)

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


def _training_alone(step: KerasStep) -> Callable:
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
        if fixed is not None and fixed > 1:
            return step.function(data), rows
        # Of a last batch with fewer rows than workers, a row stands in here for none: nothing is learned from it.
        has_rows, trained = rows > 0, set(map(id, trained_variables(model)))
        state = [v for v in model.weights if id(v) not in trained]
        with contextlib.ExitStack() as stack:
            metrics = [v for metric in metrics_of(model) for v in metric.variables]
            stack.enter_context(undone_unless(has_rows, [*metrics, *state]))
            for optimizer in optimizers_of(model):
                apply = functools.partial(_apply_if, has_rows, optimizer.apply)
                stack.enter_context(shadowed(optimizer, apply=apply))
            return step.function(data), rows

    return on_replica


def _apply_if(condition: tf.Tensor, apply: Callable, grads: Any, trainable_variables: Any = None) -> None:
    def applied() -> tf.Tensor:
        apply(grads, trainable_variables)
        return tf.constant(True)

    grads = list(grads)
    tf.cond(condition, applied, lambda: tf.constant(True))


def trained_variables(model: keras.Model) -> list[keras.Variable]:
    """The weights that a model's optimizers update, each once."""
    optimizers = [part for one in optimizers_of(model) for part in [one, *parts_of(one)]]
    of_optimizers = [v for one in optimizers for v in getattr(one, "_trainable_variables", None) or ()]
    found = {id(v): v for v in (*model.trainable_variables, *of_optimizers)}
    return list(found.values())


class OuterModel:
    """What all workers begin a period from, and the optimizer that moves it. To be made in the strategy's scope.

    Args:
        strategy: whose model it is.
        model: a model that is built, with its optimizers.
        optimizer: the outer optimizer.

    Attributes:
        is_shown: whether the model has the weights of the period's beginning now.
    """

    def __init__(self, strategy: LocalStepsStrategy, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
        self._strategy, self._optimizer = strategy, optimizer
        self._trained = trained_variables(model)
        self._agreement = strategy._keras_hooks.agreement
        self._model = weakref.ref(model)
        # Other state that the training step writes, by id.
        self._state: dict[int, keras.Variable] = {}
        make = functools.partial(keras.Variable, initializer="zeros", trainable=False)
        self._base = [make(shape=v.shape, dtype=v.dtype, name="base") for v in self._trained]
        self._steps = make(shape=(), dtype="int64", name="steps")
        self._rows = make(shape=(), dtype="int64", name="rows")
        optimizer.build(self._trained)
        self.is_shown = False

    def is_of(self, model: keras.Model) -> bool:
        """Whether it was made for these weights of a model; another optimizer may train others."""
        return list(map(id, trained_variables(model))) == list(map(id, self._trained))

    @property
    def variables(self) -> list[keras.Variable]:
        """Its own state, for backups."""
        return [self._steps, self._rows, *self._base, *self._optimizer.variables]

    @contextlib.contextmanager
    def noting_state(self, model: keras.Model) -> Iterator[None]:
        """While a step is traced, notes which other weights of the model it writes."""
        trained = set(map(id, self._trained))

        def noting(variable: keras.Variable, assign: Callable, value: Any) -> Any:
            self._state[id(variable)] = variable
            return assign(value)

        with contextlib.ExitStack() as stack:
            for variable in model.weights:
                if id(variable) not in trained:
                    assign = functools.partial(noting, variable, variable._direct_assign)
                    stack.enter_context(shadowed(variable, _direct_assign=assign))
            yield

    def begin_step(self) -> None:
        """Before a training step: the first one of a period keeps the weights."""
        tf.cond(tf.equal(_part(self._steps).read_value(), 0), self._keep_base, lambda: tf.constant(True))

    def _keep_base(self) -> tf.Tensor:
        for base, variable in zip(self._base, self._trained, strict=True):
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

    def end_period(self) -> None:
        """Exchanges now, at the end of an epoch, if this worker has trained since the last time."""
        if int(_part(self._steps)):
            self._synchronize()

    def _synchronize(self) -> tf.Tensor:
        """All workers come here after the same step."""
        self._strategy.extended.call_here(self._on_replica)
        for count in (self._steps, self._rows):
            _part(count).assign(0)
        return tf.constant(True)

    def _on_replica(self) -> None:
        options = self._strategy._gradient_options
        weights, bases = [*map(_part, self._trained)], [*map(_part, self._base)]
        rows = tf.cast(_part(self._rows).read_value(), tf.float64)
        agreement = self._agreement
        if agreement is not None and self._model() not in agreement.models:
            agreement = None
        total, *requests = all_reduce_sum([rows, *([agreement.read()] if agreement else [])])
        if agreement:
            agreement.keep_sum(requests[0])
        share = tf.math.divide_no_nan(rows, total)
        differences = [base.read_value() - weight.read_value() for base, weight in zip(bases, weights, strict=True)]
        means = all_reduce_sum(differences, options, share)
        self._average_state(share)
        with self._strategy._alone():
            for weight, base in zip(weights, bases, strict=True):
                weight.assign(base.read_value())
            self._optimizer.apply(means, self._trained)

    def _average_state(self, share: tf.Tensor) -> None:
        """Layers' other state: means over the rows; of what is not a float, rank 0's value."""
        model = self._model()
        written = [_part(v) for v in model.weights if id(v) in self._state]
        floats = [v for v in written if v.dtype.is_floating]
        others = [v for v in written if not v.dtype.is_floating]
        for variable, mean in zip(floats, all_reduce_sum([v.read_value() for v in floats], weight=share), strict=True):
            variable.assign(mean)
        is_first = int(self._strategy.extended._input_position()[1] == 0)
        values = [tf.cast(v.read_value(), tf.int64) * is_first for v in others]
        for variable, value in zip(others, all_reduce_sum(values), strict=True):
            variable.assign(tf.cast(value, variable.dtype))

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """While the block runs, the model has the weights of the period's beginning, which all workers have."""
        if self.is_shown or not int(_part(self._steps)):
            yield
            return
        own = [tf.identity(_part(v)) for v in self._trained]
        self.is_shown = True
        try:
            self._show(map(_part, self._base))
            yield
        finally:
            self._show(own)
            self.is_shown = False

    def _show(self, values: Any) -> None:
        for variable, value in zip(self._trained, values, strict=True):
            _part(variable).assign(tf.convert_to_tensor(value))

    def begin_anew(self) -> None:
        """Begins another period from where this one has begun: a backup is of another number of workers."""
        if int(_part(self._steps)):
            self._show(map(_part, self._base))
        for count in (self._steps, self._rows):
            _part(count).assign(0)


def _part(variable: Any) -> tf.Variable:
    """This worker's copy of a variable."""
    return parts_of_variable(variable)[0]
