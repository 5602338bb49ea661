"""Logs that a step computes from the results of metrics, such as the root of a mean, or a perplexity.

A replica or a worker has only its own part of a metric's state while it computes such a log. So the operations between
the results and the log are noted while the step is traced, and run again once the results of all parts are known:

    part of the state  ->  metric.result()     -> operations ->  log of the part
    state of all parts ->  metric.result()     -> operations ->  log of one process
                                         inputs ──┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import graph_pb2
from tfdist.steps.keras_step import current_step


def marked_result(metric: keras.Metric) -> Callable:
    """Returns a replacement for `metric.result` whose tensors are known to come from it."""
    original = metric.result

    def result() -> Any:
        if (step := current_step()) is not None:
            step.here.reads_results = True
        value = original()
        leaves = [tf.identity(leaf) for leaf in tf.nest.flatten(value)]
        for i, leaf in enumerate(leaves):
            leaf._tfdist_result = metric, i
        return tf.nest.pack_sequence_as(value, leaves)

    return result


def metric_of(tensor: Any) -> tuple[keras.Metric, int] | None:
    """The metric whose result a tensor is, and which of its numbers; `None` if it is none."""
    return getattr(tensor, "_tfdist_result", None)


class DerivedLogs:
    """Those of some logs that are results of metrics, or that a traced step has computed from some.

    A step that is run eagerly does not tell what it has computed from what: there, these are the results.

    Args:
        logs: tensors, of the current graph if there is one.

    Attributes:
        positions: which of the logs these are.
        sources: the results: each metric, and which of its numbers.
        inputs: what else the operations take.
        are_results: whether all of these are results as they are.
    """

    def __init__(self, logs: Sequence[tf.Tensor]):
        results, before = results_before(logs)
        derived, operations = set(results), []
        for operation in tf.compat.v1.get_default_graph().get_operations() if before else ():
            # What has effects runs once, and reads this part's state: a log behind it counts as one of the part.
            is_repeatable = operation.name in before and not operation.op_def.is_stateful
            if is_repeatable and any(one.name in derived for one in operation.inputs):
                derived.update(one.name for one in operation.outputs)
                operations.append(operation)
        taken = {one.name: one for operation in operations for one in operation.inputs}
        inputs = {name: one for name, one in taken.items() if name not in derived}
        names = [_name(log) for log in logs]
        self.positions = [i for i, name in enumerate(names) if name in derived]
        self.sources, self.inputs = list(results.values()), list(inputs.values())
        self._given, self._returned, self._taken = [*results, *inputs], [names[i] for i in self.positions], set(taken)
        self.are_results = not operations
        self._graph = graph_pb2.GraphDef(node=[_anywhere(operation) for operation in operations])

    def compute(self, results: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Adds the operations to the current graph once more.

        Args:
            results: in place of `sources`.
            inputs: in place of `inputs`.

        Returns:
            The logs at `positions`.
        """
        known = dict(zip(self._given, [*results, *inputs], strict=True))
        taken = {name: tensor for name, tensor in known.items() if name in self._taken}
        names = [name for name in self._returned if name not in known]
        with tf.control_dependencies(None):  # TensorFlow takes tensors for operations where there are some
            made = tf.graph_util.import_graph_def(self._graph, taken, names, name="derived_logs") if names else []
        known |= zip(names, made, strict=True)
        return [known[name] for name in self._returned]


def results_before(tensors: Sequence[tf.Tensor]) -> tuple[dict[str, tuple[keras.Metric, int]], set[str]]:
    """The results of metrics that tensors are computed from, by name, and the names of the operations behind them."""
    results, seen, waiting = {}, set(), list(tensors)
    while waiting:
        tensor = waiting.pop()
        if (origin := metric_of(tensor)) is not None:
            results[_name(tensor)] = origin
        elif tf.is_symbolic_tensor(tensor) and tensor.op.name not in seen:
            seen.add(tensor.op.name)
            waiting += tensor.op.inputs
    return (results, seen) if results else ({}, set())


def _name(tensor: tf.Tensor) -> str:
    return tensor.name if tf.is_symbolic_tensor(tensor) else str(id(tensor))


def _anywhere(operation: tf.Operation) -> Any:
    """The definition of an operation, without what it waits for, and where it is."""
    node = type(operation.node_def)()
    node.CopyFrom(operation.node_def)
    node.device = ""
    node.attr.pop("_class", None)
    node.input[:] = [name for name in node.input if not name.startswith("^")]
    return node
