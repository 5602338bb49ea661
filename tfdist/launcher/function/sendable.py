"""What cannot travel to new processes with a function, found before they start, and by the name that the user knows."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

from tfdist.launcher.local.calls import CallPickler

_DEPTH = 6
_BUILD = "Build it in the function, in the scope of the strategy; weights travel as arrays (model.get_weights())"


class NotSendable(TypeError):
    """Something that belongs to the TensorFlow of this process."""


class SendingPickler(CallPickler):
    """Pickles functions by value; refuses what would start TensorFlow in a worker before its strategy does.

    Example:
        >>> import io
        >>> SendingPickler(io.BytesIO()).dump(lambda: 1)
    """

    def reducer_override(self, obj: Any) -> Any:
        for kind, what, advice in _kinds():
            if isinstance(obj, kind):
                raise NotSendable(f"a {what} ({type(obj).__name__}) belongs to this process and its devices. {advice}.")
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
    found = _culprit([*_uses(fn), *((f"args[{i}]", value) for i, value in enumerate(args))], _DEPTH, set())
    if found is None:
        return f"`{_name(fn)}`: {error}"
    label, reason = found
    return f"{label if label.startswith('args[') else f'{label}, which `{_name(fn)}` uses'}: {reason}"


def _culprit(named: Sequence[tuple[str, Any]], depth: int, seen: set[int]) -> tuple[str, Exception] | None:
    for label, value in named:
        if id(value) in seen:
            continue
        seen.add(id(value))
        try:
            SendingPickler(_Nowhere()).dump(value)
        except Exception as error:
            # Not the parts of an object that is refused as a whole.
            inner = (
                None if depth == 0 or isinstance(value, _refused()) else _culprit(_parts(label, value), depth - 1, seen)
            )
            return inner or (label if label.startswith("args[") else f"`{label}`", error)
    return None


def _parts(label: str, value: Any) -> list[tuple[str, Any]]:
    """What a value is made of, each part by what a user would write."""
    if isinstance(value, (FunctionType, MethodType, functools.partial)):
        return list(_uses(value))
    if isinstance(value, dict):
        return [(f"{label}[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"{label}[{i}]", part) for i, part in enumerate(value)]
    return [(f"{label}.{name}", part) for name, part in getattr(value, "__dict__", {}).items()]


def _uses(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The values that travel with a function, by name."""
    if isinstance(fn, functools.partial):
        yield from _uses(fn.func)
        yield from ((f"partial.args[{i}]", value) for i, value in enumerate(fn.args))
        yield from fn.keywords.items()
    elif isinstance(fn, MethodType):
        yield "self", fn.__self__
        yield from _uses(fn.__func__)
    elif isinstance(fn, FunctionType):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:
                continue  # not assigned yet
        yield from ((name, fn.__globals__[name]) for name in _names(fn.__code__) if name in fn.__globals__)
        yield from ((f"{_name(fn)}.{name}", value) for name, value in vars(fn).items())
    else:
        yield from _parts(_name(fn), fn)


def _names(code: CodeType) -> list[str]:
    """The names that a function looks up, those of the functions inside it included."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def _name(fn: Callable[..., Any]) -> str:
    if isinstance(fn, functools.partial):
        return _name(fn.func)
    return getattr(fn, "__name__", type(fn).__name__)


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


def _refused() -> tuple[type, ...]:
    return tuple(kind for kind, _, _ in _kinds())


class _Nowhere:
    """A file for what nobody wants to have."""

    def write(self, data: bytes) -> int:
        return len(data)
