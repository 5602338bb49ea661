"""`tf.summary`, whose scalars need no `tensorboard` package.

TensorFlow 2.21 writes event files by itself, but asks that package how a scalar looks in them. To look at the files it
is still needed, on whatever machine that is done.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# What TensorBoard's plugin of that name looks for.
_METADATA = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"}, data_class="DATA_CLASS_SCALAR")


def scalar(name: str, data: Any, step: Any = None, description: str | None = None) -> Any:
    """As `tf.summary.scalar`, byte for byte in the event file.

    Args:
        name: tag of the scalar.
        data: a number.
        step: of the training; that of the default writer, if it is None.
        description: text for TensorBoard's user.

    Returns:
        Whether it was written, a boolean tensor.

    Example:
        >>> with tf.summary.create_file_writer("logs").as_default():
        ...     scalar("loss", 0.25, step=1)
        <tf.Tensor: shape=(), dtype=bool, numpy=True>
    """
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.CopyFrom(_METADATA)
    metadata.summary_description = description or ""
    with tf.summary.experimental.summary_scope(name, "scalar_summary", values=[data, step]) as (tag, _):
        return tf.summary.write(tag, lambda: tf.cast(data, tf.float32), step, metadata)


def __getattr__(name: str) -> Any:
    return getattr(tf.summary, name)
