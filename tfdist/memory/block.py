"""Parts of a model as pure functions, and the operations that they make.

A block is consecutive calls of a graph of layers (`GraphBlock`), or one layer (`LayerBlock`). While it runs, the names
of its operations are recorded: `keep_apart` compares its two runs by them, and an estimate counts its bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfdist.compat.upstream import ops
from tfdist.inspection.model_state import global_seeds, is_here, items_of
from tfdist.layer_graph.chunk import (
    Chunk,
    PureResult,
    Value,
    attached,
    call_context,
    call_purely,
    context_values,
    is_differentiable,
    own_metrics,
    pack,
    tracing,
    unpack,
    value_of,
)

# Modules of classes that keep no tensors for others.
_OTHERS = ("keras.", "keras_hub.", "tfdist.")


class Kept:
    """Tensors that a block's layers keep as attributes, for a loss, say. They are results of the block, too.

    Otherwise they would have no gradient: no tape outside sees what is inside of a block.

    Args:
        layers: of the block.
    """

    def __init__(self, layers: Iterable[keras.layers.Layer]):
        own = (one for layer in layers for one in layer._flatten_layers())
        self._owners = [vars(one) for one in own if not type(one).__module__.startswith(_OTHERS)]
        self._places: list[tuple[dict[str, Any], str]] = []
        self._tensors: list[tf.Tensor] = []

    def since(self, begin: int) -> list[tf.Tensor]:
        """Those that were made since; `begin` is the number with which tensors began then."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

        def is_new(value: Any) -> bool:
            if not isinstance(value, tf.Tensor) or value._id <= begin or not is_differentiable(value):
                return False
            return value.graph is graph if tf.is_symbolic_tensor(value) else graph is None

        attributes = ((owner, *item) for owner in self._owners for item in owner.items())
        self._places = [(owner, name) for owner, name, value in attributes if any(map(is_new, items_of(value)))]
        self._tensors = [one for owner, name in self._places for one in items_of(owner[name]) if is_new(one)]
        return self._tensors

    def put(self, results: Sequence[tf.Tensor]) -> None:
        """Puts the last of a block's results, by which they have gradients, in their places."""
        count = len(self._tensors)
        new = dict(zip(map(id, self._tensors), results[len(results) - count :], strict=True))
        for owner, name in self._places:
            # Past Keras' attribute tracking.
            owner[name] = tree.map_structure(lambda x: new.get(id(x), x), owner[name])


# All kinds of block have a `label`, their `trainable` variables, all others as `state`, the `tensors` that go in, and
# what their layers have `kept`.
class GraphBlock:
    """Consecutive calls of a Functional or Sequential model, in one call of the model."""

    def __init__(self, chunk: Chunk, training: bool | None, inputs: Sequence[Value], label: str):
        self.label = label
        # `trainable` of layers may have changed since the policy was applied.
        chunk = chunk.as_it_is()
        self._chunk = dataclasses.replace(chunk, state=_with_global_seed((*chunk.state, *own_metrics(chunk.layers))))
        self.trainable, self.state = self._chunk.trainable, self._chunk.state
        self.tensors, self._layout = pack(inputs)
        self._training, self._context = training, context_values()
        self._output_layout: list[tuple[bool, ...]] = []
        self.kept = Kept(chunk.layers)

    def run(self, trainable: Sequence[Any], state: Sequence[Any], tensors: Sequence[Any]) -> PureResult:
        """Computes with these values of the variables; the result is a flat list of tensors."""
        inputs, begin = unpack(tensors, self._layout), ops.uid()
        outputs, *rest = self._chunk.run(trainable, state, inputs, self._training, self._context)
        results, self._output_layout = pack(outputs)
        return PureResult([*results, *self.kept.since(begin)], *rest)

    def outputs(self, tensors: Sequence[tf.Tensor]) -> list[Value]:
        """What the chunk returns, with these tensors in it."""
        return unpack(tensors, self._output_layout)


class LayerBlock:
    """A layer, in one call of it."""

    def __init__(self, layer: keras.layers.Layer, label: str, function: Callable, args: tuple, kwargs: dict[str, Any]):
        self.label = label
        self.trainable = tuple(v for v in layer.variables if v.trainable)
        self.state = _with_global_seed((*(v for v in layer.variables if not v.trainable), *own_metrics([layer])))
        self._layer, self._function, self._arguments = layer, function, (args, kwargs)
        self.tensors, self._layout = pack([value_of(x) for x in tree.flatten(self._arguments) if tf.is_tensor(x)])
        self._context = context_values()
        self._results: Any = None
        self._output_layout: list[tuple[bool, ...]] = []
        self.kept = Kept([layer])

    def run(self, trainable: Sequence[Any], state: Sequence[Any], tensors: Sequence[Any]) -> PureResult:
        """Computes with these values of the variables; the result is a flat list of tensors."""
        begin = ops.uid()
        args, kwargs = _filled_in(self._arguments, unpack(tensors, self._layout))

        def run() -> Any:
            # Layers in it may be blocks by themselves, where it is none: here they are a part of it.
            with call_context(self._context), tracing():
                return self._function(*args, **kwargs)

        self._results, *rest = call_purely(
            run,
            f"layer '{self._layer.name}'",
            list(zip(self.trainable, trainable, strict=True)),
            list(zip(self.state, state, strict=True)),
        )
        values = [value_of(x) for x in tree.flatten(self._results) if tf.is_tensor(x)]
        results, self._output_layout = pack(values)
        return PureResult([*results, *self.kept.since(begin)], *rest)

    def outputs(self, tensors: Sequence[tf.Tensor]) -> Any:
        """What the layer returns, with these tensors in it."""
        return _filled_in(self._results, unpack(tensors, self._output_layout))


class RegularizerBlock:
    """The regularization loss of a weight, added to those of the weights before: so one comes after the other."""

    label = ""
    state = ()
    kept = Kept(())

    def __init__(self, weight: keras.Variable, before: tf.Tensor):
        self.trainable, self.tensors = (weight,), [before]

    def run(self, trainable: Sequence[Any], state: Sequence[Any], tensors: Sequence[Any]) -> PureResult:
        """Computes with this value of the weight; what has several elements counts as their sum, as in Keras."""
        return PureResult([tensors[0] + tf.reduce_sum(self.trainable[0].regularizer(trainable[0]))], [], [])


def _filled_in(structure: Any, values: Sequence[Value]) -> Any:
    given = iter(values)
    return tree.map_structure(lambda x: attached(next(given)) if tf.is_tensor(x) else x, structure)


def _with_global_seed(state: Sequence[keras.Variable]) -> tuple[keras.Variable, ...]:
    """Adds the global seed, which random functions without a seed of their own use and change."""
    generator = global_seeds()
    if generator is None or not is_here(generator) or any(v is generator.state for v in state):
        return tuple(state)
    return (*state, generator.state)


_numbers = itertools.count()
_recording: dict[str, str] | None = None
# The name scope of gradients.
GRADIENT = "gradient_tape/"


@contextlib.contextmanager
def record_operations(graph: tf.Graph) -> Iterator[list[str]]:
    """Records the names of the operations that this replica, which has a thread of its own, makes in this context.

    The operations are not changed. A name scope would be simpler, but TensorFlow orders the terms of sums by the names
    of operations, so that it would change results.
    """
    names: list[str] = []
    thread = threading.get_ident()

    def note(node: Any) -> None:
        if threading.get_ident() == thread:
            names.append(node.name)

    with graph._attr_scope({f"_tfdist_recorded_{next(_numbers)}": note}):
        yield names


@contextlib.contextmanager
def record_blocks() -> Iterator[dict[str, str]]:
    """Records the blocks of the operations that are made in this context: `{name of operation: block}`."""
    global _recording
    _recording = {}
    try:
        yield _recording
    finally:
        _recording = None


@contextlib.contextmanager
def labelled(block: str) -> Iterator[None]:
    """Operations that this thread makes in this context belong to a block; an empty name is no block."""
    labels = _recording
    if labels is None or not block or tf.executing_eagerly():
        yield
        return
    with record_operations(tf.compat.v1.get_default_graph()) as made:
        yield
    labels.update(dict.fromkeys(made, block))


def upstream(
    operations: Iterable[tf.Operation], before: Callable[[tf.Operation], Iterable[tf.Operation]]
) -> set[tf.Operation]:
    """The given operations of a graph, and all that are found by going back from them by `before`."""
    found: set[tf.Operation] = set()
    waiting = list(operations)
    while waiting:
        operation = waiting.pop()
        if operation not in found:
            found.add(operation)
            waiting += before(operation)
    return found


def block_finder(labels: Mapping[str, str]) -> Callable[[str], str]:
    """Returns a function from the name of an operation to its block: the one recorded, or that of its gradients.

    TensorFlow names the operations of a gradient after the operation of the forward pass. So they belong to the block
    of the name scope of that operation, if all operations recorded in the scope are of one block.

    The function returns an empty string for what is in no block.

    Example:
        >>> block_of = block_finder({"model/dense/MatMul": "a", "model/dense_1/MatMul": "b"})
        >>> block_of("model/dense_1/MatMul"), block_of("gradient_tape/model/dense/MatMul/MatMul_1"), block_of("Adam")
        ('b', 'a', '')
    """
    in_scope: dict[str, set[str]] = {}
    for name, block in labels.items():
        in_scope.setdefault(name.rpartition("/")[0], set()).add(block)
    of_scope = {scope: blocks.pop() for scope, blocks in in_scope.items() if len(blocks) == 1}

    def block_of(operation: str) -> str:
        if operation in labels:
            return labels[operation]
        before, found, scope = operation.partition(GRADIENT)
        scope = before + scope if found else ""
        while scope and scope not in of_scope:
            scope = scope.rpartition("/")[0]
        return of_scope.get(scope, "")

    return block_of
