"""What a `tf.data` pipeline tells without being run: its seeds, and whether it gives the same elements again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.compat.upstream import op_def_registry

_PYTHON = ("PyFunc", "EagerPyFunc")
_NO_SEED = "it shuffles without a seed"
# Operations with a generator that outlives an iterator; tf.random.Generator makes them.
_SHARED_GENERATOR = ("StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal", "RngReadAndSkip")


def pipeline(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields the dataset and all datasets that it reads from."""
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
            return _NO_SEED
        for nodes in _functions(part):
            for node in nodes.values():
                reason = _obstacle(node, nodes, "Parallel" in type(part).__name__)
                if reason is not None:
                    return reason
    return None


def _obstacle(node: Any, nodes: dict[str, Any], in_parallel: bool) -> str | None:
    """Why an operation in a function of a pipeline may give another result the next time; `None` if it will not."""
    if node.op in _PYTHON:
        return "it runs Python code (from_generator, py_function or numpy_function), whose state is unknown"
    if node.op in _SHARED_GENERATOR:
        return f"it draws from a tf.random.Generator ({node.op}), whose state is not part of the pipeline"
    if node.op.startswith("Assign") and node.op.endswith("VariableOp"):
        return "it changes a variable (a Keras augmentation layer counts its random numbers), which begins anew"
    if "Shuffle" in node.op and _is_dataset(node) and not any(_is_seeded(node, nodes)):
        return _NO_SEED
    if _draws(node):
        if not (node.attr["seed"].i or node.attr["seed2"].i):
            return f"it draws random numbers without a seed ({node.op})"
        if in_parallel:
            return f"it draws random numbers in parallel ({node.op}), in no fixed order"
    return None


def _is_seeded(node: Any, nodes: dict[str, Any]) -> Iterator[bool]:
    """For each input of a nested shuffle that may be a seed: whether it is one. Missing seeds are constants of 0."""
    for name in node.input[2:4]:
        source = nodes.get(name.split(":")[0])
        yield source is None or source.op != "Const" or bool(tf.make_ndarray(source.attr["value"].tensor))


def draws_seeds(dataset: tf.data.Dataset) -> bool:
    """Whether each iterator of the pipeline draws seeds, so that a later one depends on how many there were."""
    return bool(seeds(dataset)) or any(
        "Shuffle" in node.op for part in pipeline(dataset) for nodes in _functions(part) for node in nodes.values()
    )


def can_save_iterator(dataset: tf.data.Dataset) -> bool:
    """Whether TensorFlow can save an iterator of the pipeline: no function in it has a state of its own."""
    return not has_no_order(dataset) and not any(
        _has_state(node) for part in pipeline(dataset) for nodes in _functions(part) for node in nodes.values()
    )


def _has_state(node: Any) -> bool:
    # Operations that make datasets count as stateful for other reasons.
    definition = op_def_registry.get(node.op)
    return definition is not None and definition.is_stateful and not _is_dataset(node)


def _is_dataset(node: Any) -> bool:
    return node.op.rstrip("V0123456789").endswith("Dataset")


def _draws(node: Any) -> bool:
    """Whether an operation draws random numbers and keeps count of them."""
    return {"seed", "seed2"} <= set(node.attr) and not node.op.startswith("Stateless")


def _functions(dataset: tf.data.Dataset) -> Iterator[dict[str, Any]]:
    """The functions that a transformation applies, nested ones included: the operations of each by name."""
    for wrapper in dataset._functions():
        graph = wrapper.function.graph.as_graph_def()
        yield {node.name: node for node in graph.node}
        for function in graph.library.function:
            yield {node.name: node for node in function.node_def}
