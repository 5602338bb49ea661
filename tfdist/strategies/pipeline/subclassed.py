"""The graph of layers of a model with a `call` of its own, found by calling that with Keras' symbolic tensors.

Keras notes each call of a layer, or of `keras.ops`, with symbolic tensors. So what `call` notes is all that it does if
it does nothing else: if it reads and assigns no variable itself, calls nothing of TensorFlow, and keeps nothing on
`self`. It is called as in training, as in inference, and as by itself, and has to call the same layers each time.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfdist.compat.upstream import Functional, func_graph
from tfdist.layer_graph.chunk import call_context
from tfdist.layer_graph.graph import Call, flatten


def functional_of_call(model: keras.Model, x: Any, known: Functional | None = None) -> Functional | None:
    """The layers that a model calls for such inputs, as a functional model; `None` if they are not all that it does.

    Args:
        model: a model that is built, with a `call` of its own.
        x: its inputs, a structure of dense tensors.
        known: what an earlier call has returned; it is returned again if it is the same.
    """
    as_it_is, *others = (_traced(model, x, training) for training in (None, True, False))
    if as_it_is is None or None in others:
        return None
    expected = _parts(as_it_is, None)
    is_same = all(_parts(one, training) == expected for one, training in zip(others, (True, False), strict=True))
    if not is_same or expected is None:
        return None
    return known if known is not None and takes(known, x) and _parts(known, None) == expected else as_it_is


def takes(functional: Functional, x: Any) -> bool:
    """Whether inputs have the structure, the shapes but for the rows, and the dtypes that a graph was made for."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        tree.assert_same_structure(functional._inputs_struct, x)
        pairs = zip(functional.inputs, tree.flatten(x), strict=True)
        return all(
            tuple(own.shape[1:]) == tuple(one.shape[1:])
            and keras.backend.is_float_dtype(own.dtype) == tf.as_dtype(one.dtype).is_floating
            for own, one in pairs
        )
    return False


class _Noting(keras.StatelessScope):
    """Notes whether a variable is read or assigned, other than by layers: these have scopes of their own."""

    is_used = False

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.is_used = True
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self.is_used = True
        super().add_update(update)


def _traced(model: keras.Model, x: Any, training: bool | None) -> Functional | None:
    if not all(isinstance(one, tf.Tensor) and one.shape.rank for one in tree.flatten(x)):
        return None

    def symbolic(one: tf.Tensor, name: str | None = None) -> Any:
        # As Keras casts them when the model is called.
        dtype = model.input_dtype if model.autocast and one.dtype.is_floating else one.dtype
        dtype = keras.backend.standardize_dtype(dtype)
        return keras.Input(batch_shape=(None, *one.shape[1:]), dtype=dtype, name=name)

    before = dict(vars(model))
    graph = func_graph.FuncGraph("tfdist_layers_of_call")
    # What does not take symbolic tensors fails, in any way; what takes them has been noted.
    with (
        contextlib.suppress(Exception),
        tf.init_scope(),
        graph.as_default(),
        warnings.catch_warnings(),
        _Noting() as scope,
    ):
        warnings.simplefilter("ignore")
        is_named = isinstance(x, dict) and not any(map(tree.is_nested, x.values()))
        inputs = {k: symbolic(v, k) for k, v in x.items()} if is_named else tree.map_structure(symbolic, x)
        with call_context({"training": training}):
            arguments = {"training": training} if model._call_has_training_arg else {}
            outputs = type(model).call(model, inputs, **arguments)
        is_packed = isinstance(outputs, (list, tuple)) and len(outputs) == 1  # Keras would unpack it
        keeps = vars(model).keys() - before.keys() or any(vars(model)[name] is not before[name] for name in before)
        if not (scope.is_used or graph.get_operations() or is_packed or keeps):
            return Functional(inputs, outputs, name=model.name)
    return None


def _parts(functional: Functional, training: bool | None) -> list[Any] | None:
    """What tells the calls of two graphs apart; `None` if a layer is not called with `training` as its model is."""
    parts = []
    for call in flatten(functional).calls:
        args, kwargs = call.node.arguments.args, dict(call.node.arguments.kwargs)
        layer = call.operation if isinstance(call.operation, keras.layers.Layer) else None
        if layer is not None and layer._call_has_training_arg:
            given_training = kwargs.pop("training", None)
            # By itself, a layer may train by default.
            if training is not None and given_training is not training:
                return None
        given = tree.flatten([args, kwargs])
        if any(isinstance(one, (keras.Variable, tf.Variable)) for one in given):
            return None
        constants = ["" if isinstance(one, keras.KerasTensor) else repr(one) for one in given]
        parts.append((_kind(call), tuple(call.inputs.values()), call.outputs, constants))
    return parts


def _kind(call: Call) -> Any:
    """A layer, or what kind of operation it is, with its settings."""
    operation = call.operation
    if isinstance(operation, keras.layers.Layer):
        return id(operation)
    settings = {name: repr(v) for name, v in vars(operation).items() if not name.startswith("_") and name != "name"}
    return type(operation), settings
