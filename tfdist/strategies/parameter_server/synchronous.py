"""Synchronous training: each batch is cut into shards, one a worker, and their gradients are applied once, together.

    batch ──> shards         coordinator cuts the batch
    shard ──> gradients      each worker, with the variables that it reads from the servers; it changes nothing
    gradients ──> servers    each gradient goes to the server of its variable
    sum, update              on the servers, by one function that the coordinator calls when all shards are done

Metrics and the layers' other state (moving averages, seeds) come back to the coordinator, which writes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.arguments import is_new
from tfdist.compat.upstream import context, get_read_write_resource_inputs
from tfdist.inspection.model_state import held_variables, optimizers_of, own_copy
from tfdist.steps.gradients import added_by_number, check_finite, is_common, is_half, numbered
from tfdist.steps.keras_step import KerasStep, shadowed, traced
from tfdist.steps.local_values import Dependence, LocalValues
from tfdist.strategies.data_parallel import row_trial
from tfdist.strategies.data_parallel.replica_step import losses_of, noting_arguments
from tfdist.strategies.data_parallel.state import NO_MEAN, is_of_keras, rule_of, scopes_by_row
from tfdist.strategies.parameter_server.data import (
    COORDINATOR,
    Packing,
    any_rows,
    fetch,
    flatten_spec,
    is_dense,
    local_constant,
    rows_of,
    unflatten,
)
from tfdist.strategies.parameter_server.dispatcher import Task, Worker
from tfdist.strategies.parameter_server.runner import Runner
from tfdist.strategies.parameter_server.step import StepFunction, StepOutcome, Trace, depends, mean, sparse_updates
from tfdist.strategies.validation import check_float8

_SHARD = tf.TensorSpec([], tf.int64)
_WEIGHT = tf.TensorSpec([], tf.float64)
# What no batch has as a whole.
_APART = object()


class SynchronousRunner(Runner):
    """Trains as one process does with the same batches, whichever worker computes what.

    Args:
        strategy: a `ParameterServerStrategy`.
        model: the model.
    """

    def __init__(self, strategy: Any, model: keras.Model):
        super().__init__(strategy, model, "train")
        self._step: GradientStep = GradientStep(strategy, model)

    def _submit(self, batches: list[list[tf.Tensor]], spec: Any) -> None:
        # A shard has fewer rows than the batches that a dataset may promise.
        trace = self._step.single(any_rows(spec))
        for batch in batches:
            weights, shards = _cut(batch, spec, self._strategy._num_workers)
            done = self._compute(trace, weights, shards)
            self._step.apply(trace, done, weights)
            outcomes = [shard.outcome for shard in done]
            own = [part for one in outcomes for _, part in one.own]
            outcomes[-1].own = list(zip(weights, own, strict=True))
            updates = _of_batch([one.updates for one in outcomes], list(map(rows_of, shards)), weights)
            for one in outcomes if updates is not None else ():
                one.updates = updates if one is outcomes[-1] else []
            for one in outcomes:
                self._deliver(self._next_position(), one)

    def _wait(self, limit: int) -> None:
        """Does nothing: a step is done when its gradients are applied."""

    def _current_logs(self, fresh: bool) -> Any:
        logs = super()._current_logs(fresh)
        # A callback may read or reset a metric after each step, as in one process.
        self._write_metrics()
        return logs

    def _compute(self, trace: ShardTrace, weights: list[float], shards: list[list[tf.Tensor]]) -> list[ShardOutcome]:
        done: list[ShardOutcome | None] = [None] * len(shards)

        def task(i: int) -> Task:
            arguments = [tf.constant(i, tf.int64), tf.constant(weights[i], tf.float64), *shards[i]]

            def run(worker: Worker) -> ShardOutcome:
                return self._step.shard_outcome(trace, trace.function(*arguments))

            def deliver(outcome: ShardOutcome) -> None:
                done[i] = outcome

            return Task(run, deliver)

        for i in range(len(shards)):
            self._dispatcher.submit(task(i))
        self._dispatcher.join()
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


def _of_batch(
    updates: Sequence[list[tuple[keras.Metric, tuple, dict]]], rows: Sequence[int | None], weights: Sequence[float]
) -> list[tuple[keras.Metric, tuple, dict]] | None:
    """The updates of metrics with all rows of a batch, from those of its shards; `None` if something has no rows."""
    joined = []
    for of_one in zip(*updates, strict=True):
        leaves = zip(*(tf.nest.flatten(arguments) for _, *arguments in of_one), strict=True)
        whole = [_joined(parts, rows, weights) for parts in leaves]
        if any(one is _APART for one in whole):
            return None
        metric, *arguments = of_one[0]
        joined.append((metric, *tf.nest.pack_sequence_as(arguments, whole)))
    return joined


def _joined(parts: Sequence[Any], rows: Sequence[int | None], weights: Sequence[float]) -> Any:
    """What a batch has where its shards have these: all rows, or the mean of a number for each shard."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    if all(isinstance(one, tf.Tensor) for one in parts):
        # A row may have several, such as tokens.
        sizes = [
            one.shape[0] / count if one.shape.rank and count else 0.0 for one, count in zip(parts, rows, strict=True)
        ]
        if sizes[0] and sizes[0].is_integer() and len(set(sizes)) == 1:
            with tf.device(COORDINATOR):
                return tf.concat(parts, 0)
        if parts[0].dtype.is_floating and not parts[0].shape.rank:
            return local_constant(mean([one.numpy() for one in parts], weights))
    return _APART


@dataclasses.dataclass
class ShardTrace(Trace):
    """A traced step on a shard of a batch.

    Attributes:
        state: the variables that the step changes besides the trained ones (moving averages, seeds).
        gradients: how its gradients travel; `None` if it has none.
        optimizer: the optimizer that applies them.
    """

    state: list[keras.Variable | tf.Variable]
    gradients: _Gradients | None
    optimizer: keras.optimizers.Optimizer | None


@dataclasses.dataclass
class ShardOutcome:
    """The results of a worker for its shard of a batch.

    Attributes:
        outcome: what it adds to the metrics.
        gradients: a tensor for each destination of the trace's gradients, on that server.
        state: the new values of the trace's other variables.
    """

    outcome: StepOutcome
    gradients: list[tf.Tensor]
    state: list[np.ndarray]


class GradientStep(StepFunction):
    """Traces a train step so that it changes nothing: gradients and the model's other state are returned.

    Args:
        strategy: a `ParameterServerStrategy`.
        model: the model.
    """

    def __init__(self, strategy: Any, model: keras.Model):
        super().__init__(strategy, model, model.train_step)
        self._traced_state: list[keras.Variable | tf.Variable] = []
        self._traced_step: KerasStep | None = None
        # `tf.Variable`s that the step changes: known after a first trace.
        self._changed: list[tf.Variable] = []
        # Ids of tables that no step changes: known after a first trace, too.
        self._frozen: set[int] = set()
        self._traced_tables: set[int] = set()
        self._traced_gradients: tuple[_Gradients | None, keras.optimizers.Optimizer | None] = None, None
        # Ids of the optimizers that have scaled the loss.
        self._scaled: set[int] = set()
        self._apply_functions: dict[tuple[int, int], tf.types.experimental.ConcreteFunction] = {}

    @property
    def is_loopable(self) -> bool:
        return False

    def shard_outcome(self, trace: ShardTrace, outputs: Sequence[Any]) -> ShardOutcome:
        """Fetches the small parts of what a call has returned, and sends the gradients to their servers."""
        vectors, logs, updates, gradients, state = outputs
        sent = []
        destinations = trace.gradients.destinations if trace.gradients else []
        for gradient, device in zip(gradients, destinations, strict=True):
            with tf.device(device):
                sent.append(tf.identity(gradient))
        # Once this has returned, the worker may die: nothing of its work is on it any more.
        return ShardOutcome(self.outcome(trace, (vectors, logs, updates)), sent, [fetch(value) for value in state])

    def apply(self, trace: ShardTrace, shards: Sequence[ShardOutcome], weights: Sequence[float]) -> None:
        """Updates the model, once.

        Args:
            trace: the traced step.
            shards: its results, in the order of the rows.
            weights: the weights of the shards' gradients; their sum is 1.
        """
        for i, variable in enumerate(trace.state):
            variable.assign(_combined(variable, [shard.state[i] for shard in shards], weights))
        if trace.gradients is None:
            return  # nothing is trained
        arguments = [tf.constant(weights, tf.float64), *(g for shard in shards for g in shard.gradients)]
        self._apply_function(trace, len(shards))(*arguments)

    def _trace(self, spec: Any) -> ShardTrace:
        trace = super()._trace(spec)
        if self._traced_tables:
            # What is captured travels as a whole, though a frozen embedding is read by rows.
            self._frozen |= self._traced_tables
            trace = super()._trace(spec)
        while changed := changed_variables(trace.function, self._model):
            if again := [one.name for one in changed if any(one is before for before in self._changed)]:
                raise NotImplementedError(
                    f"Received: a train_step of model '{self._model.name}' that changes variable '{again[0]}' in a "
                    "tf.function of its own, under ParameterServerStrategy(mode='sync'). All workers would write it, "
                    "in no order. Expected: a method without tf.function; or mode='async'."
                )
            self._changed += changed
            trace = super()._trace(spec)
        if self._strategy._num_workers > 1:
            row_trial.try_once(self._traced_step, len(trace.function.graph.get_operations()), _said_of_workers)
        return trace

    def _trace_once(self, spec: Any) -> ShardTrace:
        def step(shard: tf.Tensor, weight: tf.Tensor, *flat: tf.Tensor) -> Any:
            return self._shard_step(spec, shard, weight, list(flat))

        function = self._concrete(step, [_SHARD, _WEIGHT, *flatten_spec(spec)])
        return ShardTrace(
            function, self._traced_logs, self._traced_updates, self._traced_state, *self._traced_gradients
        )

    def _shard_step(self, spec: Any, shard: tf.Tensor, weight: tf.Tensor, flat: list[tf.Tensor]) -> Any:
        captured: list[tuple[keras.optimizers.Optimizer, list, list]] = []
        copies: list[tf.Tensor] = []
        graph = tf.compat.v1.get_default_graph()
        # How many operations the graph has when gradients are applied.
        applied_at: list[int] = []

        def note_apply() -> None:
            if tf.compat.v1.get_default_graph() is not graph:
                raise NotImplementedError(
                    f"Received: a train_step of model '{self._model.name}' that applies gradients in a branch (tf.cond)"
                    " or loop under ParameterServerStrategy(mode='sync'), which applies them after the step. Expected: "
                    "optimizer.apply in every step; or mode='async'."
                )
            applied_at.append(len(graph.get_operations()))

        def enter(stack: contextlib.ExitStack) -> None:
            # Tells Keras' losses and metrics the weight of this shard, so that sums and means are of the whole batch.
            step = self._traced_step = KerasStep("train", self._model, self._step)
            step.note_batch(unflatten(spec, flat))
            step.begin_shard(weight)
            step.shard = shard
            of_optimizers = [one for optimizer in optimizers_of(self._model) for one in optimizer.variables]
            variables = [*self._model.variables, *held_variables(self._model), *of_optimizers]
            same = [one for one in map(own_copy, variables) if one is not None]
            step.here.values = LocalValues(
                graph,
                [shard, weight, *flat],
                same=same,
                watched=[],
                others=[],
                by_row=scopes_by_row(self._model),
            )
            stack.enter_context(traced(self._strategy, step))
            for optimizer in optimizers_of(self._model):
                scale_loss, apply = self._weighting(optimizer, step), _recorder(optimizer, captured, note_apply)
                stack.enter_context(shadowed(optimizer, scale_loss=scale_loss, apply=apply))
            for loss in losses_of(self._model):
                stack.enter_context(shadowed(loss, call=noting_arguments(step, loss, loss.call)))
            copies.extend(stack.enter_context(_copied(variable)) for variable in self._changed)

        # Not only metrics but all variables that are not trained are captured, and optimizers only record their
        # gradients: the function changes nothing, so that a shard can be computed twice.
        others = [one for one in self._model.non_trainable_variables if id(one) not in self._frozen]
        before = [tf.identity(tf.zeros(v.shape, v.dtype)) for v in self.variables]
        values = [tf.identity(v.value) for v in others]
        after, logs, updates = self._run(spec, flat, before + values, self.variables + others, enter)
        after, changed = after[: len(before)], after[len(before) :]
        self._check_additive(before, after)
        state = [(v, new) for v, old, new in zip(others, values, changed, strict=True) if not _is_same(old, new)]
        if self._strategy._num_workers > 1:
            self._warn_of_state(state)
        same = [(v, old) for v, old, new in zip(others, values, changed, strict=True) if _is_same(old, new)]
        self._traced_tables = {id(v) for v, old in same if _is_read_by_rows(old)}
        read = tf.raw_ops.ReadVariableOp
        state += [(v, read(resource=copy, dtype=v.dtype)) for v, copy in zip(self._changed, copies, strict=True)]
        self._traced_state = [variable for variable, _ in state]
        packed = self._pack(captured)
        for optimizer, gradients, trained in captured:
            self._warn_of_results([part for one in gradients for part in tf.nest.flatten(one, expand_composites=True)])
            # What writes a copy takes the new value.
            written = [(v, x) for v, copy in zip(self._changed, copies, strict=True) for x in _written_to(copy)]
            updated = [*trained, *(one for one in optimizer.variables if one.name != "learning_rate")]
            self._check_order([*state, *written], updated, graph.get_operations()[applied_at[0] :])
        self._warn_of_results([new for _, new in state])
        return self._packing.pack(after), logs, updates, packed, [new for _, new in state]

    def _warn_of_state(self, state: Sequence[tuple[keras.Variable, tf.Tensor]]) -> None:
        """Warns once of state that shards update in another way than by means over their rows."""
        values = self._traced_step.parts[0].values
        list(values.accesses())
        unsafe = [
            variable
            for variable, new in state
            if values.dependence_of(new) not in (Dependence.SAME, Dependence.MEAN)
            and rule_of(variable) == "none"
            and not is_of_keras(self._model, variable)
            and is_new(variable, "state")
        ]
        if unsafe:
            others = f" (and {len(unsafe) - 1} like it)" if len(unsafe) > 1 else ""
            warnings.warn(
                f"Received: variable '{unsafe[0].path}'{others}, which each worker updates from its own rows of the "
                f"batch. The workers' average is kept, and of whole numbers the first one's, {NO_MEAN}. Expected: "
                "add_weight(..., aggregation=) with 'mean', 'sum' or 'only_first_replica', where one of them is right; "
                "or mode='async' with max_inflight=1, where each worker gets whole batches.",
                stacklevel=2,
            )

    def _check_order(
        self, state: Sequence[tuple[Any, tf.Tensor]], updated: Sequence[Any], late: Sequence[tf.Operation]
    ) -> None:
        """Refuses a step that computes state from what its gradients have updated: they do so after the step.

        Args:
            state: variables and what they become, or are computed from.
            updated: the variables that gradients update.
            late: operations of the step after it has applied its gradients.

        Raises:
            NotImplementedError: if one of these reads an updated variable for the state.
        """
        names = {id(own_copy(one).handle): getattr(one, "path", one.name) for one in updated}
        graph = tf.compat.v1.get_default_graph()
        handles = {inner.name: names[id(outer)] for outer, inner in graph.captures if id(outer) in names}
        reads = {
            read.name: handles[one.name]
            for operation in late
            for one in operation.inputs
            if one.name in handles
            for read in operation.outputs
        }
        for variable, value in state if reads else ():
            for read, name in reads.items():
                if depends(value, {read}, set()):
                    raise NotImplementedError(
                        f"Received: a train_step of model '{self._model.name}' that computes variable "
                        f"'{getattr(variable, 'path', variable.name)}' from '{name}' after optimizer.apply, under "
                        "ParameterServerStrategy(mode='sync'), which updates that one after the step. Expected: the "
                        "same in on_train_batch_end of a callback; or mode='async'."
                    )

    def _weighting(self, optimizer: keras.optimizers.Optimizer, step: KerasStep) -> Callable:
        scale_loss = optimizer.scale_loss

        def weighted(loss: Any) -> tf.Tensor:
            # Before back-propagation, so that float16 overflows where it does in one process.
            self._scaled.add(id(optimizer))
            loss = step.as_mean(loss)
            return scale_loss(loss * tf.cast(step.weight, loss.dtype))

        return weighted

    def _pack(self, captured: list[tuple[keras.optimizers.Optimizer, list, list]]) -> list[tf.Tensor]:
        if len(captured) > 1:
            names = ", ".join(f"'{optimizer.name}'" for optimizer, _, _ in captured)
            raise NotImplementedError(
                f"Received: a train_step that applies gradients {len(captured)} times (optimizers {names}) under "
                "ParameterServerStrategy(mode='sync'). The second gradient would have to wait for the first update, on "
                "all workers. Expected: one optimizer, applied once a step; or mode='async'."
            )
        self._traced_gradients = None, None
        if not captured:
            return []
        optimizer, gradients, variables = captured[0]
        check_float8(variables)
        is_of_no_row = self._traced_step.parts[0].values.is_of_no_row
        common = {i for i, gradient in enumerate(gradients) if is_common(gradient, is_of_no_row)}
        gradients = [numbered(one, is_of_no_row) if i in common else one for i, one in enumerate(gradients)]
        self._traced_gradients = _Gradients(gradients, variables, id(optimizer) in self._scaled, common), optimizer
        return self._traced_gradients[0].pack(gradients)

    def _apply_function(self, trace: ShardTrace, shards: int) -> tf.types.experimental.ConcreteFunction:
        key = id(trace), shards
        if key not in self._apply_functions:
            each = len(trace.gradients.destinations)

            # Runs from the coordinator. Sums and updates are placed on the servers of the variables, where the
            # gradients are already.
            def apply(weights: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
                def replica(weights: tf.Tensor, tensors: Sequence[tf.Tensor]) -> None:
                    parts = [list(tensors[i * each : (i + 1) * each]) for i in range(shards)]
                    with sparse_updates(trace.optimizer), trace.gradients.checked(trace.optimizer):
                        trace.optimizer.apply(*trace.gradients.sum(parts, weights))

                self._strategy._run_replica(replica, weights, list(tensors))
                return tf.constant(0)

            specs = [tf.TensorSpec([shards], tf.float64), *trace.gradients.specs * shards]
            self._apply_functions[key] = self._concrete(apply, specs)
        return self._apply_functions[key]


def _said_of_workers(message: str) -> str:
    """What is said of replicas, of workers that have no way to exchange rows."""
    received, *_ = message.split(" Expected: ")
    return (
        f"{received.replace('replica', 'worker')} Expected: what has a value for each row, or is a mean of such; or "
        "mode='async' with max_inflight=1, where each worker gets whole batches."
    )


def changed_variables(function: tf.types.experimental.ConcreteFunction, model: keras.Model) -> list[tf.Variable]:
    """The `tf.Variable`s of a model's layers that a function writes.

    Raises:
        NotImplementedError: if it writes another variable.
    """
    captures = {inner.name: outer for outer, inner in function.graph.captures}
    written = {
        one.name
        for operation in function.graph.get_operations()
        for one in get_read_write_resource_inputs(operation)[1]
        # Tables and the like have no shape.
        if one.name in captures and getattr(captures[one.name], "_handle_data", None) is not None
    }
    held = {id(variable.handle): variable for variable in held_variables(model)}
    handles = [captures[name] for name in sorted(written)]
    if others := [handle for handle in handles if id(handle) not in held]:
        names = [variable.name for variable in function.graph.variables if variable.handle is others[0]]
        raise NotImplementedError(
            f"Received: a train_step of model '{model.name}' that changes variable '{(names or ['?'])[0]}', which is "
            "not an attribute of one of its layers, under ParameterServerStrategy(mode='sync'). All workers would "
            "write it, in no order. Expected: self.add_weight(trainable=False), or a tf.Variable, as an attribute of a "
            "layer or the model (in a list or dict, too); a keras.random.SeedGenerator for random numbers; or "
            "mode='async'."
        )
    return [held[id(handle)] for handle in handles]


@contextlib.contextmanager
def _copied(variable: tf.Variable) -> Iterator[tf.Tensor]:
    """While a step is traced, it reads and writes a copy of a variable, which is made in each call: its handle."""
    copy = tf.raw_ops.VarHandleOp(dtype=variable.dtype, shape=variable.shape, shared_name=context.anonymous_name())
    tf.raw_ops.AssignVariableOp(resource=copy, value=variable.read_value())
    # A strategy's variable is a shell around the one with the handle.
    with shadowed(variable.get() if hasattr(variable, "get") else variable, _handle=copy):
        yield copy


def _is_read_by_rows(value: tf.Tensor) -> bool:
    """Whether rows are taken of a variable's value."""
    takers = value.consumers()
    takers += [taker for one in takers if one.type == "Cast" for taker in one.outputs[0].consumers()]
    return any(taker.type == "GatherV2" for taker in takers)


def _written_to(handle: tf.Tensor) -> list[tf.Tensor]:
    """What the operations take that have this handle of a variable."""
    return [one for operation in handle.consumers() for one in operation.inputs if one.dtype != tf.resource]


def _combined(
    variable: keras.Variable | tf.Variable, values: Sequence[np.ndarray], weights: Sequence[float]
) -> np.ndarray:
    """The new value of a variable that each shard has updated, as its `aggregation` says."""
    # TensorFlow's variables have a number with a name.
    aggregation = getattr(variable.aggregation, "name", variable.aggregation).lower()
    if aggregation == "sum":
        old = own_copy(variable).numpy()
        return old + sum(value - old for value in values)
    if aggregation == "only_first_replica" or not tf.as_dtype(variable.dtype).is_floating:
        return values[0]
    return mean(values, weights)


def _recorder(optimizer: keras.optimizers.Optimizer, captured: list, note: Callable[[], Any]) -> Any:
    def apply(grads: Any, trainable_variables: Any = None) -> None:
        note()
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        captured.append((optimizer, list(grads), list(variables)))

    return apply


def _is_same(before: tf.Tensor, after: tf.Tensor) -> bool:
    while after is not before and after.op.type == "Identity":
        after = after.op.inputs[0]
    return after.name == before.name


@dataclasses.dataclass
class _Group:
    """Variables of one dtype on one server.

    Attributes:
        device: the device of the server.
        dense: positions of the variables with dense gradients.
        packing: how the dense gradients are packed.
        sparse: positions of the variables with sparse gradients.
        widths: the number of values in each row of a sparse one.
    """

    device: str
    dense: list[int]
    packing: Packing
    sparse: list[int]
    widths: list[int]


class _Gradients:
    """How the gradients of a step travel.

    To each server goes one vector of values for each dtype, and one of indices if there are sparse gradients:

        values    | dense gradients, flat | rows of sparse gradient 1 | rows of 2 | ...
        indices   | number of rows of 1, of 2, ... | indices of 1 | indices of 2 | ...

    Args:
        gradients: of a traced step; `None` where there is none.
        variables: whose gradients they are.
        are_weighted: whether they have the weight of their shard already.
        common: the places of those that are `numbered`.

    Attributes:
        destinations: the device that each tensor goes to.
        specs: the specification of each tensor.
    """

    def __init__(
        self, gradients: Sequence[Any], variables: Sequence[keras.Variable], are_weighted: bool, common: Set[int]
    ):
        self._variables, self._are_weighted, self._common = variables, are_weighted, common
        self._halves = list(map(is_half, gradients))
        self._groups: list[_Group] = []
        self.destinations: list[str] = []
        self.specs: list[tf.TensorSpec] = []
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        places = {i: (own_copy(variables[i]).device, gradients[i].dtype) for i in present}
        for place in dict.fromkeys(places.values()):
            own = [i for i in present if places[i] == place]
            sparse = [i for i in own if isinstance(gradients[i], tf.IndexedSlices)]
            dense = [i for i in own if i not in sparse]
            # The gradient of a weight that is used sparsely, too, has no static shape.
            packing = Packing([variables[i].shape for i in dense], [gradients[i].dtype for i in dense])
            widths = [math.prod(variables[i].shape[1:]) for i in sparse]
            self._groups.append(_Group(place[0], dense, packing, sparse, widths))
            self.specs += [tf.TensorSpec([None], place[1]), *[tf.TensorSpec([None], tf.int64)][: len(sparse)]]
            self.destinations += [place[0]] * (2 if sparse else 1)

    def pack(self, gradients: Sequence[Any]) -> list[tf.Tensor]:
        """The tensors to send."""
        tensors = []
        for group in self._groups:
            slices = [gradients[i] for i in group.sparse]
            values = [tf.reshape(part.values, [-1]) for part in slices]
            tensors.append(tf.concat([*group.packing.pack([gradients[i] for i in group.dense]), *values], 0))
            if slices:
                indices = [tf.cast(part.indices, tf.int64) for part in slices]
                tensors.append(tf.concat([[tf.size(part, tf.int64) for part in indices], *indices], 0))
        return tensors

    def sum(self, parts: Sequence[list[tf.Tensor]], weights: tf.Tensor) -> tuple[list, list[keras.Variable]]:
        """The weighted sum of what several workers have sent, as gradients of the variables, on their servers."""
        rest = [iter(part) for part in parts]
        gradients: list = [None] * len(self._variables)
        for group in self._groups:
            with tf.device(group.device):
                vectors = [next(part) for part in rest]
                if not self._are_weighted:
                    vectors = [v * tf.cast(w, v.dtype) for v, w in zip(vectors, tf.unstack(weights), strict=True)]
                total = tf.add_n([vector[: group.packing.length] for vector in vectors])
                dense = group.packing.unpack([total] if group.dense else [])
                for i, gradient in zip(group.dense, dense, strict=True):
                    gradients[i] = gradient
                if group.sparse:
                    values = [vector[group.packing.length :] for vector in vectors]
                    self._join_slices(group, values, [next(part) for part in rest], gradients)
        return gradients, list(self._variables)

    def checked(self, optimizer: keras.optimizers.Optimizer) -> contextlib.AbstractContextManager:
        """While it is entered, loss scaling tests the sum of gradients in float16 as one process tests its own."""
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return contextlib.nullcontext()
        return shadowed(optimizer, check_finite=functools.partial(check_finite, optimizer.check_finite, self._halves))

    def _join_slices(self, group: _Group, vectors: list[tf.Tensor], indices: list[tf.Tensor], gradients: list) -> None:
        """Unpacks sparse gradients, and joins the rows of all workers: adding up most is left to the optimizer."""
        count = len(group.sparse)
        counts = [part[:count] for part in indices]
        rows = [tf.split(part[count:], own, num=count) for part, own in zip(indices, counts, strict=True)]
        values = [tf.split(v, own * group.widths, num=count) for v, own in zip(vectors, counts, strict=True)]
        for position, i in enumerate(group.sparse):
            shape = self._variables[i].shape
            joined = tf.IndexedSlices(
                tf.concat([tf.reshape(own[position], [-1, *shape[1:]]) for own in values], 0),
                tf.concat([own[position] for own in rows], 0),
                tf.constant(list(shape), tf.int64),
            )
            gradients[i] = added_by_number(joined, tf.int64) if i in self._common else joined
