"""Consecutive calls of a model as a pure function: values of variables and tensors go in and come out.

A `Value` is a tensor with what Keras attaches to it. `call_purely` runs layers with other values in the place of their
variables. A `Chunk` is the calls that one stage of a pipeline, or one block of memory, runs together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.compat.upstream import (
    CallContext,
    get_keras_mask,
    global_state,
    record,
    set_keras_mask,
)
from tfdist.layer_graph.graph import Call, LayerGraph

# Tensors that are made of several.
NOT_DENSE = (tf.SparseTensor, tf.RaggedTensor)


class Value(NamedTuple):
    """A tensor with the mask and the logits that Keras has attached to it.

    Attributes:
        tensor: the tensor.
        mask: which of its time steps later layers should use.
        logits: the input of the activation that has computed the tensor; some losses are more precise with it.
    """

    tensor: Any
    mask: Any = None
    logits: Any = None


class Gradients(NamedTuple):
    """The gradients of a value. Where a loss uses the logits, the tensor itself has no gradient.

    Attributes:
        tensor: the gradient of its tensor, or `None`.
        logits: the gradient of its logits, or `None`.
    """

    tensor: tf.Tensor | None = None
    logits: tf.Tensor | None = None


def value_of(tensor: tf.Tensor) -> Value:
    """The tensor with its mask and logits; a sparse or ragged one, and `None`, stays what it is."""
    if tensor is not None and not isinstance(tensor, NOT_DENSE):
        tensor = tf.convert_to_tensor(tensor)
    return Value(tensor, get_keras_mask(tensor), getattr(tensor, "_keras_logits", None))


def attached(value: Value) -> tf.Tensor:
    """The tensor, with mask and logits attached as Keras does it."""
    if value.mask is not None:
        set_keras_mask(value.tensor, value.mask)
    if value.logits is not None:
        value.tensor._keras_logits = value.logits
    return value.tensor


def pack(values: Sequence[Value]) -> tuple[list[tf.Tensor], list[tuple[bool, ...]]]:
    """Returns all tensors in one list, and for each value, which of its parts exist."""
    tensors = [part for value in values for part in value if part is not None]
    return tensors, [tuple(part is not None for part in value) for value in values]


def unpack(tensors: Iterable[tf.Tensor], layout: Sequence[tuple[bool, ...]]) -> list[Value]:
    """The reverse of `pack`."""
    given = iter(tensors)
    return [Value(*(next(given) if there else None for there in parts)) for parts in layout]


def is_differentiable(tensor: tf.Tensor | tf.TensorSpec) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def differentiable_parts(value: Value) -> tuple[tf.Tensor | None, tf.Tensor | None]:
    """The tensor and the logits of a value; `None` for one that does not exist or cannot have a gradient."""
    tensor, logits = (p if p is not None and is_differentiable(p) else None for p in (value.tensor, value.logits))
    return tensor, logits


def differentiable(values: Sequence[Value]) -> list[tf.Tensor]:
    """All tensors of the values that can have a gradient, in their order."""
    return [part for value in values for part in differentiable_parts(value) if part is not None]


def gradients_of(values: Sequence[Value], gradients: Iterable[tf.Tensor | None]) -> list[Gradients]:
    """The gradients of each value, from those of the tensors that `differentiable` lists."""
    given = iter(gradients)
    return [Gradients(*(p if p is None else next(given) for p in differentiable_parts(value))) for value in values]


def as_one_operation(
    name: str, results: Sequence[tf.Tensor], sources: Sequence[Any], gradients: Callable[[Sequence[Any]], list[Any]]
) -> list[tf.Tensor]:
    """Lets the tapes of the caller see one operation that makes results of the sources, whatever happened inside.

    Args:
        name: of the operation.
        results: what was computed.
        sources: what it was computed of.
        gradients: returns the gradients of the sources, from those of the results; `None` is for a result that nothing
            uses.

    Returns:
        The results for the caller: identities, so that there is no other way back from them.
    """
    used: set[int] = set()

    def backward(*cotangents: Any) -> list[Any]:
        # A tape gives zeros for what nothing uses. Taken for gradients, they would let optimizers update weights that
        # have none, and be multiplied by derivatives that may be infinite.
        noted = sorted(used) or range(len(cotangents))
        used.clear()
        # Where a loss gathers rows, a gradient is `tf.IndexedSlices`.
        return gradients([tf.convert_to_tensor(c) if i in noted else None for i, c in enumerate(cotangents)])

    def noting(i: int, gradient: Any) -> list[Any]:
        used.add(i)
        return [gradient]

    with record.stop_recording():
        own = [tf.identity(tensor) for tensor in results]
        passed = [tf.identity(tensor) for tensor in own]
    record.record_operation(name, own, sources, backward)
    for i, (one, other) in enumerate(zip(own, passed, strict=True)):
        record.record_operation(f"{name}Output", [other], [one], functools.partial(noting, i))
    return passed


# Operations that do more than return results, so that running them twice differs from running them once.
# These draw random numbers from a state of their own: the second run draws other numbers.
UNSEEDED = frozenset(
    [
        *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "ParameterizedTruncatedNormal"),
        *("TruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle", "Multinomial"),
    ]
)
# These change variables of TensorFlow, such as the state of a `tf.random.Generator`.
CHANGING = frozenset(
    [
        *("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "RngReadAndSkip", "RngSkip"),
        *(
            f"ResourceScatter{what}"
            for what in ("Update", "Add", "Sub", "Mul", "Div", "Min", "Max", "NdUpdate", "NdAdd")
        ),
    ]
)


class PureResult(NamedTuple):
    """The results of a pure call.

    Attributes:
        result: what the function has returned.
        state: new values of the non-trainable variables, in their order; the old value where one did not change.
        losses: scalars that the layers have added.
        others: trainable variables of other layers, which the function has read.
        of_batch: metrics to which it has given one number for all rows.
    """

    result: Any
    state: list[tf.Tensor]
    losses: list[tf.Tensor]
    others: Sequence[keras.Variable] = ()
    of_batch: Sequence[keras.Metric] = ()


class ImpureError(ValueError):
    """A layer changes something that a pure function must not change, or reads something that is not passed to it."""


class _Scope(keras.StatelessScope):
    """Notes the trainable variables that are read, and for which it has no value; and metrics of whole batches."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True)
        self.others: dict[int, keras.Variable] = {}
        self.of_batch: list[keras.Metric] = []

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        if value is None and variable.trainable:
            self.others[id(variable)] = variable
        return value


def call_purely(
    function: Callable[[], Any],
    what: str,
    trainable: Sequence[tuple[keras.Variable, Any]],
    state: Sequence[tuple[keras.Variable, Any]],
) -> PureResult:
    """Calls a function that calls layers, with other values in the place of their variables.

    Reads of a variable give the value passed here; assignments are collected and returned. So the graph has no
    operation that reads or assigns a variable, and can be run again.

    `state` are all other variables than `trainable` that the function uses. Messages call the function `what`.

    Raises:
        ImpureError: if it changes a trainable variable, or one that is not listed.

    Example:
        >>> count = keras.Variable(1.0, trainable=False)
        >>> result = call_purely(lambda: count.assign_add(2.0), "f", [], [(count, tf.constant(5.0))])
        >>> float(result.state[0]), float(count)
        (7.0, 1.0)
    """
    with _Scope() as scope:
        # The constructor of the scope would cast the values to the dtype in which the surrounding layers compute, and
        # frozen weights would come back in that dtype.
        scope.state_mapping.update({id(v): tf.cast(value, v._dtype) for v, value in [*trainable, *state]})
        mapped = dict(scope.state_mapping)
        result = function()
        new_state = [tf.convert_to_tensor(scope.get_current_value(variable)) for variable, _ in state]
        losses = [tf.convert_to_tensor(loss) for loss in scope.losses]
        for variable, _ in trainable:
            if scope.get_current_value(variable) is not mapped[id(variable)]:
                raise ImpureError(
                    f"Received: {what}, in which a layer assigns to its trainable variable {variable.path} when it is "
                    "called; that would be lost. Expected: layers assign to non-trainable variables only "
                    "(`add_weight(trainable=False)`)."
                )
    if scope.state_mapping.keys() - mapped.keys():
        raise ImpureError(
            f"Received: {what}, in which a layer changes a variable that it does not own; that would be lost. "
            "Expected: layers change their own variables only; give keras.random functions a SeedGenerator that is an "
            "attribute of the layer."
        )
    return PureResult(result, new_state, losses, list(scope.others.values()), scope.of_batch)


_ATTRIBUTE = "current_call_ctx"


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive calls, with their inputs and outputs.

    Attributes:
        index: the number of the chunk in the model, from 0.
        calls: the calls.
        inputs: keys of the values that it takes from the model's inputs and from earlier chunks.
        outputs: keys of the values that later chunks take or that the model returns.
        trainable: trainable variables of its layers.
        state: all other variables of its layers: statistics, seeds, frozen weights.
    """

    index: int
    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    trainable: tuple[keras.Variable, ...]
    state: tuple[keras.Variable, ...]

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers that are called."""
        return [call.operation for call in self.calls if isinstance(call.operation, keras.layers.Layer)]

    def as_it_is(self) -> Chunk:
        """The same chunk with the variables that its layers have now: layers may have been frozen or unfrozen since."""
        trainable, state = _variables(self.calls)
        return dataclasses.replace(self, trainable=trainable, state=state)

    def call(self, inputs: Sequence[Value], training: bool | None) -> list[Value]:
        """Calls the layers as Keras would, in a call of their model; their variables may change."""
        values = dict(zip(self.inputs, map(attached, inputs), strict=True))
        with tracing():
            for call in self.calls:
                call.run(values, training)
        return [value_of(values[key]) for key in self.outputs]

    def run(
        self,
        trainable: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor],
        inputs: Sequence[Value],
        training: bool | None,
        context: Mapping[str, Any],
    ) -> PureResult:
        """Calls the layers, as a pure function of the variables' values and the inputs.

        `training` is what the model was called with; `context` is what Keras tells layers to which it is not passed,
        `{"training": True}`. The result is the values with the keys `outputs`.
        """
        # Keras stores masks as attributes of tensors. On copies (identities), no other user of the tensors sees them.
        own = [attached(value._replace(tensor=tf.identity(value.tensor))) for value in inputs]
        values = dict(zip(self.inputs, own, strict=True))

        def run() -> None:
            with call_context(context), tracing():
                for call in self.calls:
                    call.run(values, training)

        _, *rest = call_purely(
            run,
            f"the layers {self.calls[0].name} to {self.calls[-1].name}",
            list(zip(self.trainable, trainable, strict=True)),
            list(zip(self.state, state, strict=True)),
        )
        return PureResult([value_of(values[key]) for key in self.outputs], *rest)


def make_chunks(graph: LayerGraph, cuts: Sequence[int]) -> list[Chunk]:
    """Cuts the calls before each of the positions `cuts`, which increase."""
    pieces = [graph.calls[a:b] for a, b in zip((0, *cuts), (*cuts, len(graph.calls)), strict=True)]
    taken_by = [[key for call in piece for key in call.inputs.values()] for piece in pieces]
    chunks = []
    for index, piece in enumerate(pieces):
        made = {key for call in piece for key in call.outputs}
        needed = {*graph.outputs, *(key for later in taken_by[index + 1 :] for key in later)}
        # dict.fromkeys drops duplicates and keeps the order.
        chunks.append(
            Chunk(
                index,
                piece,
                tuple(dict.fromkeys(key for key in taken_by[index] if key not in made)),
                tuple(key for call in piece for key in call.outputs if key in needed),
                *_variables(piece),
            )
        )
    return chunks


def _variables(calls: Sequence[Call]) -> tuple[tuple[keras.Variable, ...], tuple[keras.Variable, ...]]:
    """The trainable variables of the calls' layers, and all others."""
    variables = list({id(v): v for call in calls for v in call.variables}.values())
    return tuple(v for v in variables if v.trainable), tuple(v for v in variables if not v.trainable)


def own_metrics(layers: Iterable[keras.layers.Layer]) -> list[keras.Variable]:
    """The variables of metrics that layers have as attributes, which Keras does not count as theirs.

    Those of a model that is compiled for itself are not updated when it is called.
    """
    every = (one for layer in layers for one in layer._flatten_layers() if not getattr(one, "compiled", False))
    found = (variable for one in every for metric in one._metrics for variable in metric.variables)
    return list({id(variable): variable for variable in found}.values())


def uncuttable(graph: LayerGraph) -> set[int]:
    """Positions at which not to cut: between two calls of one layer with a state, such as a BatchNormalization."""
    calls_of: dict[int, list[int]] = {}
    for position, call in enumerate(graph.calls):
        layers = [call.operation] if isinstance(call.operation, keras.layers.Layer) else []
        for variable in (*call.variables, *own_metrics(layers)):
            # Frozen weights do not change, and several stages may read them.
            if not variable.trainable and not variable._value.trainable:
                calls_of.setdefault(id(variable), []).append(position)
    return {cut for positions in calls_of.values() for cut in range(positions[0] + 1, positions[-1] + 1)}


_traced = threading.local()


def is_traced() -> bool:
    """Whether the layers of a chunk are being called now; models among them then run as a part of it."""
    return getattr(_traced, "depth", 0) > 0


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """While the block runs, the layers of a chunk are being called."""
    _traced.depth = getattr(_traced, "depth", 0) + 1
    try:
        yield
    finally:
        _traced.depth -= 1


def context_values() -> dict[str, Any]:
    """What the current Keras call tells its layers, such as whether they train.

    Example:
        >>> context_values()
        {}
    """
    context = global_state.get_global_attribute(_ATTRIBUTE)
    return {key: value for key, value in vars(context).items() if key != "entry_layer"} if context else {}


@contextlib.contextmanager
def call_context(values: Mapping[str, Any]) -> Iterator[None]:
    """Tells layers the same in a later call. What the model has collected in its call is not touched.

    A layer that trains by default, or is called with `training=True`, tells so to the layers that are called after it
    without a word, as in Keras, also to those after this context.
    """
    previous = global_state.get_global_attribute(_ATTRIBUTE)
    # The context belongs to no layer. Keras ends a context with the layer that it belongs to.
    context = CallContext(entry_layer=None)
    for key, value in values.items():
        context.set_value(key, value)
    global_state.set_global_attribute(_ATTRIBUTE, context)
    try:
        yield
    finally:
        global_state.set_global_attribute(_ATTRIBUTE, previous)
        if previous is not None:
            vars(previous).update(vars(context), entry_layer=previous.entry_layer)
