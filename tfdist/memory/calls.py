"""Replacements for the `call` of a model or of a layer, which run it block by block while something is trained.

`GraphCall` replaces that of a Functional or Sequential model, `LayerCall` that of a layer that is a block, and
`UndecidedCall` that of a model with mode "auto", until it is known how large batches are.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfdist.compat.upstream import record, unpack_singleton
from tfdist.layer_graph.chunk import is_traced
from tfdist.layer_graph.values import attached, value_of
from tfdist.memory.block_call import BlockCall, call_block
from tfdist.memory.block_plan import GraphPlan
from tfdist.memory.blocks import GraphBlock, LayerBlock
from tfdist.memory.offload import Streamed, Swapped, SwappedInputs
from tfdist.memory.op_recorder import labelled
from tfdist.memory.order import Keeping, current_order
from tfdist.memory.policy import MemoryPolicy
from tfdist.memory.recompute import Recomputed

KINDS: dict[str, type[BlockCall] | None] = {
    "none": None,
    "recompute": Recomputed,
    "recompute+swap": SwappedInputs,
    "swap": Swapped,
    "stream": Streamed,
}
_log = logging.getLogger("tfdist")


def keeping(policy: MemoryPolicy, model: keras.Model) -> Keeping:
    """The settings with which blocks are called in one call of a model."""
    compiled = bool(model.compiled and model.jit_compile)
    return Keeping(current_order(), policy.host, policy.prefetch, policy.min_bytes, compiled)


class GraphCall:
    """Replaces the `call` of a Functional or Sequential model: runs its layers block by block, each in its mode.

    Where nothing is trained, where Keras only asks for shapes, and where the model is part of a block itself, it does
    what the original does.
    """

    def __init__(self, model: keras.Model, plan: GraphPlan, policy: MemoryPolicy):
        self._model, self.plan, self.policy = model, plan, policy
        self._original = type(model).call.__get__(model)

    def __call__(self, inputs: Any, training: bool | None = None, mask: Any = None, **kwargs: Any) -> Any:
        symbolic = any(map(keras.backend.is_keras_tensor, tree.flatten(inputs)))
        idle = not (self.policy.streams or record.could_possibly_record())
        if is_traced() or kwargs or symbolic or idle:
            return self._original(inputs, training=training, mask=mask, **kwargs)
        plan = self.plan
        tensors = plan.functional._standardize_inputs(inputs)
        values = {key: value_of(tensor) for key, tensor in zip(plan.graph.inputs, tensors, strict=True)}
        if mask is not None:
            masks = zip(plan.graph.inputs, tree.flatten(mask), strict=True)
            values.update({key: values[key]._replace(mask=given) for key, given in masks if given is not None})
        how = keeping(self.policy, self._model)
        for chunk, mode, name in zip(plan.chunks, plan.modes, plan.names, strict=True):
            if KINDS[mode] is None:
                with labelled(name):
                    outputs = chunk.call([values[key] for key in chunk.inputs], bool(training))
                values.update(zip(chunk.outputs, outputs, strict=True))
                continue
            block = GraphBlock(chunk, self._model, bool(training), [values[key] for key in chunk.inputs], name)
            result = call_block(block, block.tensors, KINDS[mode], how)
            values.update(zip(chunk.outputs, block.outputs(result.result), strict=True))
            self._model._losses.extend(result.losses)
        outputs = [attached(values[key]) for key in plan.graph.outputs]
        return unpack_singleton(tree.pack_sequence_as(plan.functional._outputs_struct, outputs))


class LayerCall:
    """Replaces the `call` of a layer: runs it as one block in its mode, under the same conditions as `GraphCall`."""

    def __init__(self, layer: keras.layers.Layer, name: str, mode: str, model: keras.Model, policy: MemoryPolicy):
        self.policy, self._layer, self._name, self._mode = policy, layer, name, mode
        self._model = weakref.ref(model)
        self._original = type(layer).call.__get__(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Keras also calls layers with symbolic tensors, to learn the shapes of their outputs.
        in_block = is_traced() or not any(map(tf.is_tensor, tree.flatten((args, kwargs))))
        if in_block or not (self.policy.streams or record.could_possibly_record()):
            return self._original(*args, **kwargs)
        if KINDS[self._mode] is None:
            with labelled(self._name):
                return self._original(*args, **kwargs)
        block = LayerBlock(self._layer, self._name, self._original, args, kwargs)
        result = call_block(block, block.tensors, KINDS[self._mode], keeping(self.policy, self._model()))
        for loss in result.losses:
            self._layer.add_loss(loss)
        return block.outputs(result.result)


class UndecidedCall:
    """Keeps everything. Warns once if the model is trained by something else than `fit` or `train_on_batch`."""

    def __init__(self, model: keras.Model, policy: MemoryPolicy):
        self.policy, self._model, self._told = policy, weakref.ref(model), False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        symbolic = any(map(keras.backend.is_keras_tensor, tree.flatten((args, kwargs))))
        if not symbolic and record.could_possibly_record() and not self._told:
            self._told = True
            _log.warning(
                "Model '%s' has mode 'auto', and is called under a tape outside of its own fit and train_on_batch, "
                "which would tell how large batches are: everything is kept. Choose and apply: "
                "choice = tfdist.memory.choose(model, batch_size, policy); tfdist.memory.apply(model, choice.policy).",
                model.name,
            )
        return type(model).call(model, *args, **kwargs)
