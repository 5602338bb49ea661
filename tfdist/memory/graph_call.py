"""Stands in for the `call` of a Functional or Sequential model: runs it block by block while something is trained."""

from __future__ import annotations

from typing import Any

import keras
from keras.src import tree
from keras.src.models.functional import unpack_singleton
from tensorflow.python.eager import record

from tfdist.layer_graph.chunk import is_traced
from tfdist.layer_graph.values import attached, value_of
from tfdist.memory.block_call import call_block
from tfdist.memory.blocks import GraphBlock
from tfdist.memory.labels import labelled
from tfdist.memory.plan import KINDS, GraphPlan, keeping
from tfdist.memory.policy import MemoryPolicy


class GraphCall:
    """Runs a model's calls in blocks.

    Args:
        model: the model.
        plan: its blocks.
        policy: how they are called.
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
            values.update({key: values[key]._replace(mask=own) for key, own in masks if own is not None})
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
