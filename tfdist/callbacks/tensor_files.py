"""Tensor files: tensors in TensorFlow's own checkpoint format, on any file system that TensorFlow knows."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf


def save_tensors(prefix: str, tensors: Mapping[str, tf.Tensor]) -> None:
    """Writes tensors to `<prefix>.index` and `<prefix>.data-00000-of-00001`, without holding Python's lock.

    Raises:
        tf.errors.OpError: If they cannot be written.
    """
    if not tensors:
        return
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=list(tensors),
            shape_and_slices=[""] * len(tensors),
            tensors=list(tensors.values()),
        )


def load_tensors(prefix: str, dtypes: Mapping[str, str]) -> dict[str, np.ndarray | tf.Tensor]:
    """Reads what `save_tensors` wrote; strings come as arrays of `bytes` objects, variants as tensors.

    Args:
        prefix: As given to `save_tensors`.
        dtypes: The tensors to read and the names of their dtypes.

    Raises:
        OSError: If they cannot be read.
    """
    if not dtypes:
        return {}
    with os_errors():
        reader = tf.compat.v1.train.NewCheckpointReader(prefix)
        return {
            name: _variant(prefix, name) if dtype == tf.variant.name else _as_array(reader.get_tensor(name))
            for name, dtype in dtypes.items()
        }


def _variant(prefix: str, name: str) -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.raw_ops.RestoreV2(prefix=prefix, tensor_names=[name], shape_and_slices=[""], dtypes=[tf.variant])[0]


def take_copies(tensors: dict[str, Any]) -> dict[str, Any]:
    """Takes the values out of `tensors`, copied.

    As soon as nobody shares a variable's buffer, the next step writes to it in place; before, that step has to copy it,
    in the training's own threads.
    """
    copies = {}
    while tensors:
        name, value = tensors.popitem()
        if isinstance(value, tf.Tensor) and value.dtype != tf.variant:
            with tf.device("CPU:0"):
                value = tf.raw_ops.DeepCopy(x=value) if "CPU" in value.device else tf.identity(value)
        copies[name] = value
    return copies


@contextlib.contextmanager
def open_file(path: str) -> Iterator[BinaryIO]:
    """Opens a file of any file system for reading; what fails is an `OSError`."""
    with os_errors(), tf.io.gfile.GFile(path, "rb") as file:
        yield file


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Turns TensorFlow's errors about files into the `OSError` that Python's own functions raise."""
    try:
        yield
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(_cause(error)) from error
    except tf.errors.OpError as error:
        raise OSError(_cause(error)) from error


def _cause(error: tf.errors.OpError) -> str:
    """Returns an error's message without the names of TensorFlow's internal functions."""
    return re.sub(r"^\{\{function_node [^}]*\}\} | \[Op:\w+\].*$", "", error.message, flags=re.DOTALL)


def _as_array(value: np.ndarray | np.generic | bytes) -> np.ndarray:
    # NumPy's own type for bytes would drop zeros at their end.
    return np.array(value, dtype=object) if isinstance(value, bytes) else np.asarray(value)
