"""Tries a step on a few random rows, whole and in halves: replicas, too, see some of the rows of a batch.

rows 0 1 2 3  ->  step  ->  gradients
rows 0 1      ->  step  ->  gradients \\
rows     2 3  ->  step  ->  gradients --  their mean: equal, unless something mixes rows

The gradients of a mean over the rows are the mean of the halves' gradients. Those of a sum, of a vector, of a loss with
negatives within the batch, and of layers that normalise over the rows are not, and nothing fails. So what was traced is
traced once more (`try_once`), in a graph that changes nothing, and a warning names what differs:

_loss_mixes_rows    each compiled loss by itself, with its values: also where a step is too large to be traced once more
_metric_mixes_rows  each metric of the user's own likewise: results of the halves' states, added up, as Keras does with
                    those of replicas. A model's predictions might all be on the same side of a threshold
_step_messages      the step. One that does not train has results instead of gradients: the losses of a test step, the
                    outputs of a predict step, and what the model's layers return to either. And metrics that are given
                    what the step makes of rows
_some, _compare_    the random rows; the comparisons; the messages

What tfdist makes exact counts as exact: the halves get the statistics of `BatchNormalization`, and what else replicas
add up, of the whole; layers that draw random numbers pass on what they are given. What else draws gets the same number
everywhere (`_with_the_same_draws`). What cannot be tried says nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.deferred_captures import lent_step_lock
from tfdist.compat.keras import with_state_of_caller
from tfdist.compat.upstream import op_def_registry
from tfdist.inspection.model_state import (
    is_kept_per_replica,
    metrics_of,
    optimizers_of,
    own_copy,
    own_methods,
    random_state_kept,
    seed_generators_of,
)
from tfdist.layer_graph.chunk import CHANGING, UNSEEDED
from tfdist.steps.attributes import kept, owners_of
from tfdist.steps.keras_step import KerasStep, shadowed, traced
from tfdist.strategies.data_parallel.replica_step import has_warned_of_output, losses_of, output_message

_log = logging.getLogger("tfdist")
_PARTS = (slice(0, 4), slice(0, 2), slice(2, 4))
_SHARES = (1.0, 0.5, 0.5)
# The rows differ in length, and so do the longest ones of the halves.
_WORDS = ("a", "a b", "b", "a b c d")
_LENGTHS = [len(word.split()) for word in _WORDS]
# They differ in size: the root of a mean is close to the mean of roots where the halves are alike.
_SIZES = (1.0, 0.9, 0.3, 0.2)
# What is traced runs with several kinds of numbers: a loss may look for those above a half, for ones, or for -1.
_DRAWS: tuple[Callable[[np.random.RandomState, Any], np.ndarray], ...] = (
    lambda random, sizes: random.random_sample(sizes.shape) * sizes,
    lambda random, sizes: 1.0 * (random.random_sample(sizes.shape) < sizes),
    lambda random, sizes: np.round(random.standard_normal(sizes.shape)),
    lambda random, sizes: random.standard_normal(sizes.shape),
)
# Of four rows, few may be counted, and the halves' counts may be alike by chance.
_DRAWS_OF_METRICS = 4 * len(_DRAWS)
# By so much of its size a value may differ; of a mean in 16 bits two or three digits are right.
_DIGITS, _DIGITS_ROUNDED = 1e-3, 5e-2
# Tracing a larger step once more takes too long; larger rows are not worth the memory.
MOST_OPERATIONS = 5_000
_MOST = 1 << 22
# An attribute of a model: by kind of step, what it was compiled with when the step was tried, and what was found;
# `None` for a step that could not be tried.
_TRIED = "_tfdist_steps_tried"
# Steps that run the same layers and losses: if the first could be tried, and both are Keras' own, the last need not be.
_KINDS = ("train", "test", "predict")
_RANDOM_LAYERS = ("keras.src.layers.regularization.", "keras.src.layers.preprocessing.image_preprocessing.random_")
# Types of operations that draw random numbers, and what a trial takes instead; whole numbers: the smallest. Dropouts
# keep what has a large one.
_DRAWN: dict[str, float | None] = {
    **dict.fromkeys(("RandomUniform", "StatelessRandomUniform", "StatelessRandomUniformV2"), 0.97),
    **dict.fromkeys(("RandomStandardNormal", "StatelessRandomNormal", "StatelessRandomNormalV2"), 0.61),
    **dict.fromkeys(("TruncatedNormal", "StatelessTruncatedNormal", "StatelessTruncatedNormalV2"), 0.61),
    **dict.fromkeys(("RandomUniformInt", "StatelessRandomUniformInt", "StatelessRandomUniformIntV2")),
}
_OF_SEEDS = ("StatelessRandomGetKeyCounter", "StatelessRandomGetAlg", "StatelessRandomGetKeyCounterAlg")
# Beginnings of the types of operations of which running them would change something, or differ each time.
_NOT_TRIED = ("Random", "Stateless", "PyFunc", "EagerPyFunc", "Iterator", "Collective", "Print", *CHANGING, *UNSEEDED)
_GATHER = "all rows, by tf.distribute.get_replica_context().all_gather(rows, axis=0) as in docs/own-loops.md"
_SUM = "sums over the rows of all replicas, by tfdist.global_sum(sum of own rows), also in denominators"
_BRANCHES = ("StatelessIf", "StatelessWhile", "StatelessCase")
_ADDING = ("assign_add", "assign_sub")


def try_once(step: KerasStep, operations: int, said: Callable[[str], str] = str) -> None:
    """Tries a step that was traced, and warns of what mixes rows; once for what a model was compiled with.

    Args:
        step: the step.
        operations: how many operations a replica has.
        said: makes a warning from what is said of replicas.
    """
    model = step.model
    compiled = getattr(model, "_compile_loss", None)
    tried: dict[str, tuple[Any, list[str] | None]] = getattr(model, _TRIED, {})
    tried = {kind: known for kind, known in tried.items() if known[0] is compiled}
    of_keras = [kind for kind in _KINDS if not own_methods(model, f"{kind}_step")]
    before = of_keras[: of_keras.index(step.kind)] if step.kind in of_keras else []
    if step.kind in tried or any(tried[kind][1] is not None for kind in before if kind in tried):
        return

    def trial() -> list[str] | None:
        of_losses, of_metrics, alone = [], [], []
        for one, (args, kwargs) in step.given.values():
            if isinstance(one, keras.losses.Loss):
                of_losses += [_loss_message(one)] * _loss_mixes_rows(one.call, args)
            elif not all(map(_is_row_by_row, _with_function(one))):
                with contextlib.suppress(Exception):  # what cannot be tried alone is tried in the step
                    of_metrics += [_metric_message(one)] * _metric_mixes_rows(step, one, (args, kwargs))
                    alone.append(one)
        found = of_losses + of_metrics
        if operations > MOST_OPERATIONS:
            return found or None
        try:
            of_step = [] if _is_keras_own(model, alone) else _step_messages(step, bool(of_losses), alone)
            return of_losses + of_step + of_metrics
        except Exception as error:  # a step that takes no such rows fails here only
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename == __file__ and not isinstance(error, NotImplementedError):
                _log.warning("A mistake of tfdist: it does not see what mixes rows. Training goes on.", exc_info=True)
            return found or None

    # A thread has no graph yet, no strategy, and records gradients: `tf.init_scope` does not.
    with warnings.catch_warnings(), ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        # What the step puts on `self` is of the step, for whoever reads it later, not of its trial.
        stack.callback(kept(owners_of(model)))
        messages = thread.submit(with_state_of_caller(lent_step_lock()(trial))).result()
    known = {message for _, said in tried.values() for message in said or ()}
    object.__setattr__(model, _TRIED, {**tried, step.kind: (compiled, messages)})
    for message in messages or ():
        if message not in known:
            warnings.warn(said(message), stacklevel=2)


def _is_keras_own(model: keras.Model, alone: Sequence[keras.Metric] = ()) -> bool:
    """Whether all of a model, and its step, is Keras' own: these compute each row by itself, and need no trial.

    The few losses of Keras that do not are tried by themselves, and so are the metrics `alone`.
    """
    made_of: list[Any] = [model]
    for part in model._flatten_layers():
        made_of += [part, *getattr(part, "operations", ())]
    for one in (*losses_of(model), *metrics_of(model)):
        made_of += [] if any(one is metric for metric in alone) else _with_function(one)
    made_of += [part.activation for part in made_of if hasattr(part, "activation")]
    return all(_is_row_by_row(part) for part in made_of)


def _with_function(one: keras.losses.Loss | keras.Metric) -> list[Any]:
    return [one, getattr(one, "fn", getattr(one, "_fn", one))]


def _is_row_by_row(part: Any) -> bool:
    if part is None or isinstance(part, keras.layers.InputLayer):
        return True
    kind = part if inspect.isroutine(part) else type(part)
    axis = getattr(part, "axis", None)
    # Functions as layers are the user's, and those of keras.ops may go over the rows; so may an axis of 0.
    return (
        kind.__module__.startswith(("keras.", "keras_hub."))
        and not isinstance(part, keras.layers.Lambda)
        and (isinstance(part, keras.Layer) or not isinstance(part, keras.Operation))
        and 0 not in ([] if axis is None else np.ravel(axis).tolist())
    )


def _loss_mixes_rows(call: Callable, specs: Sequence[tf.TensorSpec]) -> bool:
    """Whether the value of a loss for a few rows is not the mean of its values for their halves."""

    def trial(given: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        whole, *halves = (tf.convert_to_tensor(call(*(one[part] for one in given))) for part in _PARTS)
        return [whole, *(_compare_rows if whole.shape.rank else _compare_means)(whole, *halves)]

    # What cannot be tried says nothing: it keeps something, draws random numbers, or asks other replicas.
    with contextlib.suppress(Exception), _exchanging(_refuse):
        return any(
            _is_off(off, size, _DIGITS_ROUNDED if whole.dtype.itemsize < 4 else _DIGITS)
            for whole, off, size in _each_draw(trial, specs, may_read=False)
        )
    return False


def _metric_mixes_rows(step: KerasStep, metric: keras.Metric, given: Any) -> bool:
    """Whether the result of a metric for a few rows is not that of the sum of its states for their halves.

    Args:
        step: the step.
        metric: the metric.
        given: the specification of its arguments.
    """

    def trial(given: Any) -> list[tf.Tensor]:
        before = [tf.convert_to_tensor(own_copy(variable)) for variable in metric.variables]
        states = []
        for rows, share in zip(_PARTS, _SHARES, strict=True):
            args, kwargs = _rows_of(given, rows)
            with traced(tf.distribute.get_strategy(), _step_of_part(step, share)):
                after = metric.stateless_update_state(before, *args, **kwargs)
            states.append({id(v): new for v, new in zip(metric.variables, after, strict=True) if _is_sum(v)})
        return _compare_states(step, metric, states)

    with random_state_kept(), _exchanging(_refuse):
        found = _each_draw(trial, given, draws=_DRAWS_OF_METRICS)
        return any(_is_off(off, size, _digits(step.model)) for off, size in found)


def _each_draw(trial: Callable, batch: Any, may_read: bool = True, draws: int = len(_DRAWS)) -> Iterator[Any]:
    """Traces a trial once, and runs it with rows of one kind after the other; yields what it returns, as arrays.

    Args:
        trial: given a batch.
        batch: its specification.
        may_read: whether it may read variables.
        draws: how often to run it.

    Raises:
        NotImplementedError: if it would change something.
    """
    first = _some(batch, 0)

    def flat_trial(*flat: Any) -> Any:
        return trial(tf.nest.pack_sequence_as(first, flat, expand_composites=True))

    function = tf.function(flat_trial, autograph=False)
    traced = function.get_concrete_function(*tf.nest.flatten(first, expand_composites=True))
    if not _can_be_run(traced.graph) or not (may_read or all(one.dtype != tf.resource for one in traced.inputs)):
        raise NotImplementedError("a step that changes something outside")
    run = _with_the_same_draws(function, traced)
    for draw in range(draws):
        rows = first if draw == 0 else _some(batch, draw)
        # What takes the first rows may refuse others.
        with contextlib.suppress(*[tf.errors.OpError][:draw]):
            found = run(tf.nest.flatten(rows, expand_composites=True))
            yield tf.nest.map_structure(lambda value: value.numpy(), found)


def _with_the_same_draws(function: Any, traced: Any) -> Callable[[list[tf.Tensor]], Any]:
    """A function that was traced, of its inputs in a list; all random numbers that it draws are the same.

    They are replaced afterwards: a function that the step calls keeps what is traced of it, and the program calls it.
    """
    definition = traced.graph.as_graph_def()
    functions = [function.node_def for function in definition.library.function]
    if not sum([_replace_draws(definition.node, ""), *(_replace_draws(nodes, ":output:0") for nodes in functions)]):
        return lambda inputs: function(*inputs)
    _rename_functions(definition)
    imported = tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(definition, name=""), [])
    ends = traced.inputs, tf.nest.flatten(traced.structured_outputs)
    pruned = imported.prune(*([imported.graph.get_tensor_by_name(one.name) for one in of] for of in ends))

    def run(inputs: list[tf.Tensor | None]) -> Any:
        given = [one for one in inputs if one is not None]
        return tf.nest.pack_sequence_as(traced.structured_outputs, pruned(*given, *traced.captured_inputs))

    return run


def _rename_functions(definition: Any) -> None:
    """Gives the functions of a graph other names: TensorFlow knows them by these already, as they were."""
    names = {function.signature.name: f"{function.signature.name}_tried" for function in definition.library.function}
    for function in definition.library.function:
        function.signature.name = names[function.signature.name]
    for nodes in (definition.node, *(function.node_def for function in definition.library.function)):
        for node in nodes:
            node.op = names.get(node.op, node.op)
            for value in node.attr.values():
                for called in (value.func, *value.list.func):
                    if called.name:
                        called.name = names.get(called.name, called.name)
    for gradient in definition.library.gradient:
        gradient.function_name = names.get(gradient.function_name, gradient.function_name)
        gradient.gradient_func = names.get(gradient.gradient_func, gradient.gradient_func)


def _replace_draws(nodes: Any, output: str) -> int:
    """Replaces operations that draw in a graph, or in a function; there, inputs end in `output`. Returns how many."""
    drawing = [node for node in nodes if node.op in _DRAWN]
    for node in drawing:
        kind, number = op_def_registry.get(node.op), _DRAWN[node.op]
        dtype, of_shape = (node.attr[ends[0].type_attr].type for ends in (kind.output_arg, kind.input_arg))
        given = [one for one in node.input if not one.startswith("^")]
        value = given[-2] if number is None else ""  # the smallest whole number
        if number is not None:
            value = f"{node.name}/drawn"
            constant = nodes.add(name=value, op="Const")
            constant.attr["dtype"].type = dtype
            constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(number, tf.as_dtype(dtype)))
            value += output
        inputs = [given[0], value, *node.input[len(given) :]]
        del node.input[:]
        node.attr.clear()
        node.op = "Fill"
        node.input.extend(inputs)
        node.attr["T"].type, node.attr["index_type"].type = dtype, of_shape
    return len(drawing)


class _Noted(NamedTuple):
    """A value of a run of the step.

    Attributes:
        kind: a gradient; a result, of steps that have no gradients; a constant, an output of a predict step that should
            not depend on its rows; a value that a layer is given, or returns; a number that a metric is given.
        value: the value.
        owner: the layer to blame if this is what differs first; the metric.
    """

    kind: str
    value: Any
    owner: keras.Layer | keras.Metric | None = None


class _Part:
    """One run of the step, on some of the rows; `whole` is the run on all rows, or `None` if this is it."""

    def __init__(self, whole: _Part | None) -> None:
        self.graph = tf.compat.v1.get_default_graph()
        self.noted: list[_Noted] = []
        # By the variable's id what metrics assign, where nothing but sums can be added up later.
        self.states: dict[int, tf.Tensor] = {}
        self.running: list[keras.Layer] = []
        self._own: list[Any] = []
        self._of_all_rows = None if whole is None else iter(whole._own)

    def exchanged(self, value: Any) -> Any:
        """What all replicas make of their values: what the run on all rows has."""
        if self._of_all_rows is not None:
            return next(self._of_all_rows)
        self._own.append(tf.nest.map_structure(tf.stop_gradient, value))
        return self._own[-1]

    def note_values(self, layer: keras.Layer | None, values: Any) -> None:
        """Notes what goes into a layer, or comes out; not in loops and branches, whose tensors are not seen outside."""
        if tf.compat.v1.get_default_graph() is self.graph:
            self.note("value", _tensors(values), layer)

    def note(self, kind: str, values: Iterable[Any], owner: Any = None) -> None:
        self.noted += [_Noted(kind, one, owner) for one in values]


def _step_messages(step: KerasStep, loss_is_named: bool, alone: Sequence[keras.Metric]) -> list[str]:
    """What mixes the rows of a batch, in words.

    Args:
        step: the step.
        loss_is_named: whether a compiled loss does.
        alone: metrics that need no trial.
    """
    parts: list[_Part] = []

    def trial(batch: Any) -> list[list[Any]]:
        for rows, share in zip(_PARTS, _SHARES, strict=True):
            parts.append(_run(step, _rows_of(batch, rows), share, parts[0] if parts else None, alone))
        if len({tuple(one.kind for one in part.noted) for part in parts}) > 1:
            raise NotImplementedError("a step that is another one each time")
        noted = zip(*(part.noted for part in parts), strict=True)
        states = [part.states for part in parts]
        return [
            [_COMPARISONS[of[0].kind](*(one.value for one in of)) for of in noted],
            [_compare_states(step, metric, states) for metric in _own_metrics(step, parts)],
        ]

    of_step: list[str] = []
    of_metrics: dict[str, None] = {}
    for found, states in _each_draw(trial, step.batch):
        of_step, metrics = _messages_of(step, list(zip(parts[0].noted, found, strict=True)), loss_is_named)
        off = [_is_off(*of, _digits(step.model)) for of in states]
        metrics += itertools.compress(_own_metrics(step, parts), off)
        of_metrics |= dict.fromkeys(map(_metric_message, metrics))
        if of_step:
            break
    return [*of_step, *of_metrics]


def _messages_of(
    step: KerasStep, noted: Sequence[tuple[_Noted, Any]], loss_is_named: bool
) -> tuple[list[str], list[keras.Metric]]:
    """What one kind of rows has shown of the step, in words, and of which metrics' numbers."""
    model, digits = step.model, _digits(step.model)

    def of(kind: str) -> list[tuple[_Noted, Any]]:
        return [one for one in noted if one[0].kind == kind]

    largest = max((size for _, (_, size) in of("gradient")), default=0.0)
    is_off = any(_is_off(off, size, digits) and not off <= 1e-6 * largest for _, (off, size) in of("gradient"))
    is_off |= any(_is_off(*found, digits) for _, found in of("result"))
    if step.kind == "test":
        is_off |= any(one.owner is model._loss_tracker and not _is_mean(found, digits) for one, found in of("number"))
    messages = [
        output_message(model, one.value, "the first one's is returned")
        for one, found in of("constant")
        if _is_off(*found, digits)
    ][:1]
    if is_off:
        culprits = (
            (one.owner, np.isinf(off) and size == 0) for one, (off, size) in of("value") if _is_off(off, size, digits)
        )
        layer, is_wider = next(culprits, (None, False))
        messages += _step_message(step, loss_is_named) if layer is None else [_layer_message(layer, is_wider)]
    averaged = {id(metric) for metric, _, is_averaged in step.scalars if is_averaged}
    numbers = [(one.owner, found) for one, found in of("number") if id(one.owner) in averaged]
    # Where the loss differs, so do all numbers that are computed with it.
    known = is_off or loss_is_named
    return messages, [one for one, found in numbers if (_adds_up(*found) if known else not _is_mean(found, digits))]


def _digits(model: keras.Model) -> float:
    is_rounded = any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers())
    return _DIGITS_ROUNDED if is_rounded else _DIGITS


def _own_metrics(step: KerasStep, parts: Sequence[_Part]) -> list[keras.Metric]:
    """Metrics of a user's own class whose state all runs of a step have changed."""
    known = functools.reduce(set.intersection, (set(part.states) for part in parts))
    own = [one for one in metrics_of(step.model) if not type(one).__module__.startswith(("keras.", "keras_hub."))]
    states = [{id(variable) for variable in metric.variables} for metric in own]
    return [metric for metric, state in zip(own, states, strict=True) if state & known]


def _compare_states(step: KerasStep, metric: keras.Metric, states: Sequence[dict[int, tf.Tensor]]) -> list[tf.Tensor]:
    """By how much the results of a state, and of the sum of the halves' states, differ, and how large they are.

    Args:
        step: the step.
        metric: the metric.
        states: of all rows, and of the halves: by id, what is assigned to those of its variables that are sums.
    """
    # What the step finds to add up over the replicas, the trial counts by rows.
    sums = [one for one, _, is_averaged in step.scalars if isinstance(one, keras.metrics.Sum) and not is_averaged]
    added = {id(variable) for one in sums for variable in one.variables}
    with contextlib.suppress(Exception):  # of a result that is no tensor, say: Keras may read it outside of the step
        before = [tf.cast(own_copy(variable), tf.float64) for variable in metric.variables]
        known = [(None if id(v) in added else id(v), old) for v, old in zip(metric.variables, before, strict=True)]
        whole, *halves = ([tf.cast(state.get(key, old), tf.float64) for key, old in known] for state in states)
        together = [old + sum(one - old for one in of) for old, *of in zip(before, *halves, strict=True)]
        pairs = list(zip(_results(metric, whole), _results(metric, together), strict=True))
        off = [tf.reduce_max(tf.abs(one - other)) for one, other in pairs]
        return [tf.reduce_max(off), tf.reduce_max([tf.reduce_max(tf.abs(one)) for one, _ in pairs])]
    return [tf.zeros([]), tf.zeros([])]


def _results(metric: keras.Metric, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    known = [(v, tf.cast(value, v.dtype)) for v, value in zip(metric.variables, state, strict=True)]
    with keras.StatelessScope(state_mapping=known):
        return [tf.cast(one, tf.float32) for one in tf.nest.flatten(metric.result())]


def _can_be_run(graph: tf.Graph) -> bool:
    """Whether a graph changes nothing, and draws no random numbers that can differ."""
    definition = graph.as_graph_def()
    nodes = [definition.node, *(function.node_def for function in definition.library.function)]
    types = {node.op for some in nodes for node in some}.difference(_BRANCHES, _DRAWN, _OF_SEEDS)
    return not any(one.startswith(_NOT_TRIED) for one in types)


def _rows_of(batch: Any, rows: slice) -> Any:
    return tf.nest.map_structure(lambda one: None if one is None else one[rows], batch)


def _step_of_part(step: KerasStep, share: float) -> KerasStep:
    part_step = KerasStep(step.kind, step.model, step.function, graph=tf.compat.v1.get_default_graph())
    part_step.begin_shard(tf.constant(share, tf.float64))
    return part_step


def _run(step: KerasStep, rows: Any, share: float, whole: _Part | None, alone: Sequence[keras.Metric]) -> _Part:
    part, part_step = _Part(whole), _step_of_part(step, share)
    with contextlib.ExitStack() as stack:
        # The program's own numbers stay those that it would get alone.
        stack.enter_context(random_state_kept())
        stack.enter_context(traced(tf.distribute.get_strategy(), part_step))
        stack.enter_context(_exchanging(lambda _, value, options=None: part.exchanged(value)))
        for metric in alone:
            stack.enter_context(shadowed(metric, update_state=lambda *_, **__: None))
        optimizers, metrics = optimizers_of(step.model), metrics_of(step.model)
        for optimizer in optimizers:
            stack.enter_context(shadowed(optimizer, apply=_noting_gradients(part), scale_loss=part_step.as_mean))
        for layer in step.model._flatten_layers():
            stack.enter_context(shadowed(layer, call=_noting_values(layer, part, step.kind)))
            if isinstance(layer, keras.layers.BatchNormalization):
                stack.enter_context(shadowed(layer, _moments=_moments(layer, part)))
        owners = [step.model, *optimizers, *metrics]
        seeds = [generator.state for generator in seed_generators_of(step.model)]
        for variable in {id(v): v for v in [*seeds, *(v for owner in owners for v in owner.variables)]}.values():
            if isinstance(variable, keras.Variable):
                # Those of parameter servers add by themselves.
                adding = {name: functools.partial(getattr(keras.Variable, name), variable) for name in _ADDING}
                stack.enter_context(shadowed(variable, _direct_assign=_noting_assignment(variable, part), **adding))
                if is_kept_per_replica(variable):
                    # Read as a whole, it is a sum over the processes, which would wait for each other here.
                    stack.enter_context(shadowed(variable, _value=own_copy(variable)))
        if step.kind == "predict":
            # Keras' function of it may be compiled: it would keep what is traced here.
            outputs = tf.nest.flatten(step.model.predict_step(rows))
            without_rows = step.same_outputs | step.constant_outputs
            part.note("result", _tensors([one for i, one in enumerate(outputs) if i not in without_rows]))
            part.note("constant", [outputs[i] for i in sorted(step.constant_outputs)])
        else:
            step.function(rows)
    for metric, number, _ in part_step.scalars:
        part.note("number", [number], metric)
    return part


def _exchanging(all_reduce: Callable) -> contextlib.AbstractContextManager[None]:
    """While the block runs, this replica adds up by another function, and cannot ask others in other ways."""
    context = tf.distribute.get_replica_context()
    return shadowed(context, all_reduce=all_reduce, all_gather=_refuse, merge_call=_refuse)


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("replicas are not tried together")


def _noting_gradients(part: _Part) -> Callable:
    def apply(grads: Any, trainable_variables: Any = None) -> None:
        part.note("gradient", [tf.convert_to_tensor(one) for one in grads if one is not None])

    return apply


def _noting_assignment(variable: keras.Variable, part: _Part) -> Callable:
    """Nothing is assigned. Where a step moves weights by itself, it does so along its rows' gradients."""

    def assign(value: Any) -> None:
        if variable.trainable and tf.is_tensor(value):
            part.note("gradient", [value - tf.cast(variable.value, value.dtype)])
        # Not in loops and branches, whose tensors are not seen outside.
        if _is_sum(variable) and tf.compat.v1.get_default_graph() is part.graph:
            part.states[id(variable)] = tf.convert_to_tensor(value)

    return assign


def _is_sum(variable: keras.Variable) -> bool:
    return is_kept_per_replica(variable) and variable.aggregation == "sum"


def _noting_values(layer: keras.Layer, part: _Part, kind: str) -> Callable:
    call, is_random = layer.call, type(layer).__module__.startswith(_RANDOM_LAYERS)

    def noting(*args: Any, **kwargs: Any) -> Any:
        part.note_values(part.running[-1] if part.running else None, (args, kwargs))
        part.running.append(layer)
        try:
            outputs = args[0] if is_random and args else call(*args, **kwargs)
        finally:
            part.running.pop()
        part.note_values(layer, outputs)
        if not part.running and kind == "test":
            part.note("result", _tensors(outputs))
        return outputs

    return noting


def _tensors(values: Any) -> list[tf.Tensor]:
    return [one for one in tf.nest.flatten(values) if isinstance(one, tf.Tensor)]


def _moments(layer: keras.layers.BatchNormalization, part: _Part) -> Callable:
    moments = layer._moments
    return lambda inputs, mask=None: part.exchanged(moments(inputs, mask))


def _some(batch: Any, draw: int) -> Any:
    """In the place of rows of a batch: random numbers of a kind, words; zeros and ones in place of whole numbers.

    Rows of steps (of whole numbers, or of features) end in zeros, the padding that masks look for.
    """

    seeds = itertools.count(1 + 100 * draw)

    def some(spec: tf.TypeSpec | None) -> Any:
        if spec is None:
            return None
        if not isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec)) or spec.shape.rank == 0:
            raise NotImplementedError(f"no rows of {spec}")
        sizes = [3 if size is None else size for size in spec.shape[1:]]
        if isinstance(spec, tf.RaggedTensorSpec):
            if spec.ragged_rank != 1:
                raise NotImplementedError(f"no rows of {spec}")
            numbers = _numbers([sum(_LENGTHS), *sizes[1:]], spec.dtype, draw, next(seeds))
            return tf.RaggedTensor.from_row_lengths(numbers, _LENGTHS)
        return _numbers([4, *sizes], spec.dtype, draw, next(seeds))

    return tf.nest.map_structure(some, batch)


def _numbers(shape: Sequence[int], dtype: tf.DType, draw: int, seed: int) -> tf.Tensor:
    if np.prod(shape) > _MOST:
        raise NotImplementedError("rows that are too large")
    if dtype == tf.string:
        return tf.constant(np.resize(np.repeat(_WORDS, int(np.prod(shape[1:]))), shape))
    random = np.random.RandomState(seed)
    if dtype.is_floating:
        sizes = _SIZES if shape[0] == len(_SIZES) else np.ones(shape[0])
        numbers = _DRAWS[draw % len(_DRAWS)](random, np.ones(shape) * np.reshape(sizes, [-1, *[1] * (len(shape) - 1)]))
    else:
        numbers = np.round(random.random_sample(shape))
    if len(shape) > (2 if dtype.is_floating else 1) and shape[0] == len(_LENGTHS) and shape[1] > 1:
        if len(shape) == 2:
            numbers[-1] = 1
        for row, length in zip(numbers, _LENGTHS, strict=True):
            row[max(1, len(row) * length // max(_LENGTHS)) :] = 0
    return tf.constant(numbers, dtype)


def _compare_means(whole: tf.Tensor, *halves: tf.Tensor) -> list[tf.Tensor]:
    """By how much gradients differ from the halves' mean, and how large they are."""
    whole, *halves = (tf.cast(one, tf.float32) for one in (whole, *halves))
    return [tf.norm(whole - sum(halves) / 2), tf.norm(whole)]


def _compare_constants(whole: tf.Tensor, *halves: tf.Tensor) -> list[tf.Tensor]:
    """By how much values differ from both halves', and how large they are; infinity for another shape."""
    if not (whole.dtype.is_floating or whole.dtype.is_integer) or not whole.shape.is_fully_defined():
        return [tf.zeros([]), tf.zeros([])]
    if any(one.shape != whole.shape for one in halves):
        return [tf.constant(np.inf), tf.zeros([])]
    value, *others = (tf.cast(one, tf.float32) for one in (whole, *halves))
    off = tf.reduce_max([tf.reduce_max(tf.abs(value - other)) for other in others])
    return [off, tf.reduce_max(tf.abs(value))]


def _compare_rows(whole: tf.Tensor, *halves: tf.Tensor, other: float = 0.0) -> list[tf.Tensor]:
    """By how much values differ from the halves' rows, and how large they are; infinity for another width.

    Where the number of rows is another, they differ by `other`.
    """
    nothing, uneven = [tf.zeros([]), tf.zeros([])], [tf.constant(other, tf.float32), tf.zeros([])]
    if whole.shape.rank in (None, 0) or any(one.shape.rank != whole.shape.rank for one in halves):
        return nothing
    rows = [one.shape[0] for one in (whole, *halves)]
    if None not in rows and rows[0] != rows[1] + rows[2]:
        return uneven
    shapes = [tf.shape(one) for one in (whole, *halves)]
    has_rows = tf.equal(shapes[0][0], shapes[1][0] + shapes[2][0])
    has_widths = tf.reduce_all([tf.reduce_all(tf.equal(shapes[0][1:], shape[1:])) for shape in shapes[1:]])

    def differ() -> list[tf.Tensor]:
        if not (whole.dtype.is_floating or whole.dtype.is_integer):
            return nothing
        parts = tf.concat([tf.cast(one, tf.float32) for one in halves], 0)
        values = tf.reshape(tf.cast(whole, tf.float32), [-1])
        return [tf.reduce_max(tf.abs(values - tf.reshape(parts, [-1])), 0), tf.reduce_max(tf.abs(values), 0)]

    wider = [tf.where(has_rows, np.inf, other), tf.zeros([])]
    if any(not whole.shape[1:].is_compatible_with(one.shape[1:]) for one in halves):
        return wider
    if (static := tf.get_static_value(has_rows & has_widths)) is not None:
        return differ() if static else uneven
    return tf.cond(has_rows & has_widths, differ, lambda: wider)


_COMPARISONS: dict[str, Callable[..., list[tf.Tensor]]] = {
    "gradient": _compare_means,
    "result": functools.partial(_compare_rows, other=np.inf),
    "constant": _compare_constants,
    "value": _compare_rows,
    "number": lambda *values: [tf.cast(one, tf.float32) for one in values],
}


def _is_off(off: float, size: float, digits: float) -> bool:
    """Also if only a half has no number, of a division by its longest length, say."""
    return bool(np.isfinite(size)) and not off <= digits * size


def _adds_up(whole: float, *halves: float) -> bool:
    return np.isclose(whole, sum(halves), 1e-3) and not np.isclose(whole, sum(halves) / 2, 1e-3)


def _is_mean(numbers: Sequence[float], digits: float) -> bool:
    whole, *halves = numbers
    return not _is_off(abs(whole - sum(halves) / 2), max(map(abs, numbers)), digits)


def _layer_message(layer: keras.Layer, is_wider: bool) -> str:
    if is_wider:
        what = "pads to the longest row of a batch, or has a value for each pair of rows"
        expected = f"a fixed length, or a model that disregards what is padded; for pairs, {_GATHER}"
    else:
        what = "mixes the rows of a batch: what it returns for a row depends on the others"
        expected = f"a layer that looks at each row by itself; keras.layers.BatchNormalization; or {_GATHER}"
    return (
        f"Received: layer '{layer.path}' ({type(layer).__name__}), which {what}. Each replica sees its own rows, so "
        f"that the result differs from one process. Expected: {expected}."
    )


def _loss_message(loss: keras.losses.Loss) -> str:
    return (
        f"Received: loss '{loss.name}', which mixes the rows of a batch: its value is not the mean of its values for "
        "parts of the batch. Each replica computes it of its own rows, so that training differs from one process. "
        f"Expected: a loss that has a value for each row, or a mean of such; {_SUM}; or one replica."
    )


def _step_message(step: KerasStep, loss_is_named: bool) -> Iterator[str]:
    model = step.model
    if loss_is_named:
        return
    own = own_methods(model, f"{step.kind}_step", *(["compute_loss"] if step.kind != "predict" else []))
    if own:
        what = f"{type(model).__name__}.{own[0]}"
    elif step.kind == "predict":
        if has_warned_of_output(model):
            return
        what = f"an output of model '{model.name}'"
    else:
        what = f"a loss of model '{model.name}' (compiled, or of add_loss)"
    expected = f"the mean of a value for each row; {_SUM}; for pairs of rows, {_GATHER}"
    if step.kind == "train":
        how = "whose gradient for a batch is not the mean of its gradients for parts of the batch, as of a sum or a "
        how += "vector of the rows' losses, negatives within the batch, or clipped gradients"
    elif step.kind == "test":
        how = "whose loss for a batch is not the mean of its losses for parts of the batch"
    else:
        how, expected = "whose output for a row depends on the others of the batch", f"a value of each row; {_GATHER}"
    yield (
        f"Received: {what}, {how}. Each replica computes it of its own rows, so that the result differs from one "
        f"process. Expected: {expected}."
    )


def _metric_message(metric: keras.Metric) -> str:
    received = f"Received: metric '{metric.name}' ({type(metric).__name__}), "
    if isinstance(metric, (keras.metrics.Mean, keras.metrics.Sum)):
        return (
            f"{received}given one number a batch which is not the mean of such numbers for parts of the batch: a sum, "
            "a count, a ratio of sums (recall, F1, Dice), or the root of a mean. tfdist averages these numbers over "
            "the replicas, so that the result differs from one process (a sum is divided by the number of replicas). "
            "Expected: a value for each row; of a ratio, a metric that keeps both sums, as keras.metrics.Recall does; "
            "or keras.metrics.Sum, given an integer tensor."
        )
    return (
        f"{received}whose state for a batch is not the sum of its states for parts of the batch: a maximum, a moving "
        "average, or a mean of ratios. Each replica updates it from its own rows, and Keras adds up what they keep, so "
        "that the result differs from one process. Expected: states that are sums; or add_variable(..., "
        "aggregation='only_first_replica') in the metric, and an update from all rows, by "
        "tf.distribute.get_replica_context().all_gather(rows, axis=0), if each worker has rows in every step."
    )
