"""Which operations are made in a part of a program."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_numbers = itertools.count()


@contextlib.contextmanager
def noted(graph: tf.Graph) -> Iterator[list[str]]:
    """The names of the operations that are made in the meantime by this replica, which has a thread of its own.

    Nothing about them is changed. TensorFlow orders the terms of sums by the names of operations, so that a name scope
    would change results.

    Args:
        graph: that is being made.
    """
    names: list[str] = []
    thread = threading.get_ident()

    def note(node: Any) -> None:
        if threading.get_ident() == thread:
            names.append(node.name)

    with graph._attr_scope({f"_tfdist_noted_{next(_numbers)}": note}):
        yield names
