"""What can be known about a `tf.data` pipeline without running it: its seeds, and whether it can be run again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_PYTHON = ("PyFunc", "EagerPyFunc")
# Operations with a generator that outlives an iterator; tf.random.Generator makes them.
_SHARED_GENERATOR = ("StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal", "RngReadAndSkip")


def pipeline(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """The dataset and all that it reads from."""
    yield dataset
    for source in dataset._inputs():
        yield from pipeline(source)


def seeds(dataset: tf.data.Dataset) -> list[list[int]]:
    """Seeds of all random transformations in a pipeline; tf.data fixes them when the pipeline is built."""
    return [[int(d._seed), int(d._seed2)] for d in pipeline(dataset) if hasattr(d, "_seed2")]


def has_no_order(dataset: tf.data.Dataset) -> bool:
    """Whether the pipeline may return its elements in another order each time."""
    return any(d.options().deterministic is False or _is_unordered(d) for d in pipeline(dataset))


def _is_unordered(dataset: tf.data.Dataset) -> bool:
    return getattr(dataset, "_deterministic", None) == "false"


def why_not_repeatable(dataset: tf.data.Dataset) -> str | None:
    """Why a pipeline that is built again, in another process, may give other elements; `None` if it will not.

    Example:
        >>> why_not_repeatable(tf.data.Dataset.range(8).shuffle(8))
        'it shuffles without a seed'
    """
    if has_no_order(dataset):
        return "its order is not deterministic"
    for part in pipeline(dataset):
        if hasattr(part, "_seed2") and not (int(part._seed) or int(part._seed2)):
            return "it shuffles without a seed"
        for node in _nodes(part):
            if node.op in _PYTHON:
                return "it runs Python code (from_generator, py_function or numpy_function), whose state is unknown"
            if node.op in _SHARED_GENERATOR:
                return f"it draws from a tf.random.Generator ({node.op}), whose state is not part of the pipeline"
            if _draws(node):
                if not (node.attr["seed"].i or node.attr["seed2"].i):
                    return f"it draws random numbers without a seed ({node.op})"
                if "Parallel" in type(part).__name__:
                    return f"it draws random numbers in parallel ({node.op}), in no fixed order"
    return None


def can_save_iterator(dataset: tf.data.Dataset) -> bool:
    """Whether TensorFlow can save an iterator of the pipeline: no function in it has a state of its own."""
    return not has_no_order(dataset) and not any(
        node.op in (*_PYTHON, *_SHARED_GENERATOR) or _draws(node) for part in pipeline(dataset) for node in _nodes(part)
    )


def _draws(node: Any) -> bool:
    """Whether an operation draws random numbers and keeps count of them."""
    return {"seed", "seed2"} <= set(node.attr) and not node.op.startswith("Stateless")


def _nodes(dataset: tf.data.Dataset) -> Iterator:
    """The operations of the functions that a transformation applies, nested functions included."""
    for wrapper in dataset._functions():
        graph = wrapper.function.graph.as_graph_def()
        yield from graph.node
        for function in graph.library.function:
            yield from function.node_def
