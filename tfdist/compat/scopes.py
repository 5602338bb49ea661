"""Entering and leaving `strategy.scope()`.

What one process of several does alone must not need the others: it leaves the scope for a while. And what makes a
model's variables outside of its strategy's scope, as Keras 2 allowed, enters it. `compile("adam", "mse")`: names, dicts
and configs carry nothing from outside; instances made outside are refused later. `build`, `enable_lora`, `quantize`, a
layer on top: who makes a variable is known by the weights that are there already.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras import has_hooks
from tfdist.compat.patch import Patch, inherited
from tfdist.compat.upstream import distribute_lib, ops


@contextlib.contextmanager
def outside_of_scope() -> Iterator[None]:
    """Within the block, eager code runs as if no strategy's scope were open.

    In the scope of several processes every new variable is a broadcast. Keras makes some where nobody expects any: to
    save a model, it makes an optimizer and a metric, whose attributes it compares with the model's.
    """
    graph = ops.get_default_graph()
    creators, graph._variable_creator_stack = graph._variable_creator_stack, []
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()
        graph._variable_creator_stack = creators


# Under which tfdist strategy a layer was made, or has made weights. It may have none yet, or none any longer:
# `Normalization.adapt` makes them, `quantize` replaces them.
_made_under: weakref.WeakKeyDictionary[Any, weakref.ref] = weakref.WeakKeyDictionary()


def _strategy_of(part: Any) -> tf.distribute.Strategy | None:
    strategy = getattr(part, "_distribute_strategy", None)
    if strategy is None and isinstance(part, keras.Layer):
        strategy = _made_under.get(part, lambda: None)()
    return strategy if has_hooks(strategy) else None


def _before(arguments: Any) -> Iterator[Any]:
    """The layers from which symbolic tensors come, the nearest first."""
    tensors = [one for one in keras.tree.flatten(arguments) if isinstance(one, keras.KerasTensor)]
    seen = set()
    while tensors:
        history = getattr(tensors.pop(0), "_keras_history", None)
        if history is not None and id(history.operation) not in seen:
            seen.add(id(history.operation))
            yield history.operation
            tensors += history.operation._inbound_nodes[history.node_index].input_tensors


def _scope_of(part: Any, arguments: Any = ()) -> contextlib.AbstractContextManager:
    if tf.distribute.has_strategy() or tf.inside_function():
        return contextlib.nullcontext()
    found = (strategy for one in (part, *_before(arguments)) if (strategy := _strategy_of(one)) is not None)
    strategy = next(found, None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def _in_scope(prepare: Callable[[Any], None], original: Callable) -> Callable:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(self)
        with _scope_of(self):
            return original(self, *args, **kwargs)

    return method


def _nothing(part: Any) -> None:
    pass


def _adopt(model: Any) -> None:
    """Made outside of parts that were made inside, such as a head on a backbone, a model belongs to their strategy."""
    if model._distribute_strategy is None and not tf.distribute.has_strategy():
        owners = [getattr(variable.value, "distribute_strategy", None) for variable in model.variables]
        # Variables of a pipeline, or on the host, are plain ones: their layers know.
        owners += map(_strategy_of, model._flatten_layers())
        model._distribute_strategy = next(filter(has_hooks, owners), None)


def _note(layer: Any) -> None:
    strategy = tf.distribute.get_strategy()
    if has_hooks(strategy):
        _made_under[layer] = weakref.ref(strategy)


def _maybe_build(original: Callable) -> Callable:
    def _maybe_build(self: Any, call_spec: Any) -> Any:
        if self.built:
            return None
        with _scope_of(self, call_spec.arguments_dict):
            return original(self, call_spec)

    return _maybe_build


_REASON = "no upstream issue: Keras 3 makes variables in the scope that is open, Keras 2 in that of the model"

PATCHES = [
    *(
        Patch(target, functools.partial(_in_scope, prepare), "keras", _REASON)
        for target, prepare in (
            (inherited(keras.Model, "compile"), _adopt),
            (inherited(keras.Model, "compile_from_config"), _nothing),
            ("keras.src.models.sequential:Sequential.build", _nothing),
            (inherited(keras.Layer, "__init__"), _note),
            (inherited(keras.Layer, "add_weight"), _note),
        )
    ),
    Patch(inherited(keras.Layer, "_maybe_build"), _maybe_build, "keras", _REASON),
]
