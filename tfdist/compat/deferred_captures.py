"""Collectives inside `tf.cond` and `tf.while_loop` of a nested `tf.function` (`steps_per_execution` > 1).

TensorFlow feeds the instance key of a collective when the outermost function is called, through a "deferred capture".
A function that is called inside a branch captures it once more, into the branch's graph, which nobody feeds: "You must
feed a value for placeholder". The capture belongs into the function around the branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.compat.patch import Patch
from tfdist.compat.upstream import func_graph


def _capture_call_time_value(original: Callable) -> Callable:
    def capture_call_time_value(
        self: Any, closure: Callable, spec: Any, key: Any = None, default_value: Any = None, placeholder: Any = None
    ) -> Any:
        graph = self
        while getattr(graph, "is_control_flow_graph", False):
            graph = graph.outer_graph
        if not isinstance(graph, func_graph.FuncGraph):
            graph = self
        with graph.as_default():
            return original(graph, closure, spec, key=key, default_value=default_value, placeholder=placeholder)

    return capture_call_time_value


PATCHES = [
    Patch(
        "tensorflow.python.framework.func_graph:FuncGraph.capture_call_time_value",
        _capture_call_time_value,
        "tensorflow",
        "no upstream issue: steps_per_execution with a distribution strategy",
    )
]
