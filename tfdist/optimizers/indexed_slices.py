"""Gradients of some rows of a table."""

from __future__ import annotations

import tensorflow as tf


def sum_duplicates(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the same gradient with every row once.

    Keras does not do this: it squares the parts of the gradient of a row that occurs several times one by one.
    """
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)
