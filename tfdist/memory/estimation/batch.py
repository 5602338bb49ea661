"""Shapes and dtypes of a batch, taken from arrays or derived from a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfdist.compat.upstream import unpack_singleton
from tfdist.layer_graph.graph import functional_of


def batch_of(model: keras.Model, rows: int) -> tuple[Any, Any]:
    """Specifications of a batch, derived from the inputs, the outputs and the losses of a model.

    Args:
        model: a compiled model.
        rows: of the batch.

    Returns:
        `(x, y)` of `tf.TensorSpec`s. Targets look like outputs; those of sparse losses are numbers of classes.

    Raises:
        ValueError: if the model has unknown shapes.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
        >>> model.compile("sgd", "sparse_categorical_crossentropy")
        >>> batch_of(model, 8)[1].shape
        TensorShape([8])
    """
    functional = functional_of(model)
    shapes = [tensor.shape for tensor in (*functional.inputs, *functional.outputs)] if functional else []
    if not shapes or any(size is None for shape in shapes for size in shape[1:]):
        raise ValueError(
            f"Received: model '{model.name}', whose inputs and outputs have no known shapes. Expected: "
            "data=(x, y), a batch of arrays, instead of batch_size; only its shapes and dtypes are looked at."
        )
    inputs = unpack_singleton(functional._inputs_struct)
    x = tree.map_structure(lambda t: tf.TensorSpec([rows, *t.shape[1:]], t.dtype), inputs)
    outputs = tree.flatten(functional.outputs)
    given = model._compile_loss._user_loss if model._compile_loss is not None else None
    if isinstance(given, dict):
        names = model.output_names if set(given) & set(model.output_names) else sorted(functional._outputs_struct)
        losses = [given.get(name) for name in names]
    else:
        losses = list(given) if isinstance(given, (list, tuple)) else [given] * len(outputs)
    sparse = [_is_sparse(loss) for loss in losses] if len(losses) == len(outputs) else [False] * len(outputs)
    y = [
        tf.TensorSpec([rows, *t.shape[1:-1]], tf.int32) if of_classes else tf.TensorSpec([rows, *t.shape[1:]], t.dtype)
        for t, of_classes in zip(outputs, sparse, strict=True)
    ]
    return x, tree.pack_sequence_as(unpack_singleton(functional._outputs_struct), y)


@contextlib.contextmanager
def assumed(batch: Any) -> Iterator[None]:
    """If the code in this context fails, the message says which batch was assumed."""
    try:
        yield
    except (tf.errors.OpError, ValueError, TypeError, IndexError) as error:
        if str(error).startswith("Received: "):
            raise
        raise ValueError(
            f"Received: batch_size, for which a batch {batch} was assumed; a training step with it fails: {error}. "
            "Expected: data=(x, y), a batch of arrays, instead of batch_size; only its shapes and dtypes are looked at."
        ) from error


def specifications_of(data: Any) -> Any:
    """The specifications of a batch of arrays.

    Args:
        data: a batch `(x, y)` or `(x, y, sample_weight)`.
    """
    return tf.nest.map_structure(_specification, data)


def _specification(value: Any) -> tf.TensorSpec | None:
    if value is None:
        return None
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise ValueError(
            f"Received: a batch with a {type(value).__name__}, whose memory depends on its rows. Expected: tensors or "
            "arrays, such as the padded batch, `value.to_tensor()`."
        )
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        value = np.asarray(value)
    kind = tf.as_dtype(value.dtype)
    # As Keras casts arrays in `fit`.
    return tf.TensorSpec(value.shape, keras.backend.floatx() if kind == tf.float64 else kind)


def symbolic(batch: Any) -> Any:
    """A batch of symbolic tensors, for Keras' `_symbolic_build`."""
    return tf.nest.map_structure(
        lambda spec: None if spec is None else keras.KerasTensor(spec.shape, spec.dtype.name), batch
    )


def map_rows(batch: Any, function: Callable[[int | None], int | None]) -> Any:
    """The specifications of a batch with other numbers of rows; scalars and what is no tensor stay as they are."""

    def changed(spec: tf.TensorSpec | None) -> tf.TensorSpec | None:
        if spec is None or not spec.shape.rank:
            return spec
        return tf.TensorSpec([function(spec.shape[0]), *spec.shape[1:]], spec.dtype)

    return tf.nest.map_structure(changed, batch)


def _is_sparse(loss: Any) -> bool:
    if loss is None:
        return False
    loss = keras.losses.get(loss)
    names = [type(loss).__name__, getattr(loss, "__name__", ""), getattr(getattr(loss, "fn", None), "__name__", "")]
    return any("sparse" in name.lower() for name in names)
