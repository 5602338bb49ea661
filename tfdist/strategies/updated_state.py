"""Finds the state, other than weights and metrics, that a traced step updates: BatchNormalization's moving statistics.

Such variables are updated by every replica from its own rows. They must be averaged over the replicas, otherwise they
drift apart. Which ones are updated is read off the traced graph, so that a frozen backbone is never sent anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import keras
import tensorflow as tf


def candidates(model: keras.Model) -> list[tf.Variable]:
    """The model's floating variables that were created as non-trainable, as `tf.distribute` variables."""
    return [
        v.value
        for v in model.non_trainable_variables
        if isinstance(v.value, tf.Variable) and not v.value.trainable and v.value.dtype.is_floating
    ]


def updated(variables: Iterable[tf.Variable], replica: int) -> list[tf.Variable]:
    """Those of `variables` whose copy on local replica `replica` may have been written in the graph built so far.

    Outside of a graph (`run_eagerly=True`) nothing is recorded, so all are returned.
    """
    variables = list(variables)
    if tf.executing_eagerly():
        return variables
    graph = tf.compat.v1.get_default_graph()
    written = set()
    internal_names = {id(external): internal.name for external, internal in graph.captures}
    for operation in graph.get_operations():
        if operation.type != "ReadVariableOp":
            written.update(x.name for x in operation.inputs if x.dtype == tf.resource)
    return [v for v in variables if internal_names.get(id(v.values[replica].handle)) in written]


@contextlib.contextmanager
def kept_where(counts: tf.Tensor | None, variables: Iterable[keras.Variable]) -> Iterator[None]:
    """Undoes what the block does to this replica's copies of `variables`, unless `counts` (or `counts` is `None`)."""
    if counts is None:
        yield
        return
    variables = [v.value for v in variables]
    before = [tf.identity(v) for v in variables]
    yield

    def undo() -> tf.Tensor:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        return tf.constant(True)

    tf.cond(counts, lambda: tf.constant(True), undo)
