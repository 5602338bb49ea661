"""Which block of a model an operation of a graph belongs to, while somebody wants to know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import tensorflow as tf

from tfdist.memory.noted import noted

_recording: dict[str, str] | None = None
# The name scope of gradients.
GRADIENT = "gradient_tape/"


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, str]]:
    """Records the blocks of the operations that are made in this context: `{name of operation: block}`."""
    global _recording
    _recording = {}
    try:
        yield _recording
    finally:
        _recording = None


@contextlib.contextmanager
def labelled(block: str) -> Iterator[None]:
    """What is made in this context by this thread belongs to a block. Nothing about it is changed.

    Args:
        block: its name; empty for what is in none.
    """
    labels = _recording
    if labels is None or not block or tf.executing_eagerly():
        yield
        return
    with noted(tf.compat.v1.get_default_graph()) as made:
        yield
    labels.update(dict.fromkeys(made, block))


def label_of(operation: str, labels: Mapping[str, str], scopes: Mapping[str, str]) -> str:
    """The block of an operation; empty if it is in none.

    Args:
        operation: its name.
        labels: as recorded.
        scopes: as `scopes_of` makes them.

    Example:
        >>> label_of("gradient_tape/model/dense/MatMul/MatMul_1", {}, {"model/dense": "a"})
        'a'
    """
    if operation in labels:
        return labels[operation]
    # TensorFlow names an operation of a gradient after the one that it is the gradient of.
    before, found, scope = operation.partition(GRADIENT)
    scope = before + scope if found else ""
    while scope and scope not in scopes:
        scope = scope.rpartition("/")[0]
    return scopes.get(scope, "")


def scopes_of(labels: Mapping[str, str]) -> dict[str, str]:
    """The blocks of the name scopes of recorded operations, where all in a scope are in one block.

    Example:
        >>> scopes_of({"model/dense/MatMul": "a", "model/dense_1/MatMul": "b"})
        {'model/dense': 'a', 'model/dense_1': 'b'}
    """
    found: dict[str, set[str]] = {}
    for name, block in labels.items():
        found.setdefault(name.rpartition("/")[0], set()).add(block)
    return {scope: blocks.pop() for scope, blocks in found.items() if len(blocks) == 1}
