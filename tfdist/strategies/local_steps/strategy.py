"""`tfdist.LocalStepsStrategy`: workers that train by themselves, and put together what they have learned now and then.

A period of a worker, with `sync_every=3`, without fragments; the others do the same on their rows of the same batches:

before its first step   base := weights
step 1, 2, 3            Keras' own train_step on this worker's rows, as in one process   (`_run`, `_alone`)
after its last one      differences := base - weights       of each worker             (`OuterModel._synchronize`)
                        difference  := their mean over the rows of the period           one exchange
                        weights     := base, then outer_optimizer.apply(difference)     the same on all workers

LocalStepsStrategy  `run` gives a training step to this process alone; everything else is data-parallel
LocalStepsHooks     what Keras sees between two periods is what all have learned, and in the middle of one the last base
OuterModel          base, counters and outer optimizer of a model
Sending             with `fragments=`, exchanges a part of the weights while the next steps are computed

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
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.arguments import check_count, check_seconds, is_new
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.variables import DIRECT
from tfdist.compat.upstream import context
from tfdist.compression import PowerSGD, TopK
from tfdist.compression.compressor import Compressor
from tfdist.inspection.model_state import metrics_of, optimizers_of, random_state, restore_random_state
from tfdist.inspection.program import described
from tfdist.memory.policy import MemoryPolicy
from tfdist.runtime.exchange import Exchange
from tfdist.runtime.rounds import Membership, join_rounds
from tfdist.steps.derived_logs import marked_result
from tfdist.steps.keras_step import KerasStep, marked_for_xla, recognise_step, shadowed, xla_compiles
from tfdist.steps.reduce import values_of
from tfdist.strategies.data_parallel.dataset import count_rows, static_rows, with_stand_in
from tfdist.strategies.data_parallel.replica_step import undone_unless
from tfdist.strategies.data_parallel.strategy import DataParallel, other_random_numbers
from tfdist.strategies.local_steps.hooks import LocalStepsHooks
from tfdist.strategies.local_steps.members import MemberHooks
from tfdist.strategies.local_steps.outer_model import OuterModel
from tfdist.strategies.multi_worker import MultiWorkerExtended, MultiWorkerMirroredStrategy, cluster_of

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
# Of a program that sets none, where workers come and go.
_SEED = 1
_DEFAULT = {"class_name": "SGD", "config": {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}}


class _LocalStepsExtended(MultiWorkerExtended):
    """The part of `LocalStepsStrategy` that `tf.distribute` calls."""

    # Whether the strategy is that of this process alone.
    is_alone = False
    # What connects the processes; `None` in a single one.
    exchange: Exchange | None = None
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

    def _carry_directly(self, exchange: Exchange) -> None:
        super()._carry_directly(exchange)
        self.exchange = exchange

    def call_here(self, fn: Callable, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Calls a function in the context of this process' replica."""
        return self._call_here(self._input_position()[1], fn, args, kwargs or {})


class LocalStepsStrategy(MultiWorkerMirroredStrategy):
    """Workers that train by themselves and rarely talk: DiLoCo, local SGD, over slow networks.

    Each worker takes `sync_every` optimizer steps on its rows of the global batches, as one process does. Then the mean
    of what they have changed is the gradient of an outer optimizer's step; all go on from its result. So the network
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
        fragments: into how many parts the weights are cut. With one, they are exchanged at once, while the workers
            wait. With k, one of them after each `sync_every / k` steps, in turn, and while the next steps are
            computed: what a worker learns of a part meanwhile is added to what it receives.
        compression: `None`, or `"bf16"` or `"fp16"`, to which the differences are cast for the exchange, or a method of
            `tfdist.compression`, which sends less and keeps the rest for the next exchange. Its `start_step` counts
            exchanges. Methods do not go together with `fragments` and `min_workers`.
        cluster: the cluster and this process' place in it; by default what `tfdist.discover()` finds. One process
            alone takes the outer steps, too.
        memory: what models keep for their backward pass, see `tfdist.memory.MemoryPolicy`.
        min_workers: lets workers come and go, as long as there are so many: one that ends is left out from the next
            exchange on, and one that is started again, or was cut off, takes part from one on. `None`: all of them
            take part in each exchange. Rank 0 has to stay: it keeps who takes part.
        patience: with `min_workers`, how long the others wait at an exchange for a worker that does not come, and how
            long a worker tries to reach rank 0, in seconds.
        start_timeout: how long to wait at the start until all processes are there, in seconds.
        peer_timeout: how long to wait for another process that has not yet come to the same exchange, in seconds.

    Raises:
        tfdist.ClusterError: as in `MultiWorkerMirroredStrategy`.
        ValueError: for a `sync_every` below 1, `fragments` that do not divide it or are more than a model's weights,
            another `compression`, two of a method of compression, `fragments` and `min_workers`, more `min_workers`
            than workers, or a process with several devices: start one for each, as `tfdist run` does with GPUs; and in
            the first step, for `TopK(momentum_correction=True)` with an outer optimizer that it does not know.

    Source: Douillard et al., "DiLoCo: distributed low-communication training of language models" (2023, arXiv
    2311.08105), "Streaming DiLoCo with overlapping communication" (2025, arXiv 2501.18512) for `fragments`; Stich,
    "Local SGD converges fast and communicates little" (2019, arXiv 1805.09767).

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
    # Where workers come and go.
    membership: Membership | None = None

    def __init__(
        self,
        sync_every: int = 50,
        *,
        outer_optimizer: Callable[[], keras.optimizers.Optimizer] | keras.optimizers.Optimizer | str | None = None,
        fragments: int = 1,
        compression: str | PowerSGD | TopK | None = None,
        cluster: ClusterConfig | None = None,
        memory: MemoryPolicy | str | None = None,
        min_workers: int | None = None,
        patience: float = 60.0,
        start_timeout: float = 300.0,
        peer_timeout: float = 1800.0,
    ):
        check_count("sync_every", sync_every)
        check_count("fragments", fragments)
        if sync_every % fragments:
            raise ValueError(
                f"Received: fragments={fragments} with sync_every={sync_every}. Expected: a number that divides it."
            )
        # Of the differences, not of gradients: the outer optimizer's.
        self._compressor = Compressor(compression) if isinstance(compression, (PowerSGD, TopK)) else None
        if self._compressor is None and compression not in (None, "bf16", "fp16"):
            raise ValueError(
                f"Received: compression={compression!r}. Expected: None, 'bf16', 'fp16', or a method such as "
                "tfdist.compression.PowerSGD(rank=4)."
            )
        if self._compressor is not None and (fragments > 1 or min_workers is not None):
            other = f"fragments={fragments}" if fragments > 1 else f"min_workers={min_workers}"
            raise ValueError(f"Received: compression={compression!r} with {other}. Expected: one of them.")
        self._sync_every, self._fragments, self._outer_optimizer = sync_every, fragments, outer_optimizer
        self._compression = compression
        self._outer_models: weakref.WeakKeyDictionary[Any, OuterModel] = weakref.WeakKeyDictionary()
        self._is_fitting = False
        self._traced_outer: OuterModel | None = None
        if min_workers is not None:
            cluster = self._join_members(cluster, min_workers, patience, start_timeout, peer_timeout)
        try:
            super().__init__(
                cluster=cluster,
                compression=None if self._compressor else compression,
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

    def _join_members(
        self, cluster: ClusterConfig | None, least: int, patience: float, start_timeout: float, peer_timeout: float
    ) -> ClusterConfig:
        """Takes part in the rounds of workers that come and go; each is a process by itself for TensorFlow."""
        check_count("min_workers", least)
        check_seconds(patience=patience, start_timeout=start_timeout, peer_timeout=peer_timeout)
        if self._fragments > 1:
            raise ValueError(f"Received: min_workers={least} with fragments={self._fragments}. Expected: one of them.")
        found = cluster_of(cluster, None, start_timeout)
        if least > found.num_workers:
            raise ValueError(f"Received: min_workers={least}, {found.num_workers} workers. Expected: at most as many.")
        if found.num_workers > 1:
            self.membership = join_rounds(found, least, patience, start_timeout, peer_timeout)
            self._hooks_class = MemberHooks
        return ClusterConfig.single_process()

    @property
    def is_chief(self) -> bool:
        return super().is_chief if self.membership is None else self.membership.rank == 0

    @property
    def workers(self) -> tuple[int, int]:
        """How many workers there are, and which of them this is."""
        if self.membership is None:
            return self.extended._input_position()
        return len(self.membership.names), self.membership.rank

    def _begin(self) -> None:
        given = _DEFAULT if self._outer_optimizer is None else self._outer_optimizer
        made = given() if callable(given) else keras.optimizers.get(given)
        if not isinstance(made, keras.optimizers.Optimizer):
            raise ValueError(f"Received: an outer_optimizer that makes {made!r}. Expected: a Keras optimizer.")
        self._make_optimizer = (
            given if callable(given) else functools.partial(type(made).from_config, made.get_config())
        )
        self._arguments |= {
            "compression": repr(self._compression),
            "sync_every": repr(self._sync_every),
            "fragments": repr(self._fragments),
            "outer_optimizer": json.dumps(described(made)),
        }
        super()._begin()
        if self.membership is not None:
            self._begin_like_rank_0(self.membership)

    def _begin_like_rank_0(self, membership: Membership) -> None:
        """Takes over rank 0's random state, and compares the strategy's arguments."""
        if context.global_seed() is None:
            # Without one, each worker would shuffle rows in an order of its own. It is the same in each job: rank 0
            # alone reads a backup, and goes on in the order that it had.
            tf.random.set_seed(_SEED)
        own = [membership.names[membership.rank], self._arguments, random_state()]
        first, arguments, state = membership.share(f"strategy {membership.number('strategy')}", own)[0]
        for name, value in arguments.items():
            if self._arguments[name] != value:
                raise ValueError(
                    f"The processes have different strategies. Received: {name}: {self._arguments[name]}; on {first}: "
                    f"{value}. Expected: the same arguments on every process."
                )
        restore_random_state(state)

    def synchronize(self, model: keras.Model) -> None:
        """Ends a period of a model now: the workers exchange what they have learned since the last exchange.

        `fit` does so at the end of each epoch, and `evaluate` and `predict` outside of a fit do. A loop around
        `train_on_batch` calls it before it saves the model. All processes call it at the same point.

        Args:
            model: a model of this strategy; nothing happens if it was not trained since.
        """
        for outer in self._outers_with(model.weights):
            outer.end_period()

    def _outers_with(self, variables: Iterable[Any]) -> list[OuterModel]:
        """What trains one of these weights, for a model or one of which it is a part, in the order of their making."""
        if not self._outer_models:
            return []
        weights = set(map(id, variables))
        return [outer for outer in list(self._outer_models.values()) if outer.trains_one_of(weights)]

    def _outer_of(self, model: Any) -> OuterModel:
        """What is kept of a model beside its weights; where it has to be made, all processes come here together."""
        outer = self._outer_models.get(model)
        if outer is None or not outer.is_of(model):
            if not model.built:
                raise ValueError(
                    f"Received: a training step of model '{model.name}', which has no weights yet, under "
                    "LocalStepsStrategy. Expected: model.build(...) before, or model.fit."
                )
            if self.is_chief and is_new(self, "another training"):
                _log.warning(_ANOTHER_TRAINING, self._sync_every)
            with tf.init_scope():
                if outer is not None:
                    outer.end_period()
                with self.scope():
                    outer = self._outer_models[model] = OuterModel(self, model, self._make_optimizer())
        return outer

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """While the block runs, the strategy is that of this process, which nothing is exchanged with."""
        return shadowed(self.extended, is_alone=True)

    def _run(self, fn: Callable, args: tuple, kwargs: dict | None, options: Any) -> Any:
        """Gives a training step of Keras this worker's rows only."""
        step = recognise_step(fn, args, kwargs)
        if step is None or step.kind != "train":
            if step is None:
                self._warn_of_own_loop(fn)
            return super()._run(fn, args, kwargs, options)
        outer, batch = self._outer_of(step.model), self._cut(step, *args)
        if batch.rows is None and self._fragments > 1 and step.model.steps_per_execution > 1:
            raise ValueError(
                f"Received: fragments={self._fragments} and steps_per_execution={step.model.steps_per_execution}, with "
                "data that each process has sharded for itself (AutoShardPolicy.OFF or FILE, "
                "distribute_datasets_from_function). Expected: one of them, or a dataset of global batches: else the "
                "workers ask each other for data while a part of the weights is sent, in any order."
            )
        if self.membership is not None:
            batch = self._keras_hooks.own_rows(batch)
        parts = [values_of(one)[0] for one in tf.nest.flatten(batch)]
        data = [x for x in tf.nest.flatten(parts, expand_composites=True) if tf.is_tensor(x)]
        step.is_compiled = xla_compiles(step.model, batch)
        # Counters do not depend on the data: without this, some ranks would count the step that finds no data.
        with tf.control_dependencies(data):
            outer.begin_step()
            with (
                self._alone(),
                outer.noting(step.model),
                other_random_numbers(self.workers[1]),
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
        if is_short and self.is_chief and is_new(self, "short periods"):
            _log.warning(_SHORT_PERIODS, outer.most_steps)

    def _warn_of_hidden_steps(self, model: Any) -> None:
        is_hidden = any(outer.is_in_period for outer in self._outers_with(model.variables))
        if not is_hidden or not is_new(self, "hidden steps"):
            return
        warnings.warn(
            f"Received: model '{getattr(model, 'name', 'of an archive')}' to save, trained since the workers have "
            "exchanged last. The file has the weights with which this period has begun. Expected: "
            "strategy.synchronize(model) before, on all processes.",
            stacklevel=2,
        )

    def _warn_of_own_loop(self, fn: Callable) -> None:
        if str(getattr(fn, "__module__", "")).startswith("tfdist.") or not is_new(self, "own loop"):
            return
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
