"""A Keras step on a replica: gradients, logs and outputs are those of the global batch.

Patches change what the classes of Keras do in a step (steps/in_step.py). A user's own optimizer, layer, loss or metric
may override these methods, and what it does there has to see the values of the global batch, too. So some methods are
shadowed on instances while a step is traced. From top to bottom:

make_replica_function  what each replica runs: the step on its rows, the exchange of state and logs; what layers keep
                       in attributes is of each replica (steps/attributes.py)
shadowed_for_step      the shadows of a train or test step, in this order:
  optimizer.scale_loss   divides the loss by the number of replicas, and a vector by the share of rows
  optimizer.apply        receives the gradient of the global batch: weighted by the replicas' rows and reduced once,
                         before loss-scale test, clipping, accumulation and update, so that all of these act on the
                         same values on every replica, of the same variables (common_gradients.py)
  optimizer.check_finite tests the sum of gradients in float16 as one process tests its own
  Layer._losses          is another list for each replica
  BatchNormalization     uses the statistics of the global batch (batch_norm.py)
  Loss.call              notes what it is given, for a trial (row_trial.py); so does Metric.update_state
  Variable.assign        does what the variable's `aggregation` says (state.py)
  Metric.result          marks what it returns, so that logs that are metrics' results are told from others
all_reduce_logs        logs
MetricTotals           metrics at the end of an epoch
_predict               outputs of `predict`

Logs. Keras reads the metrics once more at the end of an epoch, from all replicas, if the step has logged exactly those
of `model.metrics`, by their names. Then a step's own logs are for the progress bar, and cost nothing. All others become
global in the step: metrics (under another name, of another place, nested) by the sums of their states, other values by
their means over the rows.

Outputs of `predict`. Weights and constants every replica has, so the first one's counts; means and sums over rows are
those of the batch; what has a row for each row is put one below the other.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.arguments import is_new, was_said
from tfdist.compat.keras import hooks_of
from tfdist.compat.upstream import SyncOnReadVariable, trackable
from tfdist.compat.upstream import values as distributed_values
from tfdist.inspection.model_state import (
    is_kept_per_replica,
    is_sharded,
    optimizers_of,
    parts_of,
    parts_of_variable,
)
from tfdist.optimizers.in_parts import working_in_parts
from tfdist.optimizers.sharded_optimizer import ShardedOptimizer, given_rows, scatter
from tfdist.runtime.agreement import Agreement
from tfdist.steps.attributes import of_each_replica, reached_from
from tfdist.steps.derived_logs import DerivedLogs, marked_result, metric_of, results_before
from tfdist.steps.gradients import GradientOptions, added_by_number, all_reduce_sum, check_finite, numbered, scale
from tfdist.steps.in_step import gather_with_weights, of_global_batch
from tfdist.steps.keras_step import (
    KerasStep,
    current_step,
    global_replica,
    local_replica,
    shadowed,
    specification,
)
from tfdist.steps.local_values import Dependence, LocalValues, draws
from tfdist.steps.shards import other_readers, to_apply
from tfdist.strategies.data_parallel import state as layer_state
from tfdist.strategies.data_parallel.batch_norm import global_moments
from tfdist.strategies.data_parallel.common_gradients import agree
from tfdist.strategies.data_parallel.dataset import count_rows, rows_if, static_rows, with_stand_in
from tfdist.strategies.data_parallel.state import ReplicaState, devices_of_others
from tfdist.strategies.validation import check_float8

# What collectives can add up; anything else is sent as int32.
_NUMBERS = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)
_OUTPUTS = "outputs"
# Beginnings of the types of operations whose results have as many rows as their values say.
_SIZES = ("Where", "Unique", "NonMaxSuppression", "DynamicPartition", "ListDiff", "SparseToSparseSet")


def make_replica_function(step: KerasStep) -> Callable:
    """What each replica runs of a step: on its rows of the batch."""
    run = _predict if step.kind == "predict" else _train_or_test

    @tf.autograph.experimental.do_not_convert
    def on_replica(data: Any, rows: Any, global_rows: Any, sample: Any = ()) -> Any:
        step.is_of_all = global_rows is not None
        if tf.is_tensor(sample) and local_replica() == 0 and step.kind != "predict":
            hooks_of(step.model.distribute_strategy).rows_seen.note(step.kind, sample)
        if rows is None and not static_rows(data):
            data, rows = with_stand_in(data), count_rows(data)
        with of_each_replica(step):
            return run(step, data, rows, global_rows)

    return on_replica


def _train_or_test(step: KerasStep, data: Any, rows: Any, global_rows: Any) -> Any:
    """The logs of a train or test step: global, unless Keras replaces them at the end of the epoch."""
    # Keras' counters do not depend on the data: without this, some ranks would count the step that finds no data.
    with tf.control_dependencies([x for x in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(x)]):
        step.note_batch(data)
        step.begin_replica(static_rows(data), count_rows(data) if rows is None else rows, global_rows)
        state = step.here.state = ReplicaState(step, data)
        context = tf.distribute.get_replica_context()
        with (
            undone_unless(step.has_rows, [v for metric in _metrics_of(step.model) for v in metric.variables]),
            shadowed(context, all_gather=gather_with_weights(step, context.all_gather)),
        ):
            logs = step.function(data)
        state.synchronize()
        logs = logs if are_read_by_keras(step, logs) else all_reduce_logs(step, logs)
        _check_gradients_unread()
        return logs


@contextlib.contextmanager
def undone_unless(has_rows: tf.Tensor | None, variables: Iterable[keras.Variable]) -> Iterator[None]:
    """Undoes the block's changes of this replica's copies of `variables` where `has_rows` is given and false."""
    if has_rows is None:
        yield
        return
    variables = [v.value for v in variables]
    before = [tf.identity(v) for v in variables]
    yield

    def undo() -> tf.Tensor:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        return tf.constant(True)

    tf.cond(has_rows, lambda: tf.constant(True), undo)


@contextlib.contextmanager
def shadowed_for_step(step: KerasStep, *, options: GradientOptions, global_batch_norm: bool) -> Iterator[None]:
    """Applies all shadows of a train or test step for as long as the block runs."""
    with contextlib.ExitStack() as stack:
        if step.kind == "train":
            for optimizer in optimizers_of(step.model):
                _shadow_optimizer(stack, step, optimizer, options)
        # Those of other objects, too, which Keras does not list.
        for layer in [one for one in reached_from(step.model) if isinstance(one, keras.Layer)]:
            # Replicas take turns in the middle of a forward pass, wherever they exchange values.
            stack.enter_context(shadowed(layer, _losses=_LossesOfReplicas()))
            if isinstance(layer, keras.layers.BatchNormalization) and (global_batch_norm or layer.synchronized):
                stack.enter_context(shadowed(layer, _moments=global_moments(layer)))
        for loss in losses_of(step.model):
            stack.enter_context(shadowed(loss, call=noting_arguments(step, loss, loss.call)))
        stack.enter_context(layer_state.assignments_aggregated(step))
        for metric in _metrics_of(step.model):
            noting = noting_arguments(step, metric, metric.update_state)
            stack.enter_context(shadowed(metric, result=marked_result(metric), update_state=noting))
        yield


def _metrics_of(model: keras.Model) -> list[keras.Metric]:
    return [one for one in reached_from(model) if isinstance(one, keras.Metric)]


def _shadow_optimizer(stack: contextlib.ExitStack, step: KerasStep, optimizer: Any, options: GradientOptions) -> None:
    original_scale, original_apply = optimizer.scale_loss, optimizer.apply
    settings = None if options.compressor is None else stack.enter_context(options.compressor.prepared(optimizer))
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        check = optimizer.check_finite
        shadow = shadowed(optimizer, check_finite=lambda grads: check_finite(check, step.here.listing.halves, grads))
        stack.enter_context(shadow)
    if options.compressor is None and (sharded := _sharded_part(optimizer)) is not None:
        stack.enter_context(given_rows(optimizer, sharded))

    def scale_loss(loss: tf.Tensor) -> tf.Tensor:
        # As many rows as one process has, on average: loss scaling sees gradients of the same size. The weight itself
        # comes later. A custom step need not call this, and back-propagation must be the same in both cases.
        loss = step.as_mean(loss)
        # A tensor: the gradients of the loss are made of it.
        divisor = tf.constant(step.replicas, loss.dtype)
        step.here.scaled.setdefault(id(optimizer), _ScaledLosses()).note(divisor)
        return original_scale(_with_gradient_divided(loss, divisor))

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        grads, losses = list(grads), step.here.scaled.get(id(optimizer))
        _warn_of_results(step, grads)
        variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        scaled = _are_scaled_by_others(step, grads) if losses is None else losses.are_of(step, optimizer, grads)
        grads = [_part_to_apply(optimizer, g, v) if is_sharded(v) else g for g, v in zip(grads, variables, strict=True)]
        grads, applied, averaged = agree(step, optimizer, grads, variables, step.here.state.take_averaged())
        reduced = _all_reduce_gradients(step, grads, applied, averaged, scaled, options, optimizer, settings)
        step.here.state.note_updates(applied)
        with _updating(step, optimizer):
            original_apply(reduced, trainable_variables if applied is variables else applied)
        if losses is not None:
            losses.note_apply()
        step.here.state.skip()

    stack.enter_context(shadowed(optimizer, scale_loss=scale_loss, apply=apply))
    if any(map(is_sharded, step.model.variables)):
        stack.enter_context(working_in_parts(optimizer))
    step.optimizers |= {id(part) for part in [optimizer, *parts_of(optimizer)]}
    # All replicas count alike, and need not meet for it, which they cannot do in a branch.
    for variable in optimizer.variables:
        if getattr(variable, "aggregation", "") == "only_first_replica" and layer_state.is_mirrored(variable):
            assign = functools.partial(layer_state.assign_part, step, variable)
            stack.enter_context(shadowed(variable, _direct_assign=assign))


def _with_gradient_divided(loss: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
    """The loss as it is, which a step may log; its gradient is divided."""
    return tf.custom_gradient(lambda one: (tf.identity(one), lambda upstream: upstream / divisor))(loss)


def _warn_of_results(step: KerasStep, grads: list) -> None:
    """Warns once of a metric from whose result a traced step computes gradients: it is that of a replica's rows."""
    if not step.here.reads_results or local_replica() or tf.executing_eagerly():
        return
    found, _ = results_before(_tensors(grads))
    for metric in {id(metric): metric for metric, _ in found.values()}.values():
        if is_new(metric, "gradients"):
            warnings.warn(
                f"Received: a train_step of model '{step.model.name}' that computes gradients from the result of "
                f"metric '{metric.name}'. Each replica has the result of its own rows there, so that training differs "
                "from one process. Expected: a variable of the model that keeps the number, add_weight(trainable=False)"
                ", which is averaged over the replicas.",
                stacklevel=2,
            )


@contextlib.contextmanager
def _updating(step: KerasStep, optimizer: Any) -> Iterator[None]:
    """While an optimizer updates weights: the random numbers that it draws are the same on all replicas.

    Raises:
        NotImplementedError: traced, if it draws others.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    count = len(graph.get_operations()) if graph else 0
    with shadowed(step.here, is_updating=True):
        yield
    made = graph.get_operations()[count:] if graph else []
    if any(draws(one) or one.type == "RngReadAndSkip" for one in made):
        raise NotImplementedError(
            f"Received: optimizer '{optimizer.name}' ({type(optimizer).__name__}), which draws random numbers with "
            "tf.random when it updates weights. Each replica would draw others, and train a model of its own. "
            "Expected: functions of keras.random, with seed=self.seeds, a keras.random.SeedGenerator made in the "
            "optimizer's __init__: all replicas draw the same from it; or tf.random.stateless_*."
        )


@dataclasses.dataclass
class _ScaledLosses:
    """The losses of a step that an optimizer has scaled on this replica, and whose gradients it is given.

    Attributes:
        divisors: what each was divided by.
        is_new: whether one was scaled since the optimizer has applied gradients.
        applied: run eagerly, a number: tensors that were made before that have smaller ones.
    """

    divisors: list[tf.Tensor] = dataclasses.field(default_factory=list)
    is_new: bool = False
    applied: int = 0

    def note(self, divisor: tf.Tensor) -> None:
        self.divisors.append(divisor)
        self.is_new = True

    def note_apply(self) -> None:
        self.is_new = False
        if tf.executing_eagerly():
            self.applied = tf.identity(0.0)._id

    def are_of(self, step: KerasStep, optimizer: Any, grads: Sequence[Any]) -> bool:
        """Whether gradients are those of a scaled loss; of gradients that do not tell, yes.

        Raises:
            NotImplementedError: run eagerly, if the optimizer applies more of them, that were computed since.
        """
        if self.is_new:
            return True
        values = _tensors(grads)
        if tf.executing_eagerly():
            if all(one._id < self.applied for one in values):
                return True
            raise NotImplementedError(
                f"Received: a train_step of model '{step.model.name}', run eagerly, in which optimizer "
                f"'{optimizer.name}' applies gradients once more after one optimizer.scale_loss. Nothing tells whether "
                "their loss was scaled, too. Expected: optimizer.scale_loss of the loss of each optimizer.apply; all "
                "gradients of a scaled loss, computed before the first of them are applied; or run_eagerly=False."
            )
        if any(one.graph is not self.divisors[0].graph for one in (*values, *self.divisors)):
            return True
        is_behind, is_computed = _are_behind(self.divisors, values)
        # What was accumulated in variables, say, is not computed by a tape here.
        return is_behind or not is_computed


def _are_scaled_by_others(step: KerasStep, grads: Sequence[Any]) -> bool:
    """Whether traced gradients are those of a loss that another optimizer has scaled: one loss for two of them."""
    divisors = [one for losses in step.here.scaled.values() for one in losses.divisors]
    values = [] if tf.executing_eagerly() else _tensors(grads)
    if not divisors or any(one.graph is not divisors[0].graph for one in (*values, *divisors)):
        return False
    return _are_behind(divisors, values)[0]


def _are_behind(divisors: Sequence[tf.Tensor], values: Sequence[tf.Tensor]) -> tuple[bool, bool]:
    """Whether traced values are computed from one of the divisors; if not, whether by a tape."""
    names = {one.op.name for one in divisors}
    waiting, seen, is_computed = [one.op for one in values], set(), False
    while waiting:
        op = waiting.pop()
        if op.name in names:
            return True, True
        if op.name not in seen:
            seen.add(op.name)
            is_computed |= "gradient_tape/" in op.name
            waiting += [one.op for one in op.inputs]
    return False, is_computed


def _tensors(grads: Sequence[Any]) -> list[tf.Tensor]:
    values = [one.values if isinstance(one, tf.IndexedSlices) else one for one in grads]
    return [one for one in values if isinstance(one, tf.Tensor)]


def _all_reduce_gradients(
    step: KerasStep,
    grads: list,
    variables: list,
    averaged: list,
    scaled: bool,
    options: GradientOptions,
    optimizer: Any,
    settings: Any,
) -> list:
    """Gradients of the global batch's loss, on every replica; averages the state that the step has updated, too.

    `scaled` tells that `scale_loss` has divided the loss by the number of replicas.
    """
    check_float8(variables)
    # Those of sharded weights are sums over the replicas already, of a loss that was divided by their number.
    present = [i for i, g in enumerate(grads) if g is not None and not is_sharded(variables[i])]
    sharded = _sharded_part(optimizer)  # which adds up all slices of a row
    common = {i: grads[i].indices.dtype for i in present if sharded is None and i in step.here.listing.common}
    values = [numbered(grads[i], step.here.state.is_of_no_row) if i in common else grads[i] for i in present]
    state_values = layer_state.values_of(averaged)
    # All travel with one weight. If the loss has the number of replicas in it, the state needs it as well.
    weight = step.relative_weight if scaled else step.weight
    if scaled:
        state_values = [value / step.replicas for value in state_values]
    agreement = agreement_of(step.model)
    if agreement is not None:
        state_values.append(agreement.read())
    if options.compressor is not None:
        weights = [variables[i] for i in present]
        # What it does in branches of its own depends on the number of the step.
        before = step.here.agreed
        step.here.agreed = True if before is None else before
        sums = options.compressor.all_reduce_sum(
            optimizer, values, weights, state_values, weight, options.bucket_bytes, settings
        )
        step.here.agreed = before
    elif sharded is not None:
        own = scatter(sharded, values, [variables[i] for i in present], weight, options)
        sums = own + all_reduce_sum(state_values, weight=weight)
    elif options.dtype is None:
        sums = all_reduce_sum([*values, *state_values], options, weight=weight)
    else:
        # The state is kept from step to step: it must not be rounded to a narrower dtype.
        sums = all_reduce_sum(values, options, weight=weight) + all_reduce_sum(state_values, weight=weight)
    if agreement is not None:
        total = sums.pop()
        if local_replica() == 0:
            agreement.keep_sum(total)
    layer_state.assign(averaged, sums[len(values) :])
    whole = dict(zip(present, sums[: len(values)], strict=True))
    whole |= {i: added_by_number(whole[i], dtype) for i, dtype in common.items()}
    return [
        whole[i] if i in whole else gradient if gradient is None or scaled else _divided(gradient, step.replicas)
        for i, gradient in enumerate(grads)
    ]


def _divided(gradient: Any, number: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / number, gradient.indices, gradient.dense_shape)
    return gradient / number


def _sharded_part(optimizer: Any) -> ShardedOptimizer | None:
    """The `ShardedOptimizer` that an optimizer is, or, with loss scaling, the one that it hands all gradients to."""
    inner = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    return inner if isinstance(inner, ShardedOptimizer) else None


def _part_to_apply(optimizer: Any, gradient: Any, variable: keras.Variable) -> Any:
    """What an optimizer is given of the gradient of a sharded weight."""
    if id(gradient) in current_step().here.of_slices:
        _warn_of_squares(optimizer, variable)
    part = None if gradient is None else to_apply(gradient, variable.value)
    if gradient is not None and part is None:
        raise NotImplementedError(
            f"Received: a gradient of weight '{variable.path}' that a train_step has changed, under "
            "FullyShardedStrategy, where each replica has a part of it. Expected: optimizer.apply with what "
            "tape.gradient has returned; clipnorm=, global_clipnorm=, clipvalue= and gradient_accumulation_steps= of "
            "the optimizer clip and accumulate it."
        )
    return part


def _warn_of_squares(optimizer: Any, variable: keras.Variable) -> None:
    """Warns once of an optimizer that squares gradients of the rows of an embedding, which are added up before."""
    strategy, adding = tf.distribute.get_strategy(), (keras.optimizers.SGD, keras.optimizers.Lion)
    inner = next((one for one in parts_of(optimizer) or [optimizer] if not isinstance(one, adding)), None)
    if inner is None or not is_new(strategy, "squares"):
        return
    warnings.warn(
        f"Received: optimizer {type(inner).__name__} for weight '{variable.path}' of an embedding, under "
        "FullyShardedStrategy. Where a batch uses a row several times, the gradients of the row are added up, and the "
        "optimizer squares the sum, as its method says. In one process, Keras squares each gradient by itself, so that "
        "training differs. Expected: nothing, unless both have to be equal; then use SGD, or "
        "tfdist.MultiWorkerMirroredStrategy, which does as Keras does.",
        stacklevel=2,
    )


def _check_gradients_unread() -> None:
    """Refuses a `train_step` that reads gradients of sharded weights, such as their norm: it would be that of parts."""
    if names := other_readers():
        raise NotImplementedError(
            f"Received: a train_step that reads a gradient ({names[0]}), under FullyShardedStrategy, where each "
            "replica has a part of it. Expected: gradients that only optimizer.apply reads; "
            "gradient_accumulation_steps= of the optimizer accumulates them."
        )


def agreement_of(model: keras.Model) -> Agreement | None:
    """Whose requests travel with what the steps of a model exchange; `None` if nobody requests anything."""
    agreement = hooks_of(model.distribute_strategy).agreement
    return agreement if agreement is not None and model in agreement.models else None


class _LossesOfReplicas(collections.UserList):
    """What a layer adds to the loss of the replica that asks."""

    def __init__(self) -> None:
        self._of: dict[int, list] = {}

    @property
    def data(self) -> list:
        return self._of.setdefault(local_replica(), [])

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]  # Keras copies it by `[:]`, for which UserList would make another one of this class


def losses_of(model: keras.Model) -> list[keras.losses.Loss]:
    """The losses of `compile`."""
    listed = getattr(getattr(model, "_compile_loss", None), "_flat_losses", None) or []
    return [loss for _, loss, *_ in listed if isinstance(loss, keras.losses.Loss)]


def noting_arguments(step: KerasStep, owner: Any, call: Callable) -> Callable:
    """A method of a loss or metric, which notes what tensors it is given in a step."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        if all(one is None or isinstance(one, tf.Tensor) for one in tf.nest.flatten((args, kwargs))):
            step.given.setdefault(id(owner), (owner, tf.nest.map_structure(specification, (args, kwargs))))
        return call(*args, **kwargs)

    return noting


def are_read_by_keras(step: KerasStep, logs: Any) -> bool:
    """Whether Keras replaces these logs of a replica at the end of the epoch."""
    if step.on_batch or not isinstance(logs, dict):
        return False
    return all(metric_of(log) for log in logs.values()) and logs.keys() == step.model.get_metrics_result().keys()


def all_reduce_logs(step: KerasStep, logs: Any) -> Any:
    """The logs that one process would return, on every replica; one collective for each dtype."""
    leaves = [leaf if metric_of(leaf) else tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(logs)]
    derived = DerivedLogs(leaves)
    _warn_of_rows(step, [leaf for i, leaf in enumerate(leaves) if i not in derived.positions])
    metrics = list({id(metric): metric for metric, _ in derived.sources}.values())
    variables = list({id(v): v for metric in metrics for v in metric.variables}.values())
    others = [_weighted_log(leaf, step) for i, leaf in enumerate(leaves) if i not in derived.positions]
    sums = all_reduce_sum([_metric_summand(variable) for variable in variables] + others)
    states = zip(variables, sums[: len(variables)], strict=True)
    with keras.StatelessScope(state_mapping=[(v, _cast_average(total, tf.as_dtype(v.dtype))) for v, total in states]):
        results = {id(metric): tf.nest.flatten(metric.result()) for metric in metrics}
    found = derived.compute([results[id(metric)][i] for metric, i in derived.sources], derived.inputs)
    computed = dict(zip(derived.positions, found, strict=True))
    # What is computed from rows, too, is averaged now.
    local = [] if tf.executing_eagerly() else [i for i, value in computed.items() if not _is_global(step, value)]
    computed |= zip(local, all_reduce_sum([_weighted_log(computed[i], step) for i in local]), strict=True)
    means = iter(sums[len(variables) :])
    # Without the marks of results of this replica's state.
    found = [tf.identity(computed[i] if i in computed else next(means)) for i in range(len(leaves))]
    return tf.nest.pack_sequence_as(logs, found)


def results_of_parts(strategy: Any, metric: keras.Metric) -> list[Any]:
    """The result of a metric for the replicas of this process, flat."""

    def total(variable: keras.Variable) -> tf.Tensor:
        parts = [tf.convert_to_tensor(part) for part in parts_of_variable(variable)]
        if not is_kept_per_replica(variable) or variable.aggregation not in ("sum", "mean"):
            return parts[0]
        whole = tf.add_n([part if part.dtype in _NUMBERS else tf.cast(part, tf.int32) for part in parts])
        return tf.cast(whole / len(parts) if variable.aggregation == "mean" else whole, parts[0].dtype)

    with tf.device(strategy.extended.worker_devices[0]):
        state = [(variable, total(variable)) for variable in metric.variables]
        with keras.StatelessScope(state_mapping=state):
            return tf.nest.flatten(metric.result())


def _warn_of_rows(step: KerasStep, logs: list) -> None:
    """Warns once of a log that has a value for each row, as far as a graph tells."""
    if tf.executing_eagerly() or local_replica():
        return
    for log in logs:
        is_of_rows = log.shape.rank and step.here.state.dependence_of(log) is Dependence.ROWS
        if is_of_rows and is_new(step.model, "logs of rows"):
            warnings.warn(
                f"Received: a log of shape {tuple(log.shape)} from {step.kind}_step of model '{step.model.name}', with "
                "a value for each row of a replica. Logs are averaged over the replicas: this one mixes rows. "
                "Expected: a number for the batch; values of rows come from predict, or from predict_on_batch.",
                stacklevel=2,
            )


def _is_global(step: KerasStep, value: tf.Tensor) -> bool:
    return step.here.state.dependence_of(value) is Dependence.SAME


def _weighted_log(value: tf.Tensor, step: KerasStep) -> tf.Tensor:
    # A weight is a fraction; as an integer it would be 0.
    return scale(value if value.dtype.is_floating else tf.cast(value, tf.float64), step.weight)


def _metric_summand(variable: keras.Variable) -> tf.Tensor:
    """What this replica adds to a metric's variable, as the variable's `aggregation` says."""
    value = tf.convert_to_tensor(variable.value)
    value = value if value.dtype in _NUMBERS else tf.cast(value, tf.int32)
    if is_kept_per_replica(variable) and variable.aggregation == "sum":
        return value
    if is_kept_per_replica(variable) and variable.aggregation == "mean":
        return value / tf.distribute.get_replica_context().num_replicas_in_sync
    return value if global_replica() == 0 else tf.zeros_like(value)


class MetricTotals:
    """What the variables of a strategy's metrics add up to, from the end of an epoch until the next step.

    To read such a variable, TensorFlow adds up those of all replicas: under several processes a collective, at which a
    process that reads alone (`if rank == 0: print(metric.result())`) would stand still. Once Keras has read them at the
    end of an epoch, reading is local; within an epoch it stays a collective.
    """

    def __init__(self) -> None:
        # Totals are kept on their variables: a new round makes all earlier ones void.
        self._round = 0

    def watch(self, variable: SyncOnReadVariable) -> None:
        """Shadows methods of a variable: reading returns what is known; writing does not read, and keeps all digits."""
        read, assign = variable._get_cross_replica, variable.assign
        variable._tfdist_total = None

        def total() -> Any:
            known = variable._tfdist_total
            return known[1] if known is not None and known[0] == self._round and tf.executing_eagerly() else read()

        def assign_without_reading(
            value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = False
        ) -> Any:
            # Upstream returns the new value, which costs a collective that nobody reads.
            variable._tfdist_total = None
            is_whole = tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy()
            if is_sum and is_whole and not distributed_values.values_util.is_saving_non_distributed():
                return _assign_sum(variable, value)
            return assign(value, use_locking, name, read_value)

        is_sum = variable.aggregation == tf.VariableAggregation.SUM
        variable._get_cross_replica = total
        variable.assign = assign_without_reading
        if is_sum:
            saveable = functools.partial(_SaveableSum, variable)
            variable._gather_saveables_for_checkpoint = lambda: {trackable.VARIABLE_VALUE_KEY: saveable}

    def settle(self, model: keras.Model) -> None:
        """Adds up the metrics that Keras reads at the end of an epoch; all processes call it there."""
        self.forget()
        for variable in model.metrics_variables:
            if is_kept_per_replica(variable):
                variable.value._tfdist_total = self._round, tf.convert_to_tensor(variable.value)

    def forget(self) -> None:
        """Forgets the totals: the metrics are about to be updated again."""
        self._round += 1


def _assign_sum(variable: SyncOnReadVariable, value: Any) -> tf.Operation:
    """Assigns to a sum over all replicas: the first one has it all. Upstream divides it: whole numbers lose counts."""
    value, updates = tf.cast(value, variable.dtype), []
    is_first = variable.distribute_strategy.extended._input_position()[1] == 0
    for i, part in enumerate(variable.values):
        with tf.device(part.device):
            updates.append(part.assign(value if is_first and i == 0 else tf.zeros_like(value)))
    return tf.group(*updates)


class _SaveableSum(distributed_values._SyncOnReadSaveable):
    """What `tf.train.Checkpoint` saves of such a variable."""

    def __init__(self, variable: SyncOnReadVariable, name: str | None = None) -> None:
        super().__init__(variable, variable._common_name if name is None else name)

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> tf.Operation:
        return _assign_sum(self._sync_on_read_variable, restored_tensors[0])


def _predict(step: KerasStep, data: Any, rows: Any, global_rows: Any) -> Any:
    """Runs a predict step on one replica, and notes on the step which outputs are the same on all.

    Args:
        step: the step.
        data: this replica's rows of the batch.
        rows: how many of them count; `None` for all.
        global_rows: rows of the batch; `None` if the dataset does not know.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    count = len(graph.get_operations()) if graph else 0
    rows_of_batch = tf.nest.flatten(data, expand_composites=True)
    known = graph and LocalValues(graph, rows_of_batch, same=[], watched=[], others=devices_of_others())
    step.note_batch(data)
    outputs = step.function(data)
    flat = tf.nest.flatten(outputs)
    if known:
        # Not before: the call may have built the model.
        for parts in map(parts_of_variable, step.model.variables):
            known.take_for_same(id(parts[min(local_replica(), len(parts) - 1)].handle))
        list(known.accesses())
        step.here.values = known
    # Not by what is known of a shape: that may be known on some processes only, and all have to exchange the same.
    made = graph.get_operations()[count:] if graph else []
    is_sizeless = not graph or any(one.type.startswith(_SIZES) for one in made)
    own = static_rows(data)
    for i, output in enumerate(flat):
        if not isinstance(output, tf.Tensor):
            continue
        dependence = known.dependence_of(output) if known else Dependence.MIXED
        if dependence is Dependence.SAME:
            step.constant_outputs.add(i)
        is_sum = dependence in (Dependence.MEAN, Dependence.SUM, Dependence.DERIVED)
        if output.shape.rank == 0 or (is_sum and output.shape.rank and output.shape[0]):
            if step.here.relative_weight is None:
                step.begin_replica(own, count_rows(data) if rows is None else rows, global_rows)
            flat[i] = _combine_output(step, output, dependence)
            step.same_outputs.add(i)
            continue
        size = output.shape[0] if output.shape.rank else None
        if dependence in (Dependence.SAME, Dependence.MIXED) and output.dtype != tf.string and is_sizeless:
            step.sizeless_outputs.add(i)
        if dependence is Dependence.SAME and size != own:
            flat[i] = output if global_replica() == 0 else output[:0]
        elif dependence is Dependence.MIXED and size and own and size % own:
            _warn_of_output(step, output, "each replica's is returned")
    if rows is not None and (own or 0) <= 1:
        # Not before: layers may fail without rows, as cuDNN's do.
        flat = [x if i in step.same_outputs else rows_if(rows > 0, x) for i, x in enumerate(flat)]
    return tf.nest.pack_sequence_as(outputs, flat)


def _combine_output(step: KerasStep, output: tf.Tensor, dependence: Dependence) -> tf.Tensor:
    if output.dtype == tf.string:
        if dependence is not Dependence.SAME:
            _warn_of_output(step, output, "the first one's is returned")
        return output
    if dependence is Dependence.DERIVED:
        return of_global_batch(step, output)
    if output.dtype.is_complex:
        return tf.complex(
            *(_combine_output(step, part, dependence) for part in (tf.math.real(output), tf.math.imag(output)))
        )
    weight = step.weight
    if dependence in (Dependence.SUM, Dependence.COUNT):
        weight = tf.ones([]) if step.has_rows is None else tf.cast(step.has_rows, tf.float32)
    elif dependence is Dependence.SAME:
        # A number of rows that is static on this process only is one as well: all have to exchange the same.
        weight = tf.constant(float(global_replica() == 0))
    elif dependence is not Dependence.MEAN:
        _warn_of_output(step, output, "the average is returned")
    if output.dtype.is_floating:
        return all_reduce_sum([output], weight=weight)[0]
    whole = output if output.dtype in (tf.int64, tf.uint64) else tf.cast(output, tf.int64)
    # As two numbers, so that floats keep all digits.
    half = tf.constant(2**32, whole.dtype)
    parts = [tf.cast(part, tf.float64) for part in (whole // half, whole % half)]
    high, low = all_reduce_sum(parts, weight=weight)
    if dependence in (Dependence.SUM, Dependence.COUNT, Dependence.SAME):
        return tf.cast(tf.cast(high, whole.dtype) * half + tf.cast(low, whole.dtype), output.dtype)
    return _cast_average(high * 2.0**32 + low, output.dtype)


def _cast_average(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    # The weights of replicas add up to 1 but for the last digit. A truth value is true if it is anywhere.
    return tf.cast(tf.round(value) if dtype.is_integer else value, dtype)


def _warn_of_output(step: KerasStep, output: tf.Tensor, outcome: str) -> None:
    if not local_replica() and is_new(step.model, _OUTPUTS):
        warnings.warn(output_message(step.model, output, outcome), stacklevel=2)


def has_warned_of_output(model: Any) -> bool:
    """Whether one of its outputs was said to be none of one process."""
    return was_said(model, _OUTPUTS)


def output_message(model: Any, output: tf.Tensor, outcome: str) -> str:
    """What is said of an output that cannot be that of one process."""
    return (
        f"Received: an output of shape {tuple(output.shape)} from predict of model '{model.name}', which has no row "
        "for each row of the batch and is neither a mean nor a sum over them. Each replica computes it of its own "
        f"rows, and {outcome}. Expected: an output with the batch's rows, from which the whole is computed afterwards."
    )
