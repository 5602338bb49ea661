"""The public names of the package with their signatures, one parameter a line.

What is inherited from Keras and TensorFlow is left out: it differs by their version.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from tools.surface.sources import nodes_of, parsed

# Written in a class, but not for its users.
_NOT_CALLED = ("__new__", "__post_init__")


def names() -> Iterator[str]:
    """All names of `tfdist.__all__`, of the modules among them, and so on; each at its shortest path."""
    import tfdist

    public: dict[int, str] = {}
    for name, value in _walk("tfdist", tfdist):
        if callable(value) and id(value) in public:
            yield f"{name} is {public[id(value)]}"
            continue
        public[id(value)] = name
        if isinstance(value, type):
            yield from class_lines(name, value, public)
        elif callable(value):
            yield from function_lines(name, value)
        else:
            yield f"{name}: {type(value).__name__}"
            yield from (f"{name}[{key!r}]" for key in value if isinstance(value, Mapping))


def _walk(path: str, module: ModuleType) -> Iterator[tuple[str, Any]]:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    listed = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    found = {f"{path}.{name}": getattr(module, name) for name in sorted(listed)}
    yield from ((name, value) for name, value in found.items() if not isinstance(value, ModuleType))
    for name, value in found.items():
        if isinstance(value, ModuleType):
            yield from _walk(name, value)


def class_lines(name: str, found: type, public: Mapping[int, str]) -> Iterator[str]:
    """A class, with what it and the classes of its package that it inherits from define.

    Of other classes it has the nearest ones are named, each by its package, since modules below that may move.

    Args:
        name: its public name.
        found: the class.
        public: public names of classes, by id.
    """
    own = [kind for kind in found.__mro__ if _package(kind) == _package(found)]
    others = {kind for ours in own for kind in ours.__bases__ if kind not in own and kind is not object}
    bases = [
        public.get(id(kind), f"{_package(kind)}.{kind.__name__}")
        for kind in found.__mro__[1:]
        if kind in others or id(kind) in public
    ]
    yield f"class {name}({', '.join(bases)})"
    # What stands for it in saved models.
    keras = sys.modules.get("keras")
    if keras is not None and ">" in (saved := keras.saving.get_registered_name(found)):
        yield f"{name} is saved as {saved}"
    members: dict[str, list[str]] = {}
    for ours in reversed(own):
        members |= _members(name, ours)
    for _, lines in sorted(members.items()):
        yield from lines


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _members(name: str, kind: type) -> dict[str, list[str]]:
    """What a class itself defines, with the lines for it."""
    nodes = nodes_of(_written(kind))
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    # Methods such as __eq__ that dataclasses make differ by the version of Python.
    written = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("__")}
    special = written - {*_NOT_CALLED} | {"__init__"}
    found = {node.attr: [f"{name}.{node.attr}"] for node in stored if ast.unparse(node.value) == "self"}
    found |= {key: [f"{name}.{key}"] for key in vars(kind)}
    found |= {key: [f"{name}.{key}: {_annotation(note)}"] for key, note in inspect.get_annotations(kind).items()}
    found |= {key: lines for key, value in vars(kind).items() if (lines := list(_method_lines(f"{name}.{key}", value)))}
    return {key: lines for key, lines in found.items() if not key.startswith("_") or key in special}


def _written(kind: type) -> ast.ClassDef:
    """Its source. Its name may have been changed, for Keras."""
    name = kind.__qualname__.rpartition(".")[2]
    classes = (node for node in nodes_of(parsed(inspect.getfile(kind))) if isinstance(node, ast.ClassDef))
    return next(node for node in classes if node.name == name)


def _method_lines(name: str, value: Any) -> Iterator[str]:
    """None for what is neither a method nor a property."""
    if isinstance(value, (property, functools.cached_property)):
        getter = value.fget if isinstance(value, property) else value.func
        yield f"{name}: property{_result(getter)}"
        if getattr(value, "fset", None) is not None:
            yield f"{name}: can be set"
    elif isinstance(value, (classmethod, staticmethod)):
        yield f"{name}: {type(value).__name__}"
        yield from function_lines(name, value.__func__, is_bound=isinstance(value, classmethod))
    elif name.endswith(".__init__"):
        yield from _parameter_lines(name.removesuffix(".__init__"), value, is_bound=True)
    elif inspect.isroutine(value):
        yield from function_lines(name, value, is_bound=True)


def function_lines(name: str, function: Callable[..., Any], is_bound: bool = False) -> Iterator[str]:
    """A function, with a line for each parameter, in their order.

    Args:
        name: its public name.
        function: the function.
        is_bound: whether its first parameter is none for the caller, such as `self`.

    Example:
        >>> def scaled(x, /, *, by: float = 2.0) -> float: ...
        >>> list(function_lines("scaled", scaled))
        ['scaled(x, /)', 'scaled(*, by: float = 2.0)', 'scaled() -> float']
    """
    yield from _parameter_lines(name, function, is_bound)
    yield f"{name}(){_result(function)}"


def _parameter_lines(name: str, function: Callable[..., Any], is_bound: bool) -> Iterator[str]:
    for parameter in list(inspect.signature(function).parameters.values())[is_bound:]:
        yield f"{name}({_parameter(parameter)})"


def _result(function: Callable[..., Any]) -> str:
    note = inspect.signature(function).return_annotation
    return "" if note is inspect.Signature.empty else f" -> {_annotation(note)}"


def _parameter(parameter: inspect.Parameter) -> str:
    before = {parameter.KEYWORD_ONLY: "*, ", parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    text = before.get(parameter.kind, "") + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {_default(parameter.default)}"
    return text + (", /" if parameter.kind is parameter.POSITIONAL_ONLY else "")


def _annotation(note: Any) -> str:
    """As it is written."""
    return note if isinstance(note, str) else inspect.formatannotation(note)


def _default(value: Any) -> str:
    text = getattr(value, "__qualname__", None) or repr(value)
    if " at 0x" in text:
        raise ValueError(f"Received: the default {text}. Expected: one with a text that stays; give it a __repr__.")
    return text
