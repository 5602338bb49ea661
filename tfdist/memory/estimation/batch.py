"""What a batch of a model looks like, without one at hand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import tree

from tfdist.layer_graph.graph import functional_of


def batch_of(model: keras.Model, rows: int) -> tuple[Any, Any]:
    """Specifications of a batch, as the inputs, the outputs and the losses of a model tell them.

    Args:
        model: a compiled model.
        rows: of the batch.

    Returns:
        `(x, y)` of `tf.TensorSpec`s. Targets look like outputs; those of sparse losses are numbers of classes.

    Raises:
        ValueError: if the model does not tell them.

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
    x = tree.map_structure(lambda t: tf.TensorSpec([rows, *t.shape[1:]], t.dtype), _bare(functional._inputs_struct))
    outputs = tree.flatten(functional.outputs)
    losses = tree.flatten(model._compile_loss._user_loss) if model._compile_loss is not None else []
    losses = losses * len(outputs) if len(losses) == 1 else losses
    sparse = [_is_sparse(loss) for loss in losses] if len(losses) == len(outputs) else [False] * len(outputs)
    y = [
        tf.TensorSpec([rows, *t.shape[1:-1]], tf.int32) if of_classes else tf.TensorSpec([rows, *t.shape[1:]], t.dtype)
        for t, of_classes in zip(outputs, sparse, strict=True)
    ]
    return x, tree.pack_sequence_as(_bare(functional._outputs_struct), y)


@contextlib.contextmanager
def assumed(batch: Any) -> Iterator[None]:
    """Says what was assumed of a batch if what is done with it fails.

    Args:
        batch: as `batch_of` has made it.
    """
    try:
        yield
    except (tf.errors.OpError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
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
    return tree.map_structure(lambda x: tf.type_spec_from_value(tf.convert_to_tensor(x)), data)


def split(batch: Any, replicas: int) -> Any:
    """The largest part of a batch that a replica gets."""
    return tree.map_structure(lambda s: tf.TensorSpec([-(-s.shape[0] // replicas), *s.shape[1:]], s.dtype), batch)


def _bare(structure: Any) -> Any:
    """Keras packs a single tensor into a list for some models."""
    return structure[0] if isinstance(structure, (list, tuple)) and len(structure) == 1 else structure


def _is_sparse(loss: Any) -> bool:
    name = loss if isinstance(loss, str) else getattr(loss, "name", getattr(loss, "__name__", ""))
    return "sparse" in str(name).lower()
