"""What functions of Keras and TensorFlow do in a step on several replicas; the same under all strategies.

compat/keras.py lists the functions, and which of these is called in place of each. It is given the function that it
stands for, and its arguments. From top to bottom, as a step computes:

next_seed, draw_seed             each replica draws random numbers of its own; an optimizer, the same ones on all
pad                              ragged rows are as long as the longest row of all replicas
apply_mask, reduce_values, scale_loss
                                 losses, see below
update_mean                      metrics, see below
sum_gradients, apply_gradients   gradients are added up once
cond                             all replicas take the same branch, if they exchange something in one
global_sum                       for users: a sum over the rows of all replicas

Losses. Keras divides each replica's mean loss by the number of replicas, and the gradients are then added up. That is
the mean of the global batch only if all replicas have equally many rows, and unmasked time steps. In a tfdist step a
loss is what one process would compute from the rows at hand, and the strategy weights it by the replica's share of the
global batch; a `train_step` written for one process is then right as it stands. Two kinds of losses are not means over
rows, and need the global batch's own denominator: masked means and sums.

Metrics. A scalar given to `keras.metrics.Mean` or `Sum` is one for a batch, in one process. Weighted by the replica's
share the replicas' scalars make the one that the global batch would have given. What a `Sum` is given and adds up over
the replicas needs no weight: integers, which count something, and sums over rows.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfdist.arguments import is_new
from tfdist.compat.keras import has_hooks, hooks_of
from tfdist.compat.scopes import outside_of_scope
from tfdist.compat.upstream import distribute_utils, get_stateless_scope, global_state, record
from tfdist.inspection.model_state import global_seeds, is_here, make_global_seeds, parts_of, share_global_seeds
from tfdist.steps.gradients import all_reduce_sum, sum_over_replicas
from tfdist.steps.keras_step import Exchanges, KerasStep, current_step, global_replica, local_replica, step_of
from tfdist.steps.local_values import Dependence
from tfdist.steps.reduce import all_reduce, of_first_replica

# Any odd constant with well-mixed bits keeps the replicas' seeds apart (2**32 divided by the golden ratio).
_REPLICA_SEED_STRIDE = 0x9E3779B9
_MEANS = ("sum_over_batch_size", "mean")
# Predicates that are computed again from what their inputs are in the global batch.
_COMPUTED_AGAIN = (
    *("Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual", "LogicalAnd", "LogicalOr", "LogicalNot"),
    *("IsFinite", "IsNan", "IsInf", "Abs", "Identity", "Cast", "Floor", "Ceil", "Round", "Rint", "Sign", "Sqrt"),
    *("AddV2", "Sub", "Mul", "RealDiv", "DivNoNan", "Neg", "Square", "Maximum", "Minimum", "FloorDiv", "FloorMod"),
)
# Others are true if they are true on all replicas, or on any.
_TRUE_ON_ALL, _TRUE_ON_ANY = ("All", "IsFinite"), ("Any", "IsNan", "IsInf")
# Optimizers that are given sums of gradients, in a loop of one's own: by id, with the replica.
_given_sums: set[tuple[int, int]] = set()


def next_seed(draw: Callable, generator: Any, *args: Any, **kwargs: Any) -> Any:
    """`generator.next()` of a Keras SeedGenerator."""
    generator.is_used = True
    if tf.distribute.in_cross_replica_context() and not is_here(generator):
        # `keras.random` without a seed, in the scope of another strategy than that of the last model.
        with outside_of_scope():
            return draw(generator, *args, **kwargs)
    seed = draw(generator, *args, **kwargs)
    if (step := current_step()) is not None:
        if step.here.is_updating:
            return seed
        seed = seed_of_replica(seed, step.shard)
        if step.here.state is not None:
            step.here.state.note_draw(seed)
        return seed
    context = tf.distribute.get_replica_context()
    # The first replica draws what one process draws, every other one numbers of its own.
    is_other = context is not None and hooks_of(context.strategy).is_data_parallel and _number_for_seeds() > 0
    return seed_of_replica(seed) if is_other else seed


def seed_of_replica(seed: tf.Tensor, shard: tf.Tensor | None = None) -> tf.Tensor:
    """The seed of this replica, or shard, in place of one that all have: the first draws what one process does."""
    offset = (_number_for_seeds() if shard is None else shard) * _REPLICA_SEED_STRIDE % 2**32
    offset = tf.constant(offset, seed.dtype) if shard is None else tf.cast(offset, seed.dtype)
    return seed + tf.stack([offset, tf.zeros_like(offset)])


def _number_for_seeds() -> int:
    """The number of this replica among all, also among those of workers that TensorFlow does not connect."""
    return global_replica() + hooks_of(tf.distribute.get_replica_context().strategy).replicas_before


def draw_seed(draw: Callable, seed: Any) -> Any:
    """What functions of `keras.random` draw from, given a seed, a generator or nothing."""
    if isinstance(seed, int):
        _warn_of_fixed_seed(seed)
    elif seed is None and (strategy := _strategy_of_custom_loop()) is not None:
        _take_global_seeds(strategy)
    return draw(seed)


def _take_global_seeds(strategy: Any) -> None:
    """On a replica in a loop of one's own, as before a step of Keras: all replicas draw from the strategy's seeds."""

    def make(strategy: Any) -> None:
        with tf.init_scope():
            make_global_seeds(strategy)

    own = strategy._global_seeds
    if own is not None and global_seeds() is own:
        return
    if strategy.extended._use_merge_call():
        # All replicas come here: where Keras would make a generator, each would make one of its own.
        tf.distribute.get_replica_context().merge_call(make)
    if strategy._global_seeds is not None:
        share_global_seeds(strategy._global_seeds)


def _warn_of_fixed_seed(seed: int) -> None:
    step = current_step()
    if step is None or step.replicas == 1 or step.here.is_updating or _draws_weights():
        return
    if not is_new(tf.distribute.get_strategy(), f"seed {seed}"):
        return
    warnings.warn(
        f"Received: seed={seed}, a whole number, for a function of keras.random in a step of {step.replicas} "
        "replicas. Each of them draws the same numbers for its own rows of the batch, and one process other ones "
        f"for each row. Expected: seed=keras.random.SeedGenerator({seed}), made in __init__ of the layer or model, "
        "with which each replica draws numbers of its own. For numbers that do not belong to rows, such as the "
        "matrix of a random projection, a whole number is right.",
        stacklevel=2,
    )


def _draws_weights() -> bool:
    """Whether a variable draws its first values: a weight that a step, or the first `predict`, makes."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return any(isinstance(frame.f_locals.get("self"), keras.Variable) for frame in frames)


def pad(pad: Callable, ragged: tf.RaggedTensor, default_value: Any = None, name: Any = None, shape: Any = None) -> Any:
    """`ragged.to_tensor(...)`: pads to the longest rows of all replicas, where the shape does not tell."""
    step, pad = current_step(), functools.partial(pad, ragged, default_value, name)
    if step is None or tf.is_tensor(shape) or ragged.shape.rank is None or not step.can_meet():
        return pad(shape)
    given = tf.TensorShape([None] * ragged.shape.rank if shape is None else shape).as_list()
    known = [own if one is None else one for one, own in zip(given, ragged.shape, strict=True)]
    if None not in known[1:]:
        return pad(shape)
    # A sum to which each replica adds its own row.
    own = tf.cast(ragged.bounding_shape(), tf.float32)
    longest = tf.reduce_max(all_reduce(tf.one_hot(global_replica(), step.replicas)[:, None] * own), 0)
    sizes = [longest[i] if one is None else one for i, one in enumerate(known)]
    padded = pad(tf.stack([-1 if given[0] is None else given[0], *(tf.cast(one, tf.int32) for one in sizes[1:])]))
    return tf.ensure_shape(padded, known)


def apply_mask(apply: Callable, sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
    """`apply_mask` of losses: weights whose mean, weighted by the share of rows, is that of the global batch."""
    masked, step = apply(sample_weight, mask, dtype, reduction), current_step()
    if step is None or mask is None or reduction not in _MEANS:
        return masked
    # The local mean is one over the valid entries here. It has to add up to the mean over the valid entries everywhere.
    valid = ops.sum(ops.cast(mask, dtype))
    return masked * _weighted_share(valid, step)


def reduce_values(
    reduce: Callable, values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size"
) -> Any:
    """`reduce_values` of losses: one that, weighted by the share of rows, adds up to that of the global batch."""
    loss, step = reduce(values, sample_weight, reduction), current_step()
    if step is None or tuple(values.shape) in ((), (0,)):
        return loss
    if reduction == "sum":
        return ops.divide_no_nan(loss, ops.cast(step.weight, loss.dtype))
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        return loss * _weighted_share(ops.cast(ops.sum(sample_weight), loss.dtype), step)
    return loss


def _weighted_share(value: Any, step: KerasStep) -> Any:
    """This replica's share of the sum of a value over all replicas, divided by its share of the rows."""
    value = tf.convert_to_tensor(value)
    if step.has_rows is not None:
        value *= tf.cast(step.has_rows, value.dtype)
    return tf.math.divide_no_nan(value, all_reduce(value) * tf.cast(step.weight, value.dtype))


def global_sum(value: Any) -> tf.Tensor:
    """The sum over the rows of the global batch, from the sum over the rows at hand, in a step of Keras.

    For losses that divide by what only the whole batch knows, such as its number of positive rows: in `compute_loss`,
    a `train_step`, `add_loss` or a compiled loss. Gradients are those of one process, also where a batch does not
    divide evenly over the replicas. Without replicas, and outside of a step, it returns the value as it is.

    Call it on every replica, not in a loop or branch.

    Args:
        value: a sum over this replica's rows, or a tensor of such sums: a number, a float tensor or an int tensor.

    Raises:
        NotImplementedError: under `ParameterServerStrategy(mode="sync")`, where no worker has the whole batch.

    Example:
        >>> import tfdist
        >>> def loss_of_positives(targets, errors):
        ...     positives = tf.cast(targets > 0.5, errors.dtype)
        ...     total = tfdist.global_sum(tf.reduce_sum(errors * positives))
        ...     return total / tf.maximum(tfdist.global_sum(tf.reduce_sum(positives)), 1)
        >>> float(loss_of_positives(tf.constant([1.0, 0.0, 1.0]), tf.constant([0.5, 9.0, 1.5])))
        1.0
    """
    value, step = tf.convert_to_tensor(value), current_step()
    if step is None:
        return value

    @tf.custom_gradient
    def summed(own: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # What a replica returns is multiplied by its weight later.
            weight = tf.cast(step.weight, upstream.dtype)
            return tf.math.divide_no_nan(all_reduce(weight * upstream), weight)

        return sum_over_replicas(step, own), gradient

    return summed(value)


def gather_with_weights(step: KerasStep, gather: Callable) -> Callable:
    """A replica context's `all_gather` whose gradient is that of one process, where replicas have unequal weights.

    A replica's gradient is multiplied by its weight later. That of a gathered row comes from the losses of all
    replicas, each of which has its own weight.
    """

    def scaled(value: Any, scale: Callable) -> Any:
        """The value, with another gradient."""
        return tf.custom_gradient(lambda x: (tf.identity(x), scale))(value)

    def all_gather(value: Any, axis: int, options: Any = None) -> Any:
        def gathered(one: Any) -> Any:
            if not isinstance(one, tf.Tensor) or not one.dtype.is_floating:
                return gather(one, axis, options)
            weight = tf.cast(step.relative_weight, one.dtype)
            return scaled(
                gather(scaled(one, lambda upstream: tf.math.divide_no_nan(upstream, weight)), axis, options),
                lambda upstream: weight * upstream,
            )

        return tf.nest.map_structure(gathered, value)

    return all_gather


def scale_loss(scale: Callable, value: Any) -> Any:
    """Keras' division of a loss by the number of replicas, and its reverse."""
    return scale(value) if current_step() is None else value


def update_mean(update: Callable, metric: keras.Metric, values: Any, sample_weight: Any = None) -> Any:
    """`update_state` of a `Mean` or `Sum`: a scalar has the replica's weight, unless the replicas' scalars add up."""
    step = current_step()
    if step is not None and len(ops.shape(values)) == 0:
        is_tensor_for_sum = isinstance(metric, keras.metrics.Sum) and tf.is_tensor(values)
        is_count = is_tensor_for_sum and (values.dtype.is_integer or step.adds_up(values))
        is_averaged = sample_weight is None and not is_count
        step.scalars.append((metric, values, is_averaged))
        sample_weight = step.weight if is_averaged else sample_weight
    elif sample_weight is None and isinstance(metric, keras.metrics.Mean) and not ops.shape(values):
        # A pure call of a pipeline's layers notes it.
        getattr(get_stateless_scope(), "of_batch", []).append(metric)
    return update(metric, values, sample_weight=sample_weight)


def sum_gradients(add: Callable, optimizer: Any, grads_and_vars: Any) -> Any:
    """The sums of the replicas' gradients, of which an optimizer applies its own."""
    step, strategy = current_step(), tf.distribute.get_strategy()
    if step is not None and id(optimizer) not in step.optimizers:
        raise RuntimeError(
            f"Received: optimizer '{optimizer.name}', used in a train_step, which is not an attribute of the model "
            "or of one of its layers. Expected: `self.my_optimizer = ...` on the model (in a list or dict, too), "
            "so that tfdist can give it the gradient of the global batch."
        )
    # One replica has nothing to add up, and TensorFlow would copy all gradients to one device for it.
    is_alone = has_hooks(strategy) and strategy.num_replicas_in_sync == 1
    is_summed = is_alone or step is not None or _is_given_sums(optimizer)
    return list(grads_and_vars) if is_summed else add(optimizer, grads_and_vars)


def apply_gradients(apply: Callable, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """`optimizer.apply`; in a loop of one's own with global gradients, if the optimizer clips or tests them."""
    grads = list(grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    variables = trainable_variables or getattr(optimizer, "_trainable_variables", None) or ()
    updated = [v for gradient, v in zip(grads, variables, strict=False) if gradient is not None]
    hooks_of(tf.distribute.get_strategy()).note_update(updated)
    strategy = None if _is_given_sums(optimizer) else _strategy_of_custom_loop()
    if strategy is None:
        return apply(optimizer, grads, trainable_variables)
    is_summed_here = _depends_on_whole_gradient(optimizer)
    if strategy._gradient_options.compressor is not None or (
        strategy._gradient_options.dtype is not None and not is_summed_here
    ):
        # By default Python shows it once.
        warnings.warn(
            "Received: compression=... of the strategy, and a training loop around strategy.run. It sends "
            "gradients as they are. Expected: model.fit or model.train_on_batch, with a train_step of your own if "
            "you need one; or no compression.",
            stacklevel=2,
        )
    if not is_summed_here:
        return apply(optimizer, grads, trainable_variables)
    present = [i for i, gradient in enumerate(grads) if gradient is not None]
    for i, total in zip(present, all_reduce_sum([grads[i] for i in present], strategy._gradient_options), strict=True):
        grads[i] = total
    # A LossScaleOptimizer calls its inner one in other threads.
    given = {(id(part), local_replica()) for part in [optimizer, *parts_of(optimizer)]}
    _given_sums.update(given)
    try:
        return apply(optimizer, grads, trainable_variables)
    finally:
        _given_sums.difference_update(given)


def _is_given_sums(optimizer: Any) -> bool:
    """Whether an optimizer has, in a loop of one's own, gradients that were added up here, for it or the one around."""
    is_on_replica = bool(_given_sums) and not tf.distribute.in_cross_replica_context()
    return is_on_replica and (id(optimizer), local_replica()) in _given_sums


def _strategy_of_custom_loop() -> tf.distribute.Strategy | None:
    """The strategy, if this runs on one of several replicas and not in a step of a Keras model; else `None`."""
    context = tf.distribute.get_replica_context()
    strategy = None if context is None else context.strategy
    if not hooks_of(strategy).is_data_parallel or strategy.num_replicas_in_sync == 1:
        return None
    return strategy if current_step() is None else None


def _depends_on_whole_gradient(optimizer: Any) -> bool:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return True
    return any(getattr(optimizer, name, None) is not None for name in ("clipnorm", "global_clipnorm", "clipvalue"))


def cond(make: Callable, pred: Any, true_fn: Callable, false_fn: Callable, name: str = "cond") -> Any:
    """A `tf.cond` in a graph, in which replicas may meet: then all of them take the same branch.

    A step may apply an optimizer in a branch: of every tenth step, or only where the loss is finite. What decides is
    often computed from a replica's own rows, and differs; the others would wait for one that has taken the other
    branch. As soon as a branch is found to exchange something, its predicate becomes that of the global batch.
    """
    predicate, branches, make = pred, (true_fn, false_fn), functools.partial(make, name=name)
    if tf.distribute.in_cross_replica_context():
        return _cond_of_all_replicas(predicate, branches, make)
    step = current_step()
    if step is None or tf.executing_eagerly() or step.here.state is None:
        return make(predicate, *branches)
    here = step.here
    before = here.agreed
    if before and here.state.graph is tf.compat.v1.get_default_graph():
        return make(predicate, *branches)  # tfdist's own
    here.agreed = False
    try:
        return make(predicate, *branches)
    except Exchanges:
        if before is False:
            raise  # those around it have to be the same first
        here.agreed = None
        if record.could_possibly_record():
            raise NotImplementedError(
                "Received: a tf.cond within a GradientTape, in a branch of which replicas exchange something, such as "
                "the statistics of BatchNormalization. Expected: the tape within the branch, or no tf.cond."
            ) from None
        # Keras replaces the object when a session is cleared.
        of_keras = dict(vars(global_state.GLOBAL_STATE_TRACKER))
        here.branch = of_global_batch(step, tf.convert_to_tensor(predicate)), branches, of_keras
        return tf.distribute.get_replica_context().merge_call(lambda strategy: _cond_with_threads(strategy, step, make))
    finally:
        here.agreed = before


def _cond_of_all_replicas(
    predicate: Any, branches: tuple[Callable[[], Any], Callable[[], Any]], make: Callable[..., Any]
) -> Any:
    """One `tf.cond` for all replicas already: that of Keras' LossScaleOptimizer, whose predicate is the same on all."""
    step = step_of(tf.distribute.get_strategy())
    if step is None:
        return make(predicate, *branches)
    before = [(part, part.agreed) for part in step.parts.values()]
    for part, _ in before:
        part.agreed = True
    try:
        return make(predicate, *branches)
    finally:
        for part, agreed in before:
            part.agreed = agreed


def _cond_with_threads(strategy: Any, step: KerasStep, make: Callable[..., Any]) -> Any:
    """One `tf.cond` for all replicas of this process: these can meet in it."""
    kept: list[Any] = []

    def branch(number: int) -> Callable[[], list]:
        def on_replica() -> Any:
            step.here.agreed = True
            _, branches, of_keras = step.here.branch
            # The thread is another one: it goes on with the seeds, the dtypes and the call of the replica's.
            vars(global_state.GLOBAL_STATE_TRACKER).update(of_keras)
            return tf.nest.map_structure(_as_output, branches[number]())

        def on_all() -> list:
            results = strategy.extended.call_for_each_replica(on_replica)
            kept[:] = [distribute_utils.select_replica(i, results) for i in range(len(step.parts))]
            return [one for one in tf.nest.flatten(kept, expand_composites=True) if one is not None]

        return on_all

    # predicate of the batch -> one tf.cond -> in each branch every replica's function, in threads that may exchange
    #                                       -> all replicas' results, flat -> regrouped by replica
    made = iter(make(step.parts[0].branch[0], branch(0), branch(1)))
    flat = [None if one is None else next(made) for one in tf.nest.flatten(kept, expand_composites=True)]
    results = tf.nest.pack_sequence_as(kept, flat, expand_composites=True)
    return distribute_utils.regroup(tuple(results), always_wrap=True)


def _as_output(value: Any) -> Any:
    """What TensorFlow makes of what a branch returns: a tensor, but for nothing, and for an operation."""
    if isinstance(value, tf.Operation):
        with tf.control_dependencies([value]):
            return tf.constant(True)
    return None if value is None else tf.convert_to_tensor(value)


def of_global_batch(step: KerasStep, value: tf.Tensor, found: dict[str, Any] | None = None) -> Any:
    """A value as one process computes it, which has all rows of the batch; `None` for one that nobody can have.

    Args:
        step: the step that is traced.
        value: what this replica has computed.
        found: what is known by then, by the names of values.
    """
    found = {} if found is None else found
    if value.name not in found:
        found[value.name] = _of_global_batch(step, value, found)
    return found[value.name]


def _of_global_batch(step: KerasStep, value: tf.Tensor, found: dict[str, Any]) -> Any:
    dependence = step.dependence_of(value)
    if dependence is Dependence.SAME:
        return value
    if dependence is Dependence.DRAWN:
        return of_first_replica(value)
    if dependence is Dependence.MEAN:
        return all_reduce_sum([value], weight=step.weight)[0]
    if dependence in (Dependence.SUM, Dependence.COUNT):
        return sum_over_replicas(step, value)
    kind = value.op.type if value.graph is step.graph else ""
    if kind == "IdentityN":
        return of_global_batch(step, value.op.inputs[value.value_index], found)
    if dependence is Dependence.DERIVED or kind in _COMPUTED_AGAIN:
        inputs = [of_global_batch(step, one, found) for one in value.op.inputs]
        if all(one is not None for one in inputs):
            return _again(value.op, inputs)[value.value_index]
    return _vote(step, value, kind) if value.dtype == tf.bool else None


def _again(operation: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """What an operation makes of other inputs."""
    attributes = {name: one for name, one in operation.node_def.attr.items() if not name.startswith("_")}
    dtypes = [one.dtype for one in operation.outputs]
    return operation.graph.create_op(operation.type, inputs, dtypes, attrs=attributes).outputs


def _vote(step: KerasStep, value: tf.Tensor, kind: str) -> tf.Tensor:
    """What replicas say of their own rows, if they agree; or whether all, or any of them say so."""
    has_rows = tf.constant(True) if step.has_rows is None else step.has_rows
    votes, voters = all_reduce_sum([tf.cast(value & has_rows, tf.float32), tf.cast(has_rows, tf.float32)])
    if kind in _TRUE_ON_ALL:
        return tf.equal(votes, voters)
    if kind not in _TRUE_ON_ANY:
        failed = tf.debugging.Assert(
            tf.equal(votes, voters) | tf.equal(votes, 0),
            [
                "Received: a tf.cond of which replicas would take different branches, and exchange gradients or "
                "statistics in one. Expected: a predicate that is the same on all replicas, such as one computed from "
                "optimizer.iterations, a loss, or tf.distribute.get_replica_context().all_reduce('SUM', value)."
            ],
        )
        with tf.control_dependencies([failed]):
            votes = tf.identity(votes)
    return votes > 0
