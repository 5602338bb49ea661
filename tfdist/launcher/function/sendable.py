"""What cannot travel to new processes with a function, found before they start, and by the name that the user knows."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.launcher.local.calls import CallPickler

_BUILD = "Build it in the function, in the scope of the strategy; weights travel as arrays (model.get_weights())"


class SendingPickler(CallPickler):
    """Pickles functions by value; refuses what would start TensorFlow in a worker before its strategy does.

    Example:
        >>> import io
        >>> SendingPickler(io.BytesIO()).dump(lambda: 1)
    """

    def reducer_override(self, obj: Any) -> Any:
        for kind, what, advice in _kinds():
            if isinstance(obj, kind):
                raise TypeError(f"a {what} ({type(obj).__name__}) belongs to this process and its devices. {advice}.")
        return super().reducer_override(obj)


def describe(fn: Callable[..., Any], args: Sequence[Any], error: Exception) -> str:
    """Says which name of the user's stands for what could not be pickled, and why.

    Args:
        fn: a function.
        args: its arguments.
        error: what pickling them has raised.

    Example:
        >>> import threading
        >>> lock = threading.Lock()
        >>> def function():
        ...     return lock
        >>> describe(function, (), TypeError("cannot pickle '_thread.lock' object"))
        "`lock`, which `function` uses: cannot pickle '_thread.lock' object"
    """
    name = _name(fn)
    named = [(f"`{label}`, which `{name}` uses", value) for label, value in _uses(fn)]
    for label, value in [*named, *((f"args[{i}]", value) for i, value in enumerate(args))]:
        try:
            SendingPickler(io.BytesIO()).dump(value)
        except Exception as reason:
            return f"{label}: {reason}"
    return f"`{name}`: {error}"


def _uses(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The values that travel with a function, by name."""
    if isinstance(fn, functools.partial):
        yield from _uses(fn.func)
        yield from ((f"partial.args[{i}]", value) for i, value in enumerate(fn.args))
        yield from fn.keywords.items()
    elif inspect.ismethod(fn):
        yield "self", fn.__self__
        yield from _uses(fn.__func__)
    elif inspect.isfunction(fn):
        with contextlib.suppress(ValueError):  # one of its variables has no value yet
            found = inspect.getclosurevars(fn)
            yield from {**found.nonlocals, **found.globals}.items()


def _name(fn: Callable[..., Any]) -> str:
    return _name(fn.func) if isinstance(fn, functools.partial) else getattr(fn, "__name__", type(fn).__name__)


def _kinds() -> Iterator[tuple[type, str, str]]:
    """Classes of objects that must not travel, what they are called, and what to do instead."""
    tf, keras = sys.modules.get("tensorflow"), sys.modules.get("keras")
    if tf is not None:
        yield tf.distribute.Strategy, "strategy", "Make it in the function, where it finds the worker's cluster"
        yield tf.data.Dataset, "dataset", "Make it in the function, from arrays or files"
        yield tf.Variable, "variable", "Make it in the function, and give it the value of x.numpy()"
        yield tf.Tensor, "tensor", "Give the function x.numpy() instead"
    if keras is not None:
        yield keras.Layer, "model or layer", _BUILD
        yield keras.Optimizer, "optimizer", _BUILD
        yield keras.Metric, "metric", _BUILD
        yield keras.Variable, "variable", _BUILD
