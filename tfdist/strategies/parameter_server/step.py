"""A Keras step as a function that a worker runs: it returns what it adds to the metrics instead of changing them.

    worker                                                      parameter servers
    metrics := 0                                                variables
    forward pass, loss, backward pass   <── reads variables ────
    optimizer                           ──── updates them there ──>
    return: metrics (what this step adds, if it only adds), logs, arguments of `update_state` of all other metrics
      │
      v
    coordinator: adds to the variables of the metrics

In a function, everything that has no other device is on the worker; updates of variables are on their servers. A worker
that dies in the middle leaves nothing behind in the metrics: its step is done again by another one, and counts once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.arguments import is_new
from tfdist.compat.upstream import IteratorSpec, get_read_write_resource_inputs, global_state, nest
from tfdist.inspection.model_state import metrics_of, optimizers_of
from tfdist.steps.derived_logs import DerivedLogs, marked_result, metric_of, results_before
from tfdist.steps.keras_step import shadowed
from tfdist.strategies.parameter_server.data import (
    COORDINATOR,
    Packing,
    any_rows,
    fetch,
    flatten,
    flatten_spec,
    local_constant,
    unflatten,
)

_TRANSPARENT = {"Identity", "Cast", "Reshape", "EnsureShape", "StopGradient"}


class CapturedState(keras.StatelessScope):
    """A scope in which some variables have given values and keep their updates here; all others act as always.

    Args:
        variables: the variables.
        values: tensors of their shapes.

    Example:
        >>> count = keras.Variable(1.0)
        >>> with CapturedState([count], [tf.constant(5.0)]) as state:
        ...     _ = count.assign_add(1.0)
        >>> float(state.values()[0]), float(count.numpy())
        (6.0, 1.0)
    """

    def __init__(self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]):
        # Without `collect_losses`, the losses that layers add would be lost.
        super().__init__(list(zip(variables, values, strict=True)), collect_losses=True, initialize_variables=False)
        self._variables = list(variables)
        self._ids = {id(variable) for variable in variables}
        self._graph = tf.compat.v1.get_default_graph()

    def holds(self, variable: keras.Variable) -> bool:
        """Whether a variable is one of those captured."""
        return id(variable) in self._ids

    def values(self) -> list[tf.Tensor]:
        """The current values."""
        return [self.get_current_value(variable) for variable in self._variables]

    def get_current_value(self, variable: keras.Variable) -> Any:
        # Keras' regularizers ask the scope for the weights, which are not captured.
        return super().get_current_value(variable) if self.holds(variable) else variable._value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if self.holds(variable):
            if tf.compat.v1.get_default_graph() is not self._graph:
                raise NotImplementedError(
                    f"Received: variable '{variable.path}', assigned in a branch (tf.cond), a loop or a tf.function of "
                    "a step, under ParameterServerStrategy. What a step does to metrics, and with mode='sync' to other "
                    "variables, leaves a worker as a result of the step. Expected: an assignment outside of these, of "
                    "tf.where(condition, new, old), say; for a metric, update_state(..., sample_weight=0) for what "
                    "is not to count."
                )
            super().add_update(update)
        else:
            variable._direct_assign(value)


def only_adds(before: tf.Tensor, after: tf.Tensor, states: Iterable[tf.Tensor]) -> bool:
    """Whether `after` is `before` plus something that depends on no state.

    If so, what several workers add, each starting from 0, sums up to what one process would have added.

    Args:
        before: the value of a variable at the beginning of a traced function.
        after: its value at the end.
        states: the values of all variables at the beginning, `before` among them.

    Example:
        >>> with tf.Graph().as_default():
        ...     state, x = tf.compat.v1.placeholder("float32", []), tf.compat.v1.placeholder("float32", [])
        ...     only_adds(state, state + 2 * x, [state]), only_adds(state, tf.maximum(state, x), [state])
        (True, False)
    """
    names = {state.name for state in states}
    independent: set[str] = set()

    def is_sum(tensor: tf.Tensor) -> bool:
        if tensor.name == before.name:
            return True
        operation, inputs = tensor.op, tensor.op.inputs
        if operation.type in _TRANSPARENT:
            return is_sum(inputs[0])
        if operation.type in ("Add", "AddV2"):
            return any(is_sum(a) and not depends(b, names, independent) for a, b in (inputs, inputs[::-1]))
        return operation.type == "Sub" and is_sum(inputs[0]) and not depends(inputs[1], names, independent)

    return is_sum(after)


def depends(tensor: tf.Tensor, names: set[str], independent: set[str]) -> bool:
    """Whether a tensor is computed from one of these names; fills in the operations that are known not to be."""
    waiting, seen = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        if tensor.name in names:
            return True
        if tensor.op.name not in seen and tensor.op.name not in independent:
            seen.add(tensor.op.name)
            waiting.extend(tensor.op.inputs)
    independent |= seen
    return False


@dataclasses.dataclass
class Trace:
    """A traced step, or several, and what its outputs mean.

    Attributes:
        function: the function that a worker runs.
        logs: how the step's logs are put together.
        updates: for each update of a metric that is not additive, the metric and the structure of the arguments.
    """

    function: tf.types.experimental.ConcreteFunction
    logs: Logs
    updates: list[tuple[keras.Metric, Any]]


@dataclasses.dataclass
class StepOutcome:
    """The results of one or several steps of a worker.

    Attributes:
        logs: how the last step's logs are put together.
        additions: what to add to each variable of a metric.
        own: for each part of the last step's batch its weight, and what the worker returns of the logs.
        updates: for each metric that is not additive, the arguments of `update_state`.
        position: the number of the last step, in the order in which they were handed out.
    """

    logs: Logs
    additions: list[np.ndarray]
    own: list[tuple[float, list[np.ndarray]]]
    updates: list[tuple[keras.Metric, tuple, dict]]
    position: int = 0


class Logs:
    """How the logs of a traced step are put together, from what workers return and the metrics on the coordinator.

    Args:
        logs: of the step.

    Attributes:
        own: what a worker returns: logs that have nothing to do with metrics, and what else those that do are made of.
    """

    def __init__(self, logs: Any):
        leaves = [leaf if metric_of(leaf) else tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(logs)]
        self._structure = tf.nest.map_structure(lambda _: None, logs)
        self._derived = derived = DerivedLogs(leaves)
        self._plain = [i for i in range(len(leaves)) if i not in derived.positions]
        self.own = [leaves[i] for i in self._plain] + derived.inputs
        self._compute = derived.compute
        if not derived.are_results:
            self._compute = tf.function(derived.compute, autograph=False, reduce_retracing=True)

    def read(self, parts: Sequence[tuple[float, list[np.ndarray]]]) -> Any:
        """The logs, with the metrics as they are now.

        Args:
            parts: for each part of the batch its weight, and the values of `own`.
        """
        results = {id(metric): tf.nest.flatten(metric.result()) for metric, _ in self._derived.sources}
        given = [results[id(metric)][i] for metric, i in self._derived.sources]
        flat, count = [], len(self._plain)
        for _, own in parts:
            with tf.device(COORDINATOR):
                computed = self._compute(given, list(map(tf.constant, own[count:])))
            values = dict(zip((*self._plain, *self._derived.positions), (*own[:count], *computed), strict=True))
            flat.append([np.asarray(values[i]) for i in range(len(values))])
        weights = [weight for weight, _ in parts]
        return tf.nest.pack_sequence_as(self._structure, [_of_batch(of, weights) for of in zip(*flat, strict=True)])


def _of_batch(values: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """The mean over the rows of a batch of a log of its parts; of integers, the last part's value."""
    is_one = len(values) == 1 or not tf.as_dtype(values[-1].dtype).is_floating
    return values[-1] if is_one else mean(values, weights)


def mean(values: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """The weighted mean of arrays, in their dtype; the weights add up to 1."""
    return np.asarray(sum(np.float64(w) * v for w, v in zip(weights, values, strict=True)), values[0].dtype)


class StepFunction:
    """Traces a step of a model for the workers.

    Args:
        strategy: a `ParameterServerStrategy`.
        model: the model.
        step: `model.train_step` or `model.test_step`.

    Attributes:
        variables: the variables of all metrics.
    """

    def __init__(self, strategy: Any, model: keras.Model, step: Callable):
        self._strategy, self._model, self._step = strategy, model, step
        self._forwarded: list[keras.Metric] = []
        self._not_additive: list[keras.Variable] = []
        self._made: list[keras.Variable] = []
        self._traced_logs: Logs | None = None
        self._traced_updates: list[tuple[keras.Metric, Any]] = []
        self._traces: dict[str, Trace] = {}
        self._named: tuple[Any, str] = None, repr(None)
        self._find_metrics()

    @property
    def is_loopable(self) -> bool:
        """Whether several steps can be one call: if all metrics add up. Known after the first trace."""
        return not self._forwarded

    def single(self, spec: Any) -> Trace:
        """The function of one step; it takes the dense tensors of a batch."""
        key = self._name_of(spec)
        if key not in self._traces:
            self._traces[key] = self._trace(spec)
        return self._traces[key]

    def several(self, spec: Any) -> Trace:
        """The function of one or more steps.

        It takes the positions at which the batches begin (and the last one ends), and the concatenated batches: one
        transfer to the worker for all of them.
        """
        key = f"several {self._name_of(spec)}"
        if key not in self._traces:
            single, specs = self.single(spec).function, flatten_spec(spec)

            def several(splits: tf.Tensor, *flat: tf.Tensor) -> Any:
                def batch(i: tf.Tensor, _: Any) -> list[tf.Tensor]:
                    rows = slice(splits[i], splits[i + 1])
                    return [tf.ensure_shape(t[rows], own.shape) for t, own in zip(flat, specs, strict=True)]

                def is_left(i: tf.Tensor, _: Any) -> tf.Tensor:
                    return i < tf.size(splits) - 1

                return self._loop(spec, single, tf.constant(0), is_left, batch, lambda i, source: source)[1:]

            function = self._concrete(several, [_SPLITS, *any_rows(specs)])
            self._traces[key] = Trace(function, self._traced_logs, [])
        return self._traces[key]

    def on_iterator(self, element_spec: Any, spec: Any) -> Trace:
        """The function of some steps on a worker's own data.

        It takes an iterator and the number of steps. It returns the number of steps that were done, too: fewer at the
        end of the data.

        Raises:
            ValueError: if a metric is not additive.
        """
        key = f"iterator {self._name_of(spec)}"
        if key not in self._traces:
            single = self.single(spec).function
            if self._forwarded:
                raise ValueError(
                    f"Received: metric '{self._forwarded[0].name}', whose state is not a sum, and input on the "
                    "workers. Expected: metrics that add up; or ParameterServerStrategy(worker_input=False), with "
                    "which the coordinator updates the others."
                )

            def on_iterator(iterator: Any, steps: tf.Tensor) -> Any:
                def following(i: tf.Tensor, batch: tf.experimental.Optional) -> tf.experimental.Optional:
                    # Take no batch more than was asked for: it would be lost.
                    return tf.cond(i + 1 < steps, iterator.get_next_as_optional, lambda: batch)

                def is_left(i: tf.Tensor, batch: tf.experimental.Optional) -> tf.Tensor:
                    return tf.logical_and(i < steps, batch.has_value())

                first = iterator.get_next_as_optional()
                return self._loop(spec, single, first, is_left, lambda i, b: flatten(b.get_value()), following)

            function = self._concrete(on_iterator, [IteratorSpec(element_spec), tf.TensorSpec([], tf.int32)])
            self._traces[key] = Trace(function, self._traced_logs, [])
        return self._traces[key]

    def _name_of(self, spec: Any) -> str:
        """A specification as text. Of many components it takes a while; an iterator has one object for all steps."""
        if self._named[0] is not spec:
            self._named = spec, repr(spec)
        return self._named[1]

    def outcome(self, trace: Trace, outputs: Sequence[tf.Tensor]) -> StepOutcome:
        """Fetches what a call of a function has returned."""
        vectors, logs, updates = outputs
        return StepOutcome(
            trace.logs,
            self._packing.unpack([fetch(vector) for vector in vectors]),
            [(1.0, [fetch(value) for value in logs])],
            [
                (metric, *unflatten(arguments, [local_constant(fetch(value)) for value in values]))
                for (metric, arguments), values in zip(trace.updates, updates, strict=True)
            ],
        )

    def _trace(self, spec: Any) -> Trace:
        """Traces one step, again and again until the trace can be used.

        A first trace may show that the step makes variables (an optimizer builds its slots, say), which cannot be made
        while a function is traced; or that a metric is no sum, so that the coordinator has to update it.
        """
        rounds = 0
        while True:
            if not self._traces:
                # Some metrics make their variables when they are updated first: F1Score, AUC(multi_label=True).
                self._find_metrics()
            self._not_additive = []
            try:
                trace = self._trace_once(spec)
            except AttributeError:
                # The step changes a variable that it has just made, which is only an initial value as yet.
                if not self._made:
                    raise
            if self._made:
                rounds += 1
                if rounds > _ROUNDS:
                    raise ValueError(
                        f"Received: a step that makes variable '{self._made[0].path}' each time. Expected: variables, "
                        "layers, metrics and optimizers are made once, in __init__ or build."
                    )
                # The trace has their initial values in their place. Make the variables, and trace again.
                with tf.init_scope(), self._strategy.scope():
                    for variable in self._made:
                        variable._deferred_initialize()
                self._made = []
            elif self._not_additive:
                self._forward(self._not_additive)
            else:
                return trace

    def _find_metrics(self) -> None:
        self._metrics = metrics_of(self._model)
        self.variables = list({id(v): v for metric in self._metrics for v in metric.variables}.values())
        self._packing = Packing([v.shape for v in self.variables], [v.dtype for v in self.variables])

    def _trace_once(self, spec: Any) -> Trace:
        # TensorFlow reports the line of an error in the model's code only if the function has a plain name.
        def step(*flat: tf.Tensor) -> Any:
            return self._step_from_zero(spec, list(flat))

        function = self._concrete(step, flatten_spec(spec))
        return Trace(function, self._traced_logs, self._traced_updates)

    def _concrete(self, function: Callable, specs: Sequence[tf.TensorSpec]) -> tf.types.experimental.ConcreteFunction:
        with self._strategy.scope():
            return tf.function(function, autograph=False).get_concrete_function(*specs)

    def _step_from_zero(self, spec: Any, flat: list[tf.Tensor]) -> Any:
        # Metrics begin with 0, so what they become is what this step adds.
        before = [tf.identity(tf.zeros(v.shape, v.dtype)) for v in self.variables]
        after, logs, updates = self._run(spec, flat, before)
        self._check_additive(before, after)
        operations = tf.compat.v1.get_default_graph().get_operations()
        self._warn_of_results([x for one in operations if get_read_write_resource_inputs(one)[1] for x in one.inputs])
        return self._packing.pack(after), logs, updates

    def _warn_of_results(self, tensors: Sequence[tf.Tensor]) -> None:
        """Warns once of a metric by whose result a step changes variables: what others have added is not in it.

        Args:
            tensors: what the step changes variables by.
        """
        found, _ = results_before(tensors)
        for metric in {id(metric): metric for metric, _ in found.values()}.values():
            if is_new(metric, "gradients"):
                warnings.warn(
                    f"Received: a {self._step.__name__} of model '{self._model.name}' that changes variables by the "
                    f"result of metric '{metric.name}'. A worker has there what its own rows have added in this call "
                    "only, so that training differs from one process. Expected: a variable of the model that keeps the "
                    "number, add_weight(trainable=False).",
                    stacklevel=2,
                )

    def _check_additive(self, before: list[tf.Tensor], after: list[tf.Tensor]) -> None:
        self._not_additive = [
            variable
            for variable, old, new in zip(self.variables, before, after, strict=True)
            if not only_adds(old, new, before)
        ]

    def _loop(
        self,
        spec: Any,
        single: tf.types.experimental.ConcreteFunction,
        source: Any,
        is_left: Callable,
        batch: Callable,
        following: Callable,
    ) -> tuple:
        """Traces steps, one batch after the other (parallel_iterations=1), as in one process.

        i, source ──> batch(i, source) ──> step ──> logs of the last step
                      metrics so far ─────┘   └──> metrics, for the next step
        while is_left(i, source);  source = following(i, source)
        """
        _, logs, _ = single.structured_outputs
        state = [tf.zeros(v.shape, v.dtype) for v in self.variables]
        begin = [tf.constant(0), source, state, [tf.zeros([d or 0 for d in log.shape], log.dtype) for log in logs]]
        shapes = [
            tf.TensorShape([]),
            tf.type_spec_from_value(source),
            [t.shape for t in state],
            [t.shape for t in logs],
        ]

        def body(i: tf.Tensor, source: Any, state: list, _: list) -> Any:
            after, logs, _ = self._run(spec, batch(i, source), state)
            return i + 1, following(i, source), after, logs

        done, _, state, logs = tf.while_loop(
            lambda i, source, *_: is_left(i, source), body, begin, shape_invariants=shapes, parallel_iterations=1
        )
        return done, self._packing.pack(state), logs, []

    def _run(
        self,
        spec: Any,
        flat: list[tf.Tensor],
        state: list[tf.Tensor],
        variables: Sequence[keras.Variable] | None = None,
        enter: Callable[[contextlib.ExitStack], Any] = lambda stack: None,
    ) -> tuple[list, list, list]:
        """Traces one step in a replica's context.

        Args:
            spec: the specification of the batch.
            flat: its dense tensors.
            state: the values of the variables that are returned instead of changed.
            variables: these variables; by default those of the metrics.
            enter: enters further contexts for the step.

        Returns:
            The values that the variables would have, the logs, and the arguments of updates of metrics.
        """
        variables = self.variables if variables is None else variables
        updates: list[tuple[keras.Metric, tuple, dict]] = []

        def recorder(metric: keras.Metric) -> Callable:
            return lambda *args, **kwargs: updates.append((metric, args, kwargs))

        def replica(flat: list[tf.Tensor]) -> Any:
            with contextlib.ExitStack() as stack:
                stack.callback(self._collect_made)
                for metric in self._metrics:
                    stack.enter_context(shadowed(metric, result=marked_result(metric)))
                for metric in self._forwarded:
                    stack.enter_context(shadowed(metric, update_state=recorder(metric)))
                for optimizer in optimizers_of(self._model):
                    # Adagrad touches the rows with a gradient only.
                    stack.enter_context(sparse_updates(optimizer))
                captured = stack.enter_context(CapturedState(variables, state))
                enter(stack)
                logs = self._step(unflatten(spec, flat))
                return captured.values(), self._trace_logs(logs, state[: len(self.variables)])

        after, logs = self._strategy._run_replica(replica, flat)
        place_python()
        self._traced_updates = [(metric, (args, kwargs)) for metric, args, kwargs in updates]
        arguments = [flatten(arguments) for _, arguments in self._traced_updates]
        return [tf.identity(value) for value in after], logs, arguments

    def _collect_made(self) -> None:
        """Takes over the variables that Keras has put off to make; it lists them for each thread."""
        self._made += global_state.get_global_attribute("uninitialized_variables") or []
        global_state.set_global_attribute("uninitialized_variables", [])

    def _trace_logs(self, logs: Any, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        self._traced_logs = traced = Logs(logs)
        names = {tensor.name for tensor in state}
        if any(depends(value, names, set()) for value in traced.own) and is_new(self, "logs"):
            paths = [path for path, leaf in nest.flatten_with_joined_string_paths(logs) if not metric_of(leaf)]
            warnings.warn(
                f"Received: a {self._step.__name__} of model '{self._model.name}' whose logs ({', '.join(paths)}) are "
                "computed from the variables of a metric. A worker has only what it has added to them itself. "
                "Expected: logs that are computed from metric.result(), called in the step itself, outside of tf.cond "
                "and loops.",
                stacklevel=2,
            )
        return traced.own

    def _forward(self, variables: list[keras.Variable]) -> None:
        """Lets the coordinator update the metrics that have these variables; workers return the arguments for it."""
        for metric in self._metrics:
            own = {id(v) for v in metric._variables}
            if any(id(variable) in own for variable in variables):
                if metric in self._forwarded:
                    raise ValueError(
                        f"Received: metric '{metric.name}' of class {type(metric).__name__}, whose state changes "
                        "otherwise than by adding to it, and without update_state. What several workers do to such a "
                        "state cannot be put together. Expected: a metric whose update_state changes its state."
                    )
                self._forwarded.append(metric)


def place_python() -> None:
    """Lets Python functions of a traced step (`tf.py_function`) run on the coordinator: workers do not have them."""
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if operation.type in ("PyFunc", "PyFuncStateless", "EagerPyFunc"):
            operation._set_device(COORDINATOR)


@contextlib.contextmanager
def sparse_updates(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """While a step is traced, lets Keras' Adagrad update only the rows of a table that have a gradient.

    Keras' own update reads and writes the whole table, although rows without a gradient do not change. SGD without
    momentum is row-wise in Keras already. All other optimizers are left alone: they change every row in every step,
    because moments decay (Adam, momentum, RMSprop, Adadelta, ...), or compute the value from them (Ftrl).

    Where a row occurs several times, the accumulator gets the sum of the squares of its gradients, not the square of
    their sum, as with Keras and `tf.IndexedSlices` in one process.

    Args:
        optimizer: any optimizer, also a `keras.optimizers.LossScaleOptimizer` around one.

    Example:
        >>> optimizer, table = keras.optimizers.Adagrad(1.0), keras.Variable([[0.0], [0.0]])
        >>> gradient = tf.IndexedSlices([[3.0]], [1], [2, 1])
        >>> with sparse_updates(optimizer):
        ...     optimizer.apply([gradient], [table])
    """
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if type(optimizer).update_step is not keras.optimizers.Adagrad.update_step:
        yield
        return
    with shadowed(optimizer, update_step=_row_wise(optimizer, optimizer.update_step)):
        yield


def _row_wise(optimizer: Any, dense: Callable) -> Callable:
    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not isinstance(gradient, tf.IndexedSlices):
            dense(gradient, variable, learning_rate)
            return
        rows, values = gradient.indices, tf.cast(gradient.values, variable.dtype)
        accumulator = optimizer._accumulators[optimizer._get_variable_index(variable)].value
        optimizer.assign_add(accumulator, tf.IndexedSlices(tf.square(values), rows))
        # Read after the addition, which has also added up the squares of a row that occurs several times.
        scale = tf.cast(learning_rate, variable.dtype) / tf.sqrt(tf.gather(accumulator, rows) + optimizer.epsilon)
        optimizer.assign_sub(variable, tf.IndexedSlices(values * scale, rows))

    return update_step


_SPLITS = tf.TensorSpec([None], tf.int32)
# How often a step may be traced because it makes variables: an optimizer's may come after a layer's.
_ROUNDS = 5
