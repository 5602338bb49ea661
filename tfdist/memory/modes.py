"""Puts the modes of a policy into effect on a model: for good, or for as long as a step of it is estimated.

A mode works by replacing the `call` of the model (`GraphCall`), or of the layers that are its blocks (`LayerCall`): the
replacement runs it block by block while something is trained. With mode "auto", `tfdist.memory.application` chooses the
modes first, and then calls `apply_modes`.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfdist.compat.keras import hooks_of
from tfdist.compat.upstream import record, unpack_singleton
from tfdist.inspection.model_state import is_sharded, is_table
from tfdist.layer_graph.chunk import NOT_DENSE, attached, is_traced, own_metrics, value_of
from tfdist.layer_graph.graph import flatten, functional_of
from tfdist.memory.block import GraphBlock, LayerBlock, RegularizerBlock, labelled
from tfdist.memory.kinds import KINDS, call_block
from tfdist.memory.order import Keeping, current_order
from tfdist.memory.plan import GraphPlan, LayerPlan, plan_graph, plan_layers
from tfdist.memory.policy import MemoryPolicy

_log = logging.getLogger("tfdist")
# Attribute of a model whose `supports_jit` this module has changed: what its `jit_compile` was.
_WITHOUT_XLA = "_tfdist_without_xla"
_ON_HOST = ("recompute+swap", "swap")


def keeping(policy: MemoryPolicy, model: keras.Model | None) -> Keeping:
    """The settings with which blocks are called in one call of a model; `None`: of one that is gone."""
    compiled = bool(model is not None and model.compiled and model.jit_compile)
    return Keeping(current_order(), policy.host, policy.prefetch, policy.min_bytes, compiled)


def _runs_blocks(policy: MemoryPolicy) -> bool:
    """Whether a model is run block by block here: to train it, or because its weights are elsewhere."""
    if policy.gathers:
        return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    return policy.streams or record.could_possibly_record()


def _is_block(policy: MemoryPolicy, layers: Sequence[keras.layers.Layer]) -> bool:
    """Whether layers are a block. If not, weights are gathered where a layer reads them."""
    if not policy.gathers:
        return True
    variables = [*(variable for layer in layers for variable in layer.variables), *own_metrics(layers)]
    if any(map(is_table, variables)):
        return False  # a table's rows are looked up where they are
    return any(map(is_sharded, variables)) and all(variable.aggregation != "sum" for variable in variables)


class GraphCall:
    """Replaces the `call` of a Functional or Sequential model: runs its layers block by block, each in its mode.

    Where nothing is trained, where Keras only asks for shapes, and where the model is part of a block itself, it does
    what the original does.
    """

    def __init__(self, model: keras.Model, plan: GraphPlan, policy: MemoryPolicy):
        self.model, self.plan, self.policy = model, plan, policy
        self._original = type(model).call.__get__(model)

    def is_current(self) -> bool:
        """Whether the model still has the layers of its plan: a Sequential model, or one in it, may get others."""
        functional = functional_of(self.model)
        calls = () if functional is None else flatten(functional).calls
        return [call.node for call in calls] == [call.node for call in self.plan.graph.calls]

    def __call__(self, inputs: Any, training: bool | None = None, mask: Any = None, **kwargs: Any) -> Any:
        symbolic = any(map(keras.backend.is_keras_tensor, tree.flatten(inputs)))
        elsewhere = is_traced() or kwargs or symbolic or not _runs_blocks(self.policy)
        if elsewhere or not self.is_current():
            return self._original(inputs, training=training, mask=mask, **kwargs)
        plan = self.plan
        tensors = plan.functional._standardize_inputs(inputs)
        values = {key: value_of(tensor) for key, tensor in zip(plan.graph.inputs, tensors, strict=True)}
        if mask is not None:
            # As in Keras: a batch may have features that the model does not take.
            masks = zip(plan.graph.inputs, tree.flatten(mask), strict=False)
            values.update({key: values[key]._replace(mask=given) for key, given in masks if given is not None})
        how = keeping(self.policy, self.model)
        for chunk, mode, name in zip(plan.chunks, plan.modes, plan.names, strict=True):
            given = [values[key] for key in chunk.inputs]
            # Layers that take something else, as sparse tensors, are called as they are.
            are_dense = all(isinstance(value.tensor, tf.Tensor) for value in given)
            if KINDS[mode] is None or not are_dense or not _is_block(self.policy, chunk.layers):
                with labelled(name):
                    outputs = chunk.call(given, training)
                values.update(zip(chunk.outputs, outputs, strict=True))
                continue
            block = GraphBlock(chunk, training, given, name)
            result = call_block(block, KINDS[mode], how)
            values.update(zip(chunk.outputs, block.outputs(result.result), strict=True))
            self.model._losses.extend(result.losses)
        outputs = [attached(values[key]) for key in plan.graph.outputs]
        return unpack_singleton(tree.pack_sequence_as(plan.functional._outputs_struct, outputs))


class LayerCall:
    """Replaces the `call` of a layer: runs it as one block in its mode, under the same conditions as `GraphCall`."""

    def __init__(self, layer: keras.layers.Layer, name: str, mode: str, model: keras.Model, policy: MemoryPolicy):
        self.policy, self._layer, self._name, self._mode = policy, layer, name, mode
        self._model = weakref.ref(model)
        self._original = type(layer).call.__get__(layer)

    @property
    def model(self) -> keras.Model | None:
        """The model that it is a block of; `None`: it is gone."""
        return self._model()

    def is_current(self) -> bool:
        """Whether it is a block of its model."""
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Keras also calls layers with symbolic tensors, to learn the shapes of their outputs.
        in_block = is_traced() or not any(map(tf.is_tensor, tree.flatten((args, kwargs))))
        if in_block or not _runs_blocks(self.policy):
            return self._original(*args, **kwargs)
        are_dense = not any(isinstance(value, NOT_DENSE) for value in tree.flatten((args, kwargs)))
        if KINDS[self._mode] is None or not are_dense or not _is_block(self.policy, [self._layer]):
            with labelled(self._name):
                return self._original(*args, **kwargs)
        block = LayerBlock(self._layer, self._name, self._original, args, kwargs)
        result = call_block(block, KINDS[self._mode], keeping(self.policy, self.model))
        for loss in result.losses:
            self._layer.add_loss(loss)
        return block.outputs(result.result)


def regularization_losses(model: keras.Model) -> list[tf.Tensor]:
    """Those of the weights of a model, of which the sharded ones are gathered one by one; their losses are one sum.

    It takes the place of Keras' `_get_regularization_losses`, which would gather all of them at once.
    """
    policy = modes_of(model)
    weights = [v for v in model.trainable_weights if v.regularizer is not None]
    sharded = [v for v in weights if is_sharded(v)]
    if policy is None or not sharded:
        return type(model)._get_regularization_losses(model)
    total, how = tf.zeros([], sharded[0].dtype), keeping(policy, model)
    for weight in sharded:
        (total,) = call_block(RegularizerBlock(weight, total), KINDS[policy.mode], how).result
    return [*(v.regularizer(v) for v in weights if not is_sharded(v)), total]


def applied(model: keras.Model) -> MemoryPolicy | None:
    """The policy that is applied to a model, or to a part of it; `None` if there is none."""
    if (automatic := automatic_of(model)) is not None:
        return automatic.policy
    # A model in it that was trained by itself has that of its strategy, which says nothing of the other layers.
    own = (
        one for one in _calls(model) if one.model is model or not (isinstance(one, GraphCall) and one.policy.streams)
    )
    return next((call.policy for call in own), None)


def automatic_of(model: keras.Model) -> Any | None:
    """What chooses for a model; `None` if its policy says what is kept, or it has none."""
    return getattr(vars(model).get("make_train_function"), "__self__", None)


def check_not_streamed(model: keras.Model) -> None:
    """Refuses another policy for a model that has one of its strategy's."""
    if hooks_of(model.distribute_strategy).streams_weights:
        raise ValueError(
            f"Received: a memory policy for model '{model.name}' under {type(model.distribute_strategy).__name__}, "
            "which has one of its own. Expected: its arguments, blocks=..., prefetch=..., and no policy; or the policy "
            "and another strategy."
        )


def apply_modes(model: keras.Model, policy: MemoryPolicy) -> None:
    """Applies a policy whose modes are known: replaces the calls of a model, or of its layers."""
    plan = plan_of(model, policy)
    remove_modes(model)
    if isinstance(plan, GraphPlan):
        calls = [(model, GraphCall(model, plan, policy))]
    else:
        blocks = zip(plan.layers, plan.names, plan.modes, strict=True)
        calls = [(layer, LayerCall(layer, name, mode, model, policy)) for layer, name, mode in blocks]
    for layer, call in calls:
        # Around Keras' attribute tracking, which would count the replacement as a part of the layer.
        object.__setattr__(layer, "call", call)
    # The train function was traced with the old calls: Keras makes a new one.
    model.train_function = None
    if set(policy.modes) & set(_ON_HOST):
        _do_without_xla(model)
        if len(tf.config.list_logical_devices()) == 1:
            _log.warning(
                "Mode %s for model '%s' on a machine whose only device is the host: nothing can be kept elsewhere. "
                "Mode 'recompute' saves memory here.",
                " and ".join(repr(mode) for mode in _ON_HOST if mode in policy.modes),
                model.name,
            )


@contextlib.contextmanager
def under(model: keras.Model, policy: MemoryPolicy | None) -> Iterator[None]:
    """Applies a policy whose modes are known, for as long as the block runs; `None` keeps everything."""
    function, compiled, supports = model.train_function, model.jit_compile, model.supports_jit
    calls = {id(layer): (layer, vars(layer)["call"]) for layer in model._flatten_layers() if _has_call(layer)}
    without_xla = vars(model).get(_WITHOUT_XLA)
    try:
        try:
            apply_modes(model, policy or MemoryPolicy("none"))
        except ValueError:
            if policy is not None:
                raise
        yield
    finally:
        remove_modes(model)
        for layer, call in calls.values():
            object.__setattr__(layer, "call", call)
        if without_xla is not None:
            object.__setattr__(model, _WITHOUT_XLA, without_xla)
        model.supports_jit, model.jit_compile, model.train_function = supports, compiled, function


def contents_of(model: keras.Model, policy: MemoryPolicy) -> dict[str, str]:
    """The first and the last layer of each block, by the block's name; nothing where blocks are layers."""
    functional = functional_of(model)
    if functional is None or policy.blocks != "auto":
        return {}
    plan = plan_graph(functional, policy)
    ends = [list(dict.fromkeys((chunk.calls[0].name, chunk.calls[-1].name))) for chunk in plan.chunks]
    return {name: " to ".join(of_block) for name, of_block in zip(plan.names, ends, strict=True)}


def plan_of(model: keras.Model, policy: MemoryPolicy) -> GraphPlan | LayerPlan:
    """The blocks of a model, and the mode of each.

    Raises:
        ValueError: if the policy names blocks that there are not, or no blocks are found.
    """
    functional = functional_of(model)
    return plan_layers(model, policy) if functional is None else plan_graph(functional, policy)


def modes_of(model: keras.Model) -> MemoryPolicy | None:
    """The policy whose modes are applied; `None` also if the model has got other layers since."""
    return next((call.policy for call in _calls(model)), None)


def _calls(model: keras.Model) -> Iterator[GraphCall | LayerCall]:
    """The replaced calls of a model and its layers, but those of models that have got other layers since."""
    calls = (vars(layer)["call"] for layer in model._flatten_layers() if _has_call(layer))
    return (call for call in calls if call.is_current())


def _has_call(layer: keras.layers.Layer) -> bool:
    return isinstance(vars(layer).get("call"), (GraphCall, LayerCall))


def remove_modes(model: keras.Model) -> None:
    """Gives a model and its layers their calls back."""
    for layer in model._flatten_layers():
        if _has_call(layer):
            object.__delattr__(layer, "call")
            model.train_function = None
    if (compiled := vars(model).pop(_WITHOUT_XLA, None)) is not None:
        model.supports_jit = True
        model.jit_compile = model.jit_compile or compiled


def _do_without_xla(model: keras.Model) -> None:
    """Trains a model without XLA, which has one device, and orders operations itself: it would send nothing in time."""
    if not model.supports_jit:
        return
    # For a later `compile`: with this, Keras turns jit_compile="auto" into False, and True too, with a warning.
    model.supports_jit = False
    object.__setattr__(model, _WITHOUT_XLA, bool(model.compiled and model.jit_compile))
    if model.compiled and model.jit_compile:
        _log.warning(
            "Model '%s' was compiled with XLA, which cannot send activations to the host; it is trained without "
            "(jit_compile=False).",
            model.name,
        )
        model.jit_compile = False
