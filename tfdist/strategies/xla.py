"""`compile(jit_compile=True)` under a strategy: XLA compiles what each replica computes, between the collectives.

Keras compiles the whole step, in which XLA would have to compile the collectives, and all devices, too. Here the step's
operations are marked instead, and TensorFlow clusters those that XLA knows (auto-clustering, see
https://www.tensorflow.org/xla#auto-clustering): collectives, and what XLA has no kernel for, stay outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import DistributedValues, model_supports_jit


def automatic(model: keras.Model) -> bool:
    """What `jit_compile="auto"` means: the same as without a strategy."""
    return bool(tf.config.list_physical_devices("GPU")) and model_supports_jit(model)


@contextlib.contextmanager
def not_as_a_whole(model: keras.Model) -> Iterator[None]:
    """While Keras makes the function of a step, keeps it from compiling the function as a whole."""
    before, model._jit_compile = model._jit_compile, False
    try:
        yield
    finally:
        model._jit_compile = before


def compiles(model: keras.Model, batch: Any = None) -> bool:
    """Whether a step of a model is traced that was compiled with `jit_compile`, and XLA can compile it for this batch.

    Not a ragged one: XLA compiles a cluster for each number of values, and takes that of another number.
    """
    of_replicas = [leaf.values if isinstance(leaf, DistributedValues) else [leaf] for leaf in tf.nest.flatten(batch)]
    is_ragged = any(isinstance(leaf, tf.RaggedTensor) for leaves in of_replicas for leaf in leaves)
    return bool(model.jit_compile) and not is_ragged and not tf.executing_eagerly()


def marked(is_compiled: bool) -> Any:
    """A context in which traced operations are marked for XLA, if it is to compile them."""
    return tf.xla.experimental.jit_scope() if is_compiled else contextlib.nullcontext()
