"""The keys by which the replicas of a collective find each other, which TensorFlow draws when a function is called.

In a `tf.cond` or `tf.while_loop` of a nested `tf.function` (`steps_per_execution` > 1), TensorFlow feeds the key when
the outermost function is called, through a "deferred capture". A function that is called inside a branch captures it
once more, into the branch's graph, which nobody feeds: "You must feed a value for placeholder". The capture belongs
into the function around the branch.

Each replica draws its own keys, and those of one number belong together. Where two threads call functions of one
strategy, replica 0 of the first may have drawn the number of replica 1 of the second. So threads draw them one after
another (`step_lock`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.compat.patch import Patch
from tfdist.compat.upstream import func_graph, mirrored_run

_lock = threading.RLock()
_lent = threading.local()


def step_lock() -> Any:
    """A context for one thread of the process at a time, the threads of its replicas included; it may be nested."""
    is_replica = isinstance(threading.current_thread(), mirrored_run._MirroredReplicaThread)
    return contextlib.nullcontext() if is_replica or getattr(_lent, "is_here", False) else _lock


@contextlib.contextmanager
def lent_step_lock() -> Iterator[None]:
    """For a thread that another one, which holds the lock, waits for."""
    _lent.is_here = True
    try:
        yield
    finally:
        _lent.is_here = False


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


class _DrawnUnderLock(property):
    """A property that, other than Python's, can have attributes."""


def _captured_inputs(original: property) -> property:
    def captured_inputs(self: Any) -> list:
        if not self._func_graph.deferred_external_captures:
            return original.fget(self)
        with step_lock():
            return original.fget(self)

    return _DrawnUnderLock(captured_inputs)


PATCHES = [
    Patch(
        "tensorflow.python.framework.func_graph:FuncGraph.capture_call_time_value",
        _capture_call_time_value,
        "tensorflow",
        "no upstream issue: steps_per_execution with a distribution strategy",
    ),
    Patch(
        "tensorflow.python.eager.polymorphic_function.concrete_function:ConcreteFunction.captured_inputs",
        _captured_inputs,
        "tensorflow",
        "no upstream issue: fits in threads under one strategy",
    ),
]
