"""Parts of a model as pure functions: consecutive calls of a graph of layers, or one layer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfdist.compat.upstream import CallContext, global_state
from tfdist.inspection import global_seeds
from tfdist.layer_graph.chunk import Chunk
from tfdist.layer_graph.pure_call import PureResult, call_purely
from tfdist.layer_graph.values import Value, attached, pack, unpack, value_of

_ATTRIBUTE = "current_call_ctx"


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
    """Tells layers the same in a later call. What the model has collected in its call is not touched."""
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


class GraphBlock:
    """Consecutive calls of a Functional or Sequential model, in one call of the model.

    Attributes:
        label: the block's name.
        trainable: its trainable variables.
        state: all other variables that it uses.
        tensors: what goes in.
    """

    def __init__(self, chunk: Chunk, model: keras.Model, training: bool, inputs: Sequence[Value], label: str):
        self.label = label
        # `trainable` of layers may have changed since the policy was applied.
        chunk = chunk.as_it_is()
        self._chunk = dataclasses.replace(chunk, state=_with_global_seed(chunk.state))
        self.trainable, self.state = self._chunk.trainable, self._chunk.state
        self.tensors, self._layout = pack(inputs)
        self._model, self._training, self._context = model, training, context_values()
        self._output_layout: list[tuple[bool, ...]] = []

    def run(self, trainable: Sequence[Any], state: Sequence[Any], tensors: Sequence[Any]) -> PureResult:
        """See `Block.run`."""
        inputs = unpack(tensors, self._layout)
        with call_context(self._context):
            outputs, *rest = self._chunk.run(self._model, trainable, state, inputs, self._training)
        results, self._output_layout = pack(outputs)
        return PureResult(results, *rest)

    def outputs(self, tensors: Sequence[tf.Tensor]) -> list[Value]:
        """What the chunk returns, with these tensors in it."""
        return unpack(tensors, self._output_layout)


class LayerBlock:
    """A layer, in one call of it.

    Attributes:
        label: the block's name.
        trainable: its trainable variables.
        state: all other variables that it uses.
        tensors: what goes in.
    """

    def __init__(self, layer: keras.layers.Layer, label: str, function: Callable, args: tuple, kwargs: dict[str, Any]):
        self.label = label
        self.trainable = tuple(v for v in layer.variables if v.trainable)
        self.state = _with_global_seed(tuple(v for v in layer.variables if not v.trainable))
        self._layer, self._function, self._arguments = layer, function, (args, kwargs)
        self.tensors, self._layout = pack([value_of(x) for x in tree.flatten(self._arguments) if tf.is_tensor(x)])
        self._context = context_values()
        self._results: Any = None
        self._output_layout: list[tuple[bool, ...]] = []

    def run(self, trainable: Sequence[Any], state: Sequence[Any], tensors: Sequence[Any]) -> PureResult:
        """See `Block.run`."""
        args, kwargs = _filled_in(self._arguments, unpack(tensors, self._layout))

        def run() -> Any:
            with call_context(self._context):
                return self._function(*args, **kwargs)

        self._results, *rest = call_purely(
            run,
            f"layer '{self._layer.name}'",
            list(zip(self.trainable, trainable, strict=True)),
            list(zip(self.state, state, strict=True)),
        )
        values = [value_of(x) for x in tree.flatten(self._results) if tf.is_tensor(x)]
        results, self._output_layout = pack(values)
        return PureResult(results, *rest)

    def outputs(self, tensors: Sequence[tf.Tensor]) -> Any:
        """What the layer returns, with these tensors in it."""
        return _filled_in(self._results, unpack(tensors, self._output_layout))


def _filled_in(structure: Any, values: Sequence[Value]) -> Any:
    given = iter(values)
    return tree.map_structure(lambda x: attached(next(given)) if tf.is_tensor(x) else x, structure)


def _with_global_seed(state: Sequence[keras.Variable]) -> tuple[keras.Variable, ...]:
    """Adds the global seed, which random functions without a seed of their own use and change."""
    generator = global_seeds.current()
    if generator is None or not global_seeds.is_here(generator) or any(v is generator.state for v in state):
        return tuple(state)
    return (*state, generator.state)
