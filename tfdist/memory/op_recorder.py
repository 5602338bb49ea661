"""Records which operations a part of a program makes, and to which block of a model they belong."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

_numbers = itertools.count()
_recording: dict[str, str] | None = None
# The name scope of gradients.
GRADIENT = "gradient_tape/"


@contextlib.contextmanager
def record_operations(graph: tf.Graph) -> Iterator[list[str]]:
    """Records the names of the operations that this replica, which has a thread of its own, makes in this context.

    The operations are not changed. A name scope would be simpler, but TensorFlow orders the terms of sums by the names
    of operations, so that it would change results.
    """
    names: list[str] = []
    thread = threading.get_ident()

    def note(node: Any) -> None:
        if threading.get_ident() == thread:
            names.append(node.name)

    with graph._attr_scope({f"_tfdist_recorded_{next(_numbers)}": note}):
        yield names


@contextlib.contextmanager
def record_blocks() -> Iterator[dict[str, str]]:
    """Records the blocks of the operations that are made in this context: `{name of operation: block}`."""
    global _recording
    _recording = {}
    try:
        yield _recording
    finally:
        _recording = None


@contextlib.contextmanager
def labelled(block: str) -> Iterator[None]:
    """Operations that this thread makes in this context belong to a block. They are not changed.

    Args:
        block: its name; empty for what is in none.
    """
    labels = _recording
    if labels is None or not block or tf.executing_eagerly():
        yield
        return
    with record_operations(tf.compat.v1.get_default_graph()) as made:
        yield
    labels.update(dict.fromkeys(made, block))


def upstream(
    operations: Iterable[tf.Operation], before: Callable[[tf.Operation], Iterable[tf.Operation]]
) -> set[tf.Operation]:
    """The given operations of a graph, and all that are found by going back from them by `before`."""
    found: set[tf.Operation] = set()
    waiting = list(operations)
    while waiting:
        operation = waiting.pop()
        if operation not in found:
            found.add(operation)
            waiting += before(operation)
    return found


def block_finder(labels: Mapping[str, str]) -> Callable[[str], str]:
    """Returns a function from the name of an operation to its block: the one recorded, or that of its gradients.

    TensorFlow names the operations of a gradient after the operation of the forward pass. So they belong to the block
    of the name scope of that operation, if all operations recorded in the scope are of one block.

    Args:
        labels: as recorded.

    Returns:
        The function. It returns an empty string for what is in no block.

    Example:
        >>> block_of = block_finder({"model/dense/MatMul": "a", "model/dense_1/MatMul": "b"})
        >>> block_of("model/dense_1/MatMul"), block_of("gradient_tape/model/dense/MatMul/MatMul_1"), block_of("Adam")
        ('b', 'a', '')
    """
    in_scope: dict[str, set[str]] = {}
    for name, block in labels.items():
        in_scope.setdefault(name.rpartition("/")[0], set()).add(block)
    of_scope = {scope: blocks.pop() for scope, blocks in in_scope.items() if len(blocks) == 1}

    def block_of(operation: str) -> str:
        if operation in labels:
            return labels[operation]
        before, found, scope = operation.partition(GRADIENT)
        scope = before + scope if found else ""
        while scope and scope not in of_scope:
            scope = scope.rpartition("/")[0]
        return of_scope.get(scope, "")

    return block_of
