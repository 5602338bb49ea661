"""The models for Keras. Each block is a model of its own, with a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers

import tfdist
from benchmarks.memory.shapes import DROPOUT, Encoder, ResidualMlp, block_names
from benchmarks.memory.variants import AUTO, MODES, OFFLOAD, RECOMPUTE_GRAD, REMAT_SCOPE


def compiled(
    variant: str, shape: ResidualMlp | Encoder, depth: int, device: str = "", jit_compile: bool = False
) -> keras.Model:
    """A model that keeps for its backward pass what the variant says.

    Args:
        variant: see `benchmarks.memory.variants`.
        shape: the model's numbers.
        depth: its blocks.
        device: where it is trained, such as "GPU:0"; by default TensorFlow decides.
        jit_compile: whether XLA compiles it.
    """
    keras.utils.set_random_seed(1)
    names = block_names(depth)
    strategy = tf.distribute.OneDeviceStrategy(device) if device else tf.distribute.get_strategy()
    if variant == OFFLOAD:
        strategy = tfdist.HostOffloadStrategy(device)
    with strategy.scope():
        model = _build(shape, names, _AROUND.get(variant))
        model.compile("sgd", "mse", jit_compile=jit_compile)
    if variant in MODES:
        blocks = "auto" if variant == AUTO else names
        tfdist.memory.apply(model, tfdist.memory.MemoryPolicy(MODES[variant], blocks))
    return model


def _build(shape: ResidualMlp | Encoder, names: list[str], around: Callable | None = None) -> keras.Model:
    x = inputs = keras.Input(shape.batch_shape[1:])
    for name in names:
        block = _block(shape, name)
        x = (around(block) if around else block)(x)
    return keras.Model(inputs, x)


def _block(shape: ResidualMlp | Encoder, name: str) -> keras.Model:
    x = inputs = keras.Input(shape.batch_shape[1:])
    y = x
    if isinstance(shape, Encoder):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(shape.heads, shape.width // shape.heads, dropout=DROPOUT)(y, y)
        x = layers.Add()([x, y])
        y = layers.LayerNormalization()(x)
    y = layers.Dropout(DROPOUT)(layers.Dense(shape.hidden, "gelu")(y))
    return keras.Model(inputs, layers.Add()([x, layers.Dense(shape.width)(y)]), name=name)


class _Whole(layers.Layer):
    """Hides the arguments of a block: `keras.RematScope` fails in a graph for layers that have more than tensors."""

    def __init__(self, block: keras.Model):
        super().__init__()
        self._block = block

    def call(self, inputs: Any) -> Any:
        return self._block(inputs)


class _Recomputed(_Whole):
    """What one writes for `tf.recompute_grad` with Keras."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return tf.recompute_grad(lambda x: self._block(x, training=training))(inputs)


def _in_remat_scope(block: keras.Model) -> layers.Layer:
    # The layers of the block are made before: in the scope, each of them would be run again once more.
    with keras.RematScope("full"):
        return _Whole(block)


_AROUND = {REMAT_SCOPE: _in_remat_scope, RECOMPUTE_GRAD: _Recomputed}
