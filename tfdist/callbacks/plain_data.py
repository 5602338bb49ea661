"""Values as JSON and arrays, exactly: what callbacks and datasets keep, so that a backup can hold it.

Numbers, text, bytes, dates, paths, enumerations, arrays, tensors, containers of all these, named tuples and dataclasses
come back as new objects. What keeps a state to itself (variables, metrics, random number generators, and everything
with `get_state` and `set_state`) gets it back in place, as the object that the new process has made.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import enum
import json
import pathlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.callbacks import object_state
from tfdist.callbacks.object_state import MISSING, NO_OBJECTS, NotRestored

# What NumPy calls booleans, numbers and complex numbers: other arrays do not come back from a checkpoint as they were.
_NUMBERS = "biufc"
# Text and dates: written as their bytes.
_BUFFERS = "USmM"
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS = {"OrderedDict": collections.OrderedDict, "Counter": collections.Counter, "dict": dict}
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str, collections.Counter)}
_DATES = (datetime.datetime, datetime.date, datetime.time)


class NotPlain(TypeError):
    """A value that cannot be saved exactly."""


def encode(value: Any, arrays: dict[str, Any], prefix: str, elsewhere: Collection[int] = ()) -> Any:
    """Plain data as JSON, and its arrays in `arrays`, under names that begin with `prefix`.

    Args:
        value: what to save.
        arrays: receives arrays and tensors.
        prefix: of their names.
        elsewhere: ids of objects whose state is saved elsewhere: only that they were there is noted.

    Raises:
        NotPlain: if it cannot be saved exactly.

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
    for encoder in (_scalar, _array, _collection, _record, object_state.take):
        if (encoded := encoder(value, inner, put)) is not None:
            return encoded
    raise NotPlain(
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
                raise NotPlain(f"Received: a defaultdict of {factory!r}. Expected: one of {', '.join(_FACTORIES)}.")
            return {"defaultdict": [factory and factory.__name__, pairs]}
        return {next(name for name, kind in _MAPPINGS.items() if isinstance(value, kind)): pairs}
    if isinstance(value, collections.deque):
        return {"deque": [value.maxlen, [inner(item) for item in value]]}
    if isinstance(value, tuple) and type(value) is not tuple:
        return {"namedtuple": [_reference(value), list(map(inner, value))]} if hasattr(value, "_fields") else None
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            items = [inner(item) for item in value]
            # The order of a set of texts is another one in each process.
            return {name: sorted(items, key=json.dumps) if kind in (set, frozenset) else items}
    return None


def _record(value: Any, inner: Callable, put: Callable) -> Any:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    fields = {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})
    return {"dataclass": [_reference(value), [[name, inner(item)] for name, item in fields.items()]]}


def _reference(value: Any) -> str:
    reference = f"{type(value).__module__}:{type(value).__qualname__}"
    if _class_of(reference) is not type(value):
        raise NotPlain(f"Received: a {type(value).__qualname__}. Expected: a class that a module has under its name.")
    return reference


def _class_of(reference: str) -> Any:
    module, _, path = reference.partition(":")
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def decode(value: Any, arrays: Mapping[str, Any], present: Any = NO_OBJECTS) -> Any:
    """What `encode` was given; containers of the user's own types are plain ones.

    Args:
        value: what `encode` returned.
        arrays: what it has put there.
        present: what this process has in its place; objects in it that keep a state get theirs back.

    Raises:
        NotRestored: for a state without its object.
    """
    if not isinstance(value, dict):
        return value
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
    return object_state.put_back(kind, content, present, lambda item: decode(item, arrays), arrays)


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
        array = np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
    return array[()] if is_scalar else array


def _mapping_of(kind: str, content: Any, arrays: Mapping[str, Any], present: Any) -> dict:
    factory, pairs = content if kind == "defaultdict" else (None, content)
    keys = [decode(key, arrays) for key, _ in pairs]
    items = [
        (key, decode(item, arrays, _part(present, lambda there, key=key: there[key])))
        for key, (_, item) in zip(keys, pairs, strict=True)
    ]
    if kind == "defaultdict":
        return collections.defaultdict(_FACTORIES.get(factory), items)
    return _MAPPINGS[kind](dict(items))


def _sequence_of(kind: str, content: Any, arrays: Mapping[str, Any], present: Any) -> Any:
    limit, items = content if kind == "deque" else (None, content)
    decoded = [decode(item, arrays, _part(present, lambda there, i=i: there[i])) for i, item in enumerate(items)]
    return collections.deque(decoded, limit) if kind == "deque" else _SEQUENCES[kind](decoded)


def _instance_of(kind: str, content: Any, arrays: Mapping[str, Any], present: Any) -> Any:
    reference, rest = content
    cls = _class_of(reference)
    if cls is None:
        raise NotRestored(f"this program has no class {reference.replace(':', '.')}")
    if kind == "enum":
        return cls(decode(rest, arrays))
    if kind == "namedtuple":
        return cls(*(decode(item, arrays, _part(present, lambda there, i=i: there[i])) for i, item in enumerate(rest)))
    is_kept = type(present) is cls and not cls.__dataclass_params__.frozen
    made = present if is_kept else object.__new__(cls)
    for name, item in rest:
        object.__setattr__(
            made, name, decode(item, arrays, _part(present, lambda there, name=name: getattr(there, name)))
        )
    return made


def _part(present: Any, get: Callable[[Any], Any]) -> Any:
    """The part of a container that is there already, or what says that it is not."""
    if present is NO_OBJECTS:
        return NO_OBJECTS
    try:
        return get(present)
    except (LookupError, TypeError, AttributeError):
        return MISSING
