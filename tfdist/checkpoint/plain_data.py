"""Writes what callbacks and datasets keep as JSON and arrays, and reads it back exactly.

Numbers, text, bytes, dates, paths, enumerations, arrays, tensors, containers of all these, named tuples and dataclasses
come back as new objects. Objects that hold a state (variables, metrics, random number generators, and everything with
`get_state` and `set_state`) are made by the new process, and get their state back in place.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import enum
import inspect
import json
import operator
import pathlib
import sys
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.inspection.object_state import MISSING, NO_OBJECTS, NotRestoredError, ObjectError, put_back, take

# What is raised where a state is not what `encode` has made.
_MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, tf.errors.OpError)
# The kinds of dtypes for booleans, numbers and complex numbers; a checkpoint does not keep other arrays exactly.
_NUMBERS = "biufc"
# Text and dates are written as their bytes.
_BUFFERS = "USmM"
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS = {"OrderedDict": collections.OrderedDict, "Counter": collections.Counter, "dict": dict}
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str, collections.Counter)}
_DATES = (datetime.datetime, datetime.date, datetime.time)


class NotPlainError(TypeError):
    """A value that cannot be saved exactly."""


def encode(value: Any, arrays: dict[str, Any], prefix: str, elsewhere: Collection[int] = ()) -> Any:
    """Plain data as JSON, and its arrays in `arrays`, under names that begin with `prefix`.

    Args:
        value: what to save.
        arrays: receives arrays and tensors.
        prefix: of their names.
        elsewhere: ids of objects whose state is saved elsewhere; only their place is noted.

    Raises:
        NotPlainError: if it cannot be saved exactly.

    Example:
        >>> encode({"best": 0.5, ("a", 1): {3}}, {}, "mine")
        {'dict': [['best', {'float': '0x1.0000000000000p-1'}], [{'tuple': ['a', 1]}, {'set': [3]}]]}
    """

    def inner(item: Any) -> Any:
        return encode(item, arrays, prefix, elsewhere)

    def put(array: Any) -> str:
        name = f"{prefix}/{len(arrays)}"
        arrays[name] = array
        return name

    if value is None:
        return None
    if id(value) in elsewhere:
        return {"elsewhere": True}
    for encoder in (_scalar, _array, _collection, _record, take):
        if (encoded := encoder(value, inner, put)) is not None:
            return encoded
    raise NotPlainError(
        f"Received: a {type(value).__qualname__}. Expected: numbers, text, bytes, dates, paths, arrays, tensors, and "
        "containers or dataclasses of them. Convert it."
    )


def _scalar(value: Any, inner: Callable, put: Callable) -> Any:
    if isinstance(value, enum.Enum):
        return {"enum": [_reference(value), inner(value.value)]}
    if isinstance(value, np.generic):
        return None
    if isinstance(value, float):
        return {"float": float(value).hex()}  # exact, and JSON has no infinity
    if isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (bytes, bytearray)):
        return {type(value).__name__: base64.b64encode(value).decode()}
    if isinstance(value, pathlib.Path):
        return {"path": str(value)}
    if type(value) in _DATES and isinstance(getattr(value, "tzinfo", None), (type(None), datetime.timezone)):
        return {type(value).__name__: value.isoformat()}
    if type(value) is datetime.timedelta:
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    return None


def _array(value: Any, inner: Callable, put: Callable) -> Any:
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy") and value.dtype not in (tf.variant, tf.resource):
        return {"tensor": put(value)}
    if not isinstance(value, (np.ndarray, np.generic)) or isinstance(value, np.ma.MaskedArray):
        return None
    if value.dtype.kind in _NUMBERS:
        return {"array": put(np.array(value)), "scalar": isinstance(value, np.generic)}
    if value.dtype.kind in _BUFFERS:
        content = base64.b64encode(value.tobytes()).decode()
        return {"buffer": [value.dtype.str, list(value.shape), content], "scalar": isinstance(value, np.generic)}
    return None


def _collection(value: Any, inner: Callable, put: Callable) -> Any:
    if isinstance(value, dict):
        pairs = [[inner(key), inner(item)] for key, item in value.items()]
        if isinstance(value, collections.defaultdict):
            factory = value.default_factory
            if factory is not None and _FACTORIES.get(factory.__name__) is not factory:
                raise NotPlainError(
                    f"Received: a defaultdict of {factory!r}. Expected: one of {', '.join(_FACTORIES)}."
                )
            return {"defaultdict": [factory and factory.__name__, pairs]}
        return {next(name for name, kind in _MAPPINGS.items() if isinstance(value, kind)): pairs}
    if isinstance(value, collections.deque):
        return {"deque": [value.maxlen, [inner(item) for item in value]]}
    if isinstance(value, tuple) and type(value) is not tuple:
        return {"namedtuple": [_reference(value), list(map(inner, value))]} if hasattr(value, "_fields") else None
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            items = [inner(item) for item in value]
            # A set of texts has another order in each process.
            return {name: sorted(items, key=json.dumps) if kind in (set, frozenset) else items}
    return None


def _record(value: Any, inner: Callable, put: Callable) -> Any:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    names = [
        field.name
        for field in dataclasses.fields(value)
        if _is_stored(type(value), field.name) and hasattr(value, field.name)
    ]
    fields = {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})
    return {"dataclass": [_reference(value), [[name, inner(item)] for name, item in fields.items()]]}


def _reference(value: Any) -> str:
    reference = f"{type(value).__module__}:{type(value).__qualname__}"
    if _class_of(reference) is not type(value):
        raise NotPlainError(
            f"Received: a {type(value).__qualname__}. Expected: a class that a module has under its name."
        )
    return reference


def _class_of(reference: str) -> Any:
    module, _, path = reference.partition(":")
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        # Not by `getattr`: that runs properties, and lazy modules import what they are asked for.
        found = vars(found).get(name) if isinstance(found, types.ModuleType | type) else None
    return found


def decode(value: Any, arrays: Mapping[str, Any], present: Any = NO_OBJECTS) -> Any:
    """The value that `encode` was given. A container of the user's own type comes back as a plain one.

    Args:
        value: what `encode` returned.
        arrays: what it has put there.
        present: the value that this process has; objects in it that hold a state get it back.

    Raises:
        NotRestoredError: for a state without its object, and for what `encode` does not return.
        Exception: whatever an object's `set_state` raises.
    """
    try:
        return _decode(value, arrays, present)
    except NotRestoredError:
        raise
    except ObjectError as error:
        raise error.__cause__ from None
    except _MALFORMED as error:
        raise NotRestoredError(f"it is not what a backup holds ({type(error).__name__}: {error})") from error


def _decode(value: Any, arrays: Mapping[str, Any], present: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if not value:
        raise NotRestoredError("it is not what a backup holds (an empty object)")
    kind, content = next(iter(value.items()))
    if kind in _DECODERS:
        return _DECODERS[kind](content)
    if kind in ("array", "tensor", "buffer"):
        return _array_of(kind, content, value.get("scalar"), arrays)
    if kind in ("enum", "namedtuple", "dataclass"):
        return _instance_of(kind, content, arrays, present)
    if kind in _MAPPINGS or kind == "defaultdict":
        return _mapping_of(kind, content, arrays, present)
    if kind in _SEQUENCES or kind == "deque":
        return _sequence_of(kind, content, arrays, present)
    return put_back(kind, content, present, lambda item: _decode(item, arrays, NO_OBJECTS), arrays)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "path": pathlib.Path,
    "timedelta": lambda parts: datetime.timedelta(*parts),
    **{kind.__name__: kind.fromisoformat for kind in _DATES},
}


def _array_of(kind: str, content: Any, is_scalar: bool | None, arrays: Mapping[str, Any]) -> Any:
    if kind == "tensor":
        return tf.convert_to_tensor(arrays[content])
    if kind == "array":
        array = np.array(arrays[content])
    else:
        dtype, shape, text = content
        if not isinstance(dtype, str) or np.dtype(dtype).kind not in _BUFFERS:
            raise NotRestoredError(f"it is not what a backup holds (a buffer of {ascii(dtype)[:40]})")
        array = np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
    return array[()] if is_scalar else array


def _mapping_of(kind: str, content: Any, arrays: Mapping[str, Any], present: Any) -> dict:
    factory, pairs = content if kind == "defaultdict" else (None, content)
    keys = [_decode(key, arrays, NO_OBJECTS) for key, _ in pairs]
    items = [
        (key, _decode(item, arrays, _part(operator.getitem, present, key)))
        for key, (_, item) in zip(keys, pairs, strict=True)
    ]
    if kind == "defaultdict":
        return collections.defaultdict(_FACTORIES.get(factory), items)
    return _MAPPINGS[kind](dict(items))


def _sequence_of(kind: str, content: Any, arrays: Mapping[str, Any], present: Any) -> Any:
    limit, items = content if kind == "deque" else (None, content)
    decoded = _items_of(items, arrays, present)
    return collections.deque(decoded, limit) if kind == "deque" else _SEQUENCES[kind](decoded)


def _items_of(items: list, arrays: Mapping[str, Any], present: Any) -> list:
    return [_decode(item, arrays, _part(operator.getitem, present, i)) for i, item in enumerate(items)]


def _instance_of(kind: str, content: Any, arrays: Mapping[str, Any], present: Any) -> Any:
    reference, rest = content
    cls = _class_of(reference)
    # The backup names the class. Only classes of this kind are used, and their constructors are not called: whoever can
    # write to the folder of the backups must not be able to call any function of the program.
    if not (isinstance(cls, type) and _IS_OF_KIND[kind](cls)):
        raise NotRestoredError(f"this program has no {kind} {reference.replace(':', '.')}")
    if kind == "enum":
        return _member_of(cls, _decode(rest, arrays, NO_OBJECTS))
    if kind == "namedtuple":
        items = _items_of(rest, arrays, present)
        # The program may have got new fields since.
        items += [cls._field_defaults[name] for name in cls._fields[len(items) :] if name in cls._field_defaults]
        if len(items) != len(cls._fields):
            raise NotRestoredError(f"{cls.__qualname__} has {len(cls._fields)} fields in this program, not {len(rest)}")
        return tuple.__new__(cls, items)
    if present is not NO_OBJECTS and type(present) is not cls:
        present = MISSING
    is_kept = type(present) is cls and not cls.__dataclass_params__.frozen
    made = present if is_kept else object.__new__(cls)
    for name, item in rest:
        if not _is_stored(cls, name):
            raise NotRestoredError(f"{cls.__qualname__}.{name} is computed in this program")
        object.__setattr__(made, name, _decode(item, arrays, _part(getattr, present, name)))
    return made


def _member_of(cls: type[enum.Enum], value: Any) -> enum.Enum:
    # Not `cls(value)`: that may run a `_missing_` of the class' own.
    for member in cls.__members__.values():
        if type(member.value) is type(value) and member.value == value:
            return member
    if issubclass(cls, enum.Flag) and type(value) is int and cls._missing_.__func__ is enum.Flag._missing_.__func__:
        return cls(value)  # several flags, or none
    raise NotRestoredError(f"{cls.__qualname__} has no {value!r} in this program")


def _is_stored(cls: type, name: str) -> bool:
    """Whether instances have a value under a name; not where a property, say, computes it."""
    found = inspect.getattr_static(cls, name, None)
    return isinstance(found, types.MemberDescriptorType) or not hasattr(type(found), "__set__")


_IS_OF_KIND: dict[str, Callable[[type], bool]] = {
    "enum": lambda cls: issubclass(cls, enum.Enum),
    "namedtuple": lambda cls: (
        issubclass(cls, tuple) and isinstance(inspect.getattr_static(cls, "_fields", None), tuple)
    ),
    "dataclass": dataclasses.is_dataclass,
}


def _part(get: Callable[[Any, Any], Any], present: Any, key: Any) -> Any:
    """A part of the value that this process has; NO_OBJECTS or MISSING if there is none."""
    if present is NO_OBJECTS:
        return NO_OBJECTS
    try:
        return get(present, key)
    except (LookupError, TypeError, AttributeError):
        return MISSING
