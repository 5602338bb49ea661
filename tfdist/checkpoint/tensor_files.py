"""Tensors in TensorFlow's own checkpoint format, in local files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.checkpoint.manifest import MANIFEST_NAME, Manifest
from tfdist.storage.tensorflow_files import os_errors


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


def fault_of_tensors(prefix: str, manifest: Manifest) -> str | None:
    """What is wrong where verified files do not hold the tensors of their manifest.

    Raises:
        OSError: If they cannot be read.
    """
    if not manifest.tensors:
        return None
    for suffix in (".index", ".data-00000-of-00001"):
        if os.path.basename(prefix) + suffix not in manifest.files:
            return f"{MANIFEST_NAME} does not list {os.path.basename(prefix)}{suffix}"
    with os_errors():
        reader = tf.compat.v1.train.NewCheckpointReader(prefix)
        dtypes, shapes = reader.get_variable_to_dtype_map(), reader.get_variable_to_shape_map()
    for name, record in manifest.tensors.items():
        if name not in dtypes or (dtypes[name].name, list(shapes[name])) != (record.dtype, record.shape):
            return f"{MANIFEST_NAME} lists a tensor {ascii(name)[:60]}, which {os.path.basename(prefix)}.index has not"
    return None


def _variant(prefix: str, name: str) -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.raw_ops.RestoreV2(prefix=prefix, tensor_names=[name], shape_and_slices=[""], dtypes=[tf.variant])[0]


def take_copies(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copies the tensors, and empties the dictionary that had them.

    While a snapshot shares a variable's buffer, the next step has to copy it before it writes, in the threads of the
    training. Once this copy is made, steps write in place again.
    """
    copies = {}
    while tensors:
        name, value = tensors.popitem()
        if isinstance(value, tf.Tensor) and value.dtype != tf.variant:
            with tf.device("CPU:0"):
                value = tf.raw_ops.DeepCopy(x=value) if "CPU" in value.device else tf.identity(value)
        copies[name] = value
    return copies


def _as_array(value: np.ndarray | np.generic | bytes) -> np.ndarray:
    # NumPy's own type for bytes would drop zeros at their end.
    return np.array(value, dtype=object) if isinstance(value, bytes) else np.asarray(value)
