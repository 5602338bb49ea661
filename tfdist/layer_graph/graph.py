"""A Keras Functional or Sequential model as one flat list of calls, with the models nested in it opened."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import keras
from keras import tree

from tfdist.compat.upstream import Functional, unpack_singleton


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer or an operation.

    Attributes:
        operation: the layer or `keras.ops` operation.
        name: path of the operation, with the models that it is nested in: "encoder/dense_1".
        node: Keras' own description of the call.
        inputs: keys of the values that it takes, by id of Keras' symbolic tensor.
        outputs: keys of the values that it returns.
        enclosing: Keras' descriptions of the calls of the models that it is nested in, outermost first.
    """

    operation: Any
    name: str
    node: Any
    inputs: Mapping[int, int]
    outputs: tuple[int, ...]
    enclosing: tuple[Any, ...] = ()

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the layer; none if the operation is not a layer."""
        return list(self.operation.variables) if isinstance(self.operation, keras.layers.Layer) else []

    def run(self, values: dict[int, Any], training: bool | None) -> None:
        """Calls the operation and adds its results to `values`, as Keras does for a whole model."""
        args, kwargs = self.node.arguments.fill_in({kept: values[key] for kept, key in self.inputs.items()})
        if training is not None and isinstance(self.operation, keras.layers.Layer):
            kwargs = {**kwargs, "training": training}
        values.update(zip(self.outputs, tree.flatten(self.operation(*args, **kwargs)), strict=True))


@dataclasses.dataclass(frozen=True)
class LayerGraph:
    """The calls of a model, in an order in which they can be executed.

    Attributes:
        calls: the calls.
        inputs: keys of the model's inputs.
        outputs: keys of the model's outputs.
        shapes: symbolic shape and dtype by key: `(shape, dtype)`, where the batch size is `None`.
    """

    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    shapes: Mapping[int, tuple[tuple[int | None, ...], str]]


def functional_of(model: keras.Model) -> Functional | None:
    """The graph of layers that is run when `model` is called; `None` if it has none, or is not built yet."""
    if isinstance(model, keras.Sequential):
        usable = type(model).call is keras.Sequential.call and isinstance(model._functional, Functional)
        return model._functional if usable else None
    return model if isinstance(model, Functional) and type(model).call is Functional.call else None


def flatten(functional: Functional) -> LayerGraph:
    """Lists the calls of a Functional model; nested models are opened where that changes nothing.

    Example:
        >>> import keras
        >>> inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="a")], name="inner")
        >>> x = keras.Input((2,))
        >>> model = keras.Model(x, keras.layers.Dense(1, name="b")(inner(x)))
        >>> [call.name for call in flatten(model).calls]
        ['inner/a', 'b']
    """
    calls: list[Call] = []
    shapes: dict[int, tuple[tuple[int | None, ...], str]] = {}

    def new_key(tensor: Any) -> int:
        shapes[len(shapes)] = tuple(tensor.shape), keras.backend.standardize_dtype(tensor.dtype)
        return len(shapes) - 1

    def visit(graph: Functional, keys: dict[int, int], prefix: str, enclosing: tuple[Any, ...]) -> list[int]:
        for depth in sorted(graph._nodes_by_depth, reverse=True):
            for node in graph._nodes_by_depth[depth]:
                if not node.operation or node.is_input or any(id(t) not in keys for t in node.input_tensors):
                    continue
                name = prefix + node.operation.name
                inner = _opened(node)
                if inner is not None:
                    arguments = tree.flatten(node.arguments.args[0])
                    known = {id(own): keys[id(given)] for own, given in zip(inner.inputs, arguments, strict=True)}
                    made = visit(inner, known, f"{name}/", (*enclosing, node))
                else:
                    made = [new_key(t) for t in node.outputs]
                    taken = {id(t): keys[id(t)] for t in node.input_tensors}
                    calls.append(Call(node.operation, name, node, taken, tuple(made), enclosing))
                keys.update(zip(map(id, node.outputs), made, strict=True))
        return [keys[id(t)] for t in graph.outputs]

    inputs = {id(t): new_key(t) for t in functional.inputs}
    outputs = visit(functional, dict(inputs), "", ())
    return LayerGraph(tuple(calls), tuple(inputs[id(t)] for t in functional.inputs), tuple(outputs), shapes)


def _opened(node: Any) -> Functional | None:
    """The model that a node calls, if calling its layers one by one does the same; otherwise `None`."""
    model = node.operation
    if not isinstance(model, keras.Model) or model.activity_regularizer is not None:
        return None
    inner = functional_of(model)
    arguments = node.arguments
    if inner is None or len(arguments.args) != 1 or any(v is not None for v in tree.flatten(arguments.kwargs)):
        return None
    if inspect.signature(model.call).parameters.keys() - {"inputs", "training", "mask", "kwargs"}:
        return None
    given, own = tree.flatten(arguments.args[0]), inner.inputs
    try:
        tree.assert_same_structure(
            tree.lists_to_tuples(arguments.args[0]), tree.lists_to_tuples(unpack_singleton(inner._inputs_struct))
        )
    except ValueError:
        return None
    # Where Keras would cast or reshape the inputs, the model stays one call.
    same = all(
        isinstance(a, keras.KerasTensor) and a.dtype == b.dtype and len(a.shape) == len(b.shape)
        for a, b in zip(given, own, strict=True)
    )
    return inner if same else None
