"""Stands in for the `call` of a layer that is a block."""

from __future__ import annotations

import weakref
from typing import Any

import keras
import tensorflow as tf
from keras.src import tree
from tensorflow.python.eager import record

from tfdist.layer_graph.chunk import is_traced
from tfdist.memory.block_call import call_block
from tfdist.memory.blocks import LayerBlock
from tfdist.memory.labels import labelled
from tfdist.memory.plan import KINDS, keeping
from tfdist.memory.policy import MemoryPolicy


class LayerCall:
    """Calls a layer as a block.

    Args:
        layer: the layer.
        name: of the block.
        mode: of the block.
        model: of which it is a part.
        policy: how it is called.
    """

    def __init__(self, layer: keras.layers.Layer, name: str, mode: str, model: keras.Model, policy: MemoryPolicy):
        self.policy, self._layer, self._name, self._mode = policy, layer, name, mode
        self._model = weakref.ref(model)
        self._original = type(layer).call.__get__(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Keras calls layers also to learn the shapes of what they return.
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
