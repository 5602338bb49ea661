"""The state of the other callbacks of a fit, taken from their attributes.

Keras' callbacks keep what they know in attributes: EarlyStopping's `wait`, `best` and `best_weights`,
ReduceLROnPlateau's `cooldown_counter`, History's `history`. Everything that `encode` can express is saved. A
callback that keeps something else has `get_state()`, which returns plain data, and `set_state(data)`. Containers in the
body of a class that methods change in place are attributes, too; arrays that the program has passed are none.

Numbers, text, bytes, dates, paths, arrays, tensors and containers of all these come back as new objects. Objects that
hold a state (variables, metrics, layers, models, random number generators, and everything with `get_state` and
`set_state`) are made by the new process, and get their state back in place. No class or function is looked up by a name
that a backup has.

What the program made stays: a path, a command or an option is no state of the training. Write access to the folder of
the backups must not be enough to turn a callback to another file or command. So text comes back only where the class'
own methods assign it (`self.phase = "cooling"`), or in a list or a dict that began without text; and an argument of the
constructor stays unless methods assign it and it is no text.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import datetime
import dis
import enum
import functools
import hashlib
import inspect
import io
import json
import logging
import os
import pathlib
import random
import threading
import types
import warnings
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.inspection.model_state import (
    all_optimizers_of,
    is_kept_per_replica,
    is_sharded,
    items_of,
    own_copy,
    parts_of_variable,
)
from tfdist.runtime.chief import Arranged, is_the_chiefs
from tfdist.steps.attributes import is_users

# Passed in place of the object that this process has: there are none since only data are read (those of a
# `get_state()`), or this one is missing.
NO_OBJECTS = object()
MISSING = object()

_NOT_STATE = ("_model", "model", "params")
# Values of these types are the same in every process, or no backup could bring them back.
_STATELESS = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type, np.ufunc),
    *(functools.partial, logging.Logger, io.IOBase, type(threading.Lock()), type(threading.RLock())),
    *(tf.types.experimental.PolymorphicFunction, tf.summary.SummaryWriter, tf.data.Dataset, tf.distribute.Strategy),
)

# These run in every process before a backup is restored.
_BEFORE = ("__init__", "__new__", "set_model", "set_params", "on_train_begin")
_OBJECTS = ("variable", "variables", "generator", "random", "state", "array", "tensor", "elsewhere")
# What Keras' callbacks that only write know of the fit: the columns of a CSVLogger, and what an OrbaxCheckpoint counts
# and compares. All else that they keep is of files that they have open.
_OF_WRITERS = {"keys", "best", "_batches_seen_since_last_saving", "_last_batch_seen", "_total_batches_seen"}
_IN_PLACE = (list, dict, set, collections.deque, np.ndarray)
# What tells whether an object has changed; longer containers would tell it too slowly.
_PLAIN, _FILLED, _LONGEST = (bool, int, float, str, type(None)), (list, tuple, dict), 1000


def with_held(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Callbacks, and those that a user's own ones hold and call: an EarlyStopping that begins late, say."""
    found = {id(one): one for one in callbacks}
    waiting = list(callbacks)
    for one in filter(is_users, waiting):  # which grows; tfdist's own refer to all of the fit
        held = items_of([value for name, value in vars(one).items() if name not in _NOT_STATE])
        new = [item for item in held if isinstance(item, keras.callbacks.Callback) and not isinstance(item, Arranged)]
        new = [item for item in new if id(item) not in found]
        found.update((id(item), item) for item in new)
        waiting += new
    return list(found.values())


class NotRestoredError(ValueError):
    """A state cannot be put back: this process has no object like the one that it was taken from."""


class _ObjectError(Exception):
    """What an object of the user's has raised, which is its cause."""


# What is raised where a state is not what `encode` has made.
_MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, tf.errors.OpError)
# The kinds of dtypes for booleans, numbers and complex numbers; a checkpoint does not keep other arrays exactly.
_NUMBERS = "biufc"
_BFLOAT16 = np.dtype(tf.bfloat16.as_numpy_dtype)  # a package's, and of a kind of its own
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS = {"OrderedDict": collections.OrderedDict, "Counter": collections.Counter, "dict": dict}
_WITH_HEAD = ("deque", "defaultdict")
_CONTAINERS = (*_SEQUENCES, *_MAPPINGS, *_WITH_HEAD)
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str, collections.Counter)}
_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_VARIABLES = (tf.Variable, keras.Variable)


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
    if id(value) in elsewhere or _is_made_of(value, elsewhere):
        return {"elsewhere": True}
    for encoder in (_scalar, _array, _collection, _object):
        if (encoded := encoder(value, inner, put)) is not None:
            return encoded
    raise NotPlainError(
        f"Received: a {type(value).__qualname__}. Expected: numbers, text, bytes, dates, paths, arrays, tensors, and "
        "containers of them. Convert it."
    )


def _scalar(value: Any, inner: Callable, put: Callable) -> Any:
    if isinstance(value, (enum.Enum, np.generic)):
        return None
    if type(value) in _DATES and not isinstance(getattr(value, "tzinfo", None), (type(None), datetime.timezone)):
        return None
    if isinstance(value, (bool, int, str)):
        return value
    for name, (kind, to_json, _) in _SCALARS.items():
        # Others make subclasses of dates that hold more, such as the nanoseconds of pandas.
        if type(value) is kind or (isinstance(value, kind) and kind not in _DATES):
            return {name: to_json(value)}
    return None


_DATES = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta)
# How JSON holds a value of each type, and the value that it stands for.
_SCALARS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, lambda value: float(value).hex(), float.fromhex),  # exact, and JSON has no infinity
    "complex": (
        complex,
        lambda value: [value.real.hex(), value.imag.hex()],
        lambda parts: complex(*map(float.fromhex, parts)),
    ),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "bytearray": (
        bytearray,
        lambda value: base64.b64encode(value).decode(),
        lambda text: bytearray(base64.b64decode(text)),
    ),
    "path": (pathlib.Path, str, pathlib.Path),
    **{kind.__name__: (kind, kind.isoformat, kind.fromisoformat) for kind in _DATES[:3]},
    "timedelta": (
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
}


def _array(value: Any, inner: Callable, put: Callable) -> Any:
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy") and value.dtype not in (tf.variant, tf.resource):
        return {"tensor": put(value)}
    if not isinstance(value, (np.ndarray, np.generic)) or isinstance(value, np.ma.MaskedArray):
        return None
    if value.dtype.kind not in _NUMBERS and value.dtype != _BFLOAT16:
        return None
    return {"array": put(np.array(value)), "scalar": isinstance(value, np.generic)}


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
        return None
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            items = [inner(item) for item in value]
            # A set of texts has another order in each process.
            return {name: sorted(items, key=json.dumps) if kind in (set, frozenset) else items}
    return None


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
    except _ObjectError as error:
        raise error.__cause__ from None
    except _MALFORMED as error:
        raise NotRestoredError(f"it is not what a backup holds ({type(error).__name__}: {error})") from error


def _decode(value: Any, arrays: Mapping[str, Any], present: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if not value:
        raise NotRestoredError("it is not what a backup holds (an empty object)")
    kind, content = next(iter(value.items()))
    if kind in _SCALARS:
        return _SCALARS[kind][2](content)
    if kind == "tensor":
        return tf.convert_to_tensor(arrays[content])
    if kind == "array":
        array = np.array(arrays[content])
        return array[()] if value.get("scalar") else array
    if kind in _CONTAINERS:
        return _container_of(kind, content, arrays, present)
    return _put_back(kind, content, present, lambda item: _decode(item, arrays, NO_OBJECTS), arrays)


def _container_of(kind: str, content: Any, arrays: Mapping[str, Any], present: Any) -> Any:
    """A container of what is decoded, whose head is the factory of a defaultdict or the limit of a deque."""
    head, items = content if kind in _WITH_HEAD else (None, content)
    is_mapping = kind in (*_MAPPINGS, "defaultdict")
    pairs = [(_decode(key, arrays, NO_OBJECTS), item) for key, item in (items if is_mapping else enumerate(items))]
    decoded = {key: _decode(item, arrays, _part(present, key)) for key, item in pairs}
    if kind == "defaultdict":
        return collections.defaultdict(_FACTORIES.get(head), decoded)
    if kind == "deque":
        return collections.deque(decoded.values(), head)
    return _MAPPINGS[kind](decoded) if is_mapping else _SEQUENCES[kind](decoded.values())


def _part(present: Any, key: Any) -> Any:
    """A part of the value that this process has; NO_OBJECTS or MISSING if there is none."""
    if present is NO_OBJECTS:
        return NO_OBJECTS
    try:
        return present[key]
    except (LookupError, TypeError):
        return MISSING


def _object(value: Any, encode: Callable, put: Callable) -> Any:
    """The state of a variable, a metric, a random number generator, or anything with `get_state` and `set_state`."""
    if hasattr(value, "get_state") and hasattr(value, "set_state") and not isinstance(value, type):
        return {"state": encode(value.get_state())}
    if (variables := _variables_of(value)) is not None:
        if any(map(_is_apart, variables)):
            return None  # reading it is a collective, and only one process writes backups
        names = [put(np.array(own_copy(variable).read_value())) for variable in variables]
        return {"variable": names[0]} if isinstance(value, _VARIABLES) else {"variables": names}
    if isinstance(value, np.random.Generator):
        return {"generator": [type(value.bit_generator).__name__, encode(value.bit_generator.state)]}
    if isinstance(value, random.SystemRandom):
        return {"elsewhere": True}  # it has no state
    if isinstance(value, random.Random):
        return {"random": encode(value.getstate())}
    return None


def _variables_of(value: Any) -> list[Any] | None:
    if isinstance(value, _VARIABLES):
        return [value]
    if isinstance(value, (keras.Metric, keras.layers.Layer)):
        optimizers = all_optimizers_of(value) if isinstance(value, keras.Model) else []
        return [variable for part in (value, *optimizers) for variable in part.variables]
    if isinstance(value, (keras.random.SeedGenerator, tf.random.Generator)):
        return [value.state]
    return None


def _is_made_of(value: Any, elsewhere: Collection[int]) -> bool:
    """Whether it is a layer, or a model, all of whose variables are saved elsewhere."""
    is_layer = isinstance(value, keras.layers.Layer) and bool(elsewhere)
    return is_layer and all(id(variable) in elsewhere for variable in _variables_of(value))


def _is_apart(variable: Any) -> bool:
    """Whether processes have values or parts of their own."""
    return is_kept_per_replica(variable) or is_sharded(variable)


def _put_back(kind: str, state: Any, present: Any, decode: Callable[[Any], Any], arrays: Mapping[str, Any]) -> Any:
    """Puts a state that `_object` has returned into the object of this process; returns that object, or a new one."""
    if kind == "generator":
        name, state = state
        if not isinstance(present, np.random.Generator) or type(present.bit_generator).__name__ != name:
            if name not in _GENERATORS:
                raise NotRestoredError(f"NumPy has no random number generator {name}")
            present = np.random.Generator(getattr(np.random, name)())
        present.bit_generator.state = decode(state)
        return present
    if kind == "random":
        present = present if isinstance(present, random.Random) else random.Random()
        present.setstate(decode(state))
        return present
    if kind == "variable" and present is NO_OBJECTS:
        return np.array(arrays[state])
    if kind == "elsewhere" and present is not NO_OBJECTS and present is not MISSING:
        return present
    if kind == "state" and hasattr(present, "set_state"):
        state = decode(state)
        try:
            present.set_state(state)
        except Exception as error:
            raise _ObjectError from error
        return present
    names, variables = [state] if kind == "variable" else state, _variables_of(present)
    optimizer = getattr(present, "optimizer", None) if isinstance(present, keras.Model) else None
    if optimizer is not None and not optimizer.built and len(variables) < len(names):
        with present.distribute_strategy.scope():
            optimizer.build(present.trainable_variables)
        variables = _variables_of(present)
    if kind in ("variable", "variables") and variables is not None and len(variables) == len(names):
        for variable, name in zip(variables, names, strict=True):
            for part in parts_of_variable(variable):
                part.assign(tf.constant(arrays[name], part.dtype))
        return present
    raise NotRestoredError("this process has no such object in its place")


@dataclass(frozen=True)
class Beginning:
    """What a callback has when its fit begins.

    Attributes:
        fit: the folder of the fit's backups.
        settings: see `settings`.
        received: its arguments that hold arrays or models, and the `_size` of each. They are there again in another
            process.
        of_class: the content of the containers in the bodies of its classes.
        objects: its arguments that are objects of a user's own classes, and what tells whether they change.
    """

    fit: str
    settings: dict[str, str]
    received: dict[str, tuple[Any, Any]]
    of_class: dict[str, str | None]
    objects: dict[str, dict[str, str]]


# By the ids of callbacks. A fit that has failed, and is tried again, has changed what its callbacks had at first.
_began: dict[int, tuple[weakref.ref, Beginning]] = {}


def begin(callbacks: Sequence[keras.callbacks.Callback], fit: str) -> list[Beginning]:
    """What each callback has, or had when this fit began in this process for the first time."""
    found = []
    for callback in callbacks:
        key = id(callback)
        if key not in _began or _began[key][1].fit != fit:
            forget_it = functools.partial(lambda key, _: _began.pop(key, None), key)
            _began[key] = weakref.ref(callback, forget_it), _beginning(callback, fit)
        found.append(_began[key][1])
    return found


def forget(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Notes that the fit of these callbacks has come to its end."""
    for callback in callbacks:
        _began.pop(id(callback), None)


def _beginning(callback: keras.callbacks.Callback, fit: str = "") -> Beginning:
    parameters = _parameters_of(type(callback))
    named = {name: value for name, value in vars(callback).items() if name in parameters}
    held = {name: value for name, value in named.items() if value is not callback.model and _holds_arrays(value)}
    return Beginning(
        fit,
        settings([callback])[0],
        {name: (value, _size(value)) for name, value in held.items()},
        {name: content_of(value) for name, value in _containers_of_class(callback).items()},
        {name: _facts_of(value) for name, value in named.items() if is_users(value)},
    )


def _facts_of(value: Any) -> dict[str, str]:
    """Numbers, text and short containers of these among the attributes of an object."""
    short = {name: one for name, one in vars(value).items() if not isinstance(one, _FILLED) or len(one) <= _LONGEST}
    return {name: repr(one) for name, one in short.items() if all(isinstance(item, _PLAIN) for item in items_of(one))}


def _differ(then: dict[str, str], now: dict[str, str]) -> bool:
    """Whether something has changed that is known of both."""
    return any(now.get(name, text) != text for name, text in then.items())


def _containers_of_class(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """The containers in the bodies of a callback's classes: methods may change them in place."""
    return {
        name: value
        for base in type(callback).__mro__
        for name, value in vars(base).items()
        if isinstance(value, _IN_PLACE) and not name.startswith("__") and name not in vars(callback)
        if getattr(type(callback), name, None) is value
    }


def content_of(value: Any) -> str | None:
    """What a container holds, as text that is the same for the same content; None if no backup can hold it."""
    arrays: dict[str, Any] = {}
    try:
        text = json.dumps(encode(value, arrays, ""))
    except (NotPlainError, RecursionError):
        return None
    found = map(np.asarray, arrays.values())
    return text + "".join(f"{a.dtype}{a.shape}{hashlib.sha256(a.tobytes()).hexdigest()}" for a in found)


def settings(callbacks: Sequence[keras.callbacks.Callback]) -> list[dict[str, str]]:
    """The arguments of each callback that it keeps under their names, as they are before the training."""
    found = []
    for callback in callbacks:
        parameters = _parameters_of(type(callback))
        values = {name: _as_text(value) for name, value in vars(callback).items() if name in parameters}
        found.append({name: text for name, text in values.items() if text is not None})
    return found


def _as_text(value: Any) -> str | None:
    """A setting as text that compares equal in every process; None if it is more than plain data."""
    kept: dict[str, Any] = {}
    try:
        if _holds_arrays(value):
            return None
        text = json.dumps(encode(value, kept, ""))
    except (NotPlainError, RecursionError):
        return None
    return None if kept or any(f'"{kind}": ' in text for kind in ("generator", "random", "state")) else text


def capture(
    callbacks: Sequence[keras.callbacks.Callback],
    passed: Sequence[dict[str, str]],
    arrays: dict[str, Any],
    elsewhere: Collection[int] = (),
    began: Sequence[Beginning] | None = None,
) -> list[dict]:
    """The state of callbacks as JSON-serialisable data.

    Args:
        callbacks: in their order in the fit.
        passed: their `settings`.
        arrays: receives the arrays, under the names that the data has for them.
        elsewhere: ids of the objects whose state is saved elsewhere.
        began: what `begin` returned; by default, the fit begins now.

    Returns:
        One entry for each callback.

    Raises:
        NotPlainError: if a callback's `get_state()` returns what cannot be saved.
    """
    elsewhere = {*elsewhere, *map(id, callbacks)}
    began = list(map(_beginning, callbacks)) if began is None else began
    entries = []
    for i, (callback, own, first) in enumerate(zip(callbacks, passed, began, strict=True)):
        state, unsaved = _state_of(callback, arrays, f"callbacks/{i}", elsewhere, first)
        entries.append(
            {
                "class": type(callback).__name__,
                # The function that compares values cannot be saved; Keras chooses it again.
                "compares": getattr(callback, "monitor_op", None) is not None,
                "settings": own,
                "state": state,
                "unsaved": unsaved,
            }
        )
    return entries


def _state_of(
    callback: keras.callbacks.Callback,
    arrays: dict[str, Any],
    prefix: str,
    elsewhere: Collection[int],
    began: Beginning,
) -> tuple[dict, list[str]]:
    """A callback's state, and the names of the attributes that cannot be saved."""
    if hasattr(callback, "get_state"):
        try:
            return encode(callback.get_state(), arrays, prefix, elsewhere), []
        except NotPlainError as error:
            raise NotPlainError(
                f"{type(callback).__name__}.get_state() returned what cannot be saved. {error}"
            ) from None
    parameters = _parameters_of(type(callback))
    of_keras = kept_by_keras(type(callback))
    left_out = {*_NOT_STATE, *(of_keras - _OF_WRITERS if is_the_chiefs(callback) else ())}
    of_class = _containers_of_class(callback)
    changed = {name: value for name, value in of_class.items() if content_of(value) != began.of_class.get(name)}
    pairs, unsaved, changed_objects = [], [], []
    for name, value in {**changed, **vars(callback)}.items():
        # Arrays and models that the user has passed (validation data, say) are there again in the next process.
        received, size = began.received.get(name, (None, 0))
        is_received = value is received is not None and _size(value) == size
        if name in left_out or id(value) in elsewhere or is_received:
            continue
        own: dict[str, Any] = {}
        try:
            pairs.append([name, encode(value, own, f"{prefix}/{name}", elsewhere)])
        except (NotPlainError, RecursionError):
            if name in began.objects and is_users(value) and _differ(began.objects[name], _facts_of(value)):
                changed_objects.append(name)
            elif not isinstance(value, _STATELESS) and name not in parameters:
                unsaved.append(name)
        else:
            arrays.update(own)
    # What else Keras' own callbacks keep is no state.
    is_of_keras = type(callback).__module__.startswith("keras.")
    unsaved = [] if is_of_keras else [name for name in unsaved if name not in of_keras]
    return {"dict": pairs}, [*unsaved, *changed_objects]


def _holds_arrays(value: Any) -> bool:
    """Whether it is an array, a layer or a model, or a container of such."""
    if isinstance(value, dict):
        return any(map(_holds_arrays, value.values()))
    is_one = isinstance(value, (np.ndarray, keras.layers.Layer))
    return is_one or (isinstance(value, (list, tuple)) and any(map(_holds_arrays, value)))


def _size(value: Any) -> Any:
    """What tells whether something that `_holds_arrays` has changed: of layers, a checksum of their variables."""
    if isinstance(value, np.ndarray):
        return value.size
    if isinstance(value, keras.layers.Layer):
        own = (np.array(own_copy(one).read_value()) for one in _variables_of(value) if not _is_apart(one))
        return functools.reduce(lambda before, array: zlib.crc32(array.tobytes(), before), own, 0)
    parts = value.values() if isinstance(value, dict) else value
    return [len(value), *(_size(one) for one in parts if isinstance(one, keras.layers.Layer))]


def matching(
    callbacks: Sequence[keras.callbacks.Callback], passed: Sequence[dict[str, str]], entries: Sequence[dict]
) -> list[dict | None]:
    """The saved entry of each callback, `None` for one that was not saved. Some entries may belong to no callback.

    An entry belongs to the callback of its class with the same settings, or else to the next one of its class.

    Args:
        callbacks: those of this fit.
        passed: their `settings`.
        entries: what `capture` returned.
    """
    found: list[dict | None] = [None] * len(callbacks)
    rest = list(entries)
    for same_settings in (True, False):
        for i, (callback, own) in enumerate(zip(callbacks, passed, strict=True)):
            for k, entry in enumerate(rest if found[i] is None else ()):
                if entry["class"] == type(callback).__name__ and (entry["settings"] == own or not same_settings):
                    found[i] = rest.pop(k)
                    break
    return found


def restore(
    callbacks: Sequence[keras.callbacks.Callback],
    passed: Sequence[dict[str, str]],
    entries: Sequence[dict | None],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Gives callbacks the state that `capture` returned, except for settings that the user has changed since.

    Args:
        callbacks: those of this fit.
        passed: their `settings`.
        entries: what `matching` returned.
        arrays: those of `capture`.
    """
    for callback, own, entry in zip(callbacks, passed, entries, strict=True):
        if entry is None:
            continue
        if hasattr(callback, "get_state") and hasattr(callback, "set_state"):
            callback.set_state(decode(entry["state"], arrays))
            continue
        if entry["compares"] and getattr(callback, "monitor_op", True) is None:
            # Keras does this later, and flips the sign of min_delta then; in the saved state it is flipped already.
            callback._set_monitor_op()
        for name, saved in _attributes(entry["state"]):
            if own.get(name) != entry["settings"].get(name):
                continue
            present = getattr(callback, name, None)
            try:
                if _is_programs_own(callback, name, present, saved):
                    raise NotRestoredError("it is text or an argument of this program, which a backup does not change")
                value = decode(saved, arrays, present)
            except NotRestoredError as error:
                warnings.warn(
                    f"{entry['class']}.{name} is in the backup and cannot be restored: {error}. Expected: one like "
                    "that which was saved, before the first epoch begins; or give it get_state() and set_state(state).",
                    UserWarning,
                    stacklevel=2,
                )
            else:
                _set(callback, name, present, value)


def _attributes(state: Any) -> list[tuple[str, Any]]:
    """The attributes in a saved state; none in that of a callback which had `get_state()` then."""
    pairs = state.get("dict") if isinstance(state, dict) else None
    pairs = pairs if isinstance(pairs, list) else []
    return [
        (pair[0], pair[1])
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
        if not pair[0].startswith("__") and pair[0] not in _NOT_STATE
    ]


def _set(callback: keras.callbacks.Callback, name: str, present: Any, value: Any) -> None:
    """Sets an attribute. A container is changed in place, since the user's code may refer to it."""
    if value is present:
        return
    if isinstance(present, np.ndarray) and name not in vars(callback) and np.shape(value) == present.shape:
        present[...] = value
        return
    for kind, fill in ((dict, "update"), (set, "update"), (list, "extend"), (collections.deque, "extend")):
        if isinstance(present, kind) and isinstance(value, kind):
            present.clear()
            getattr(present, fill)(value)
            return
    setattr(callback, name, value)


def _parameters_of(cls: type) -> Mapping[str, Any]:
    """The parameters of the constructors of a class and of those that it inherits from.

    Example:
        >>> class Mine(Exception):
        ...     def __init__(self, path, **rest): ...
        >>> "path" in _parameters_of(type("Its", (Mine,), {}))
        True
    """
    own = [inspect.signature(base.__init__).parameters for base in cls.__mro__ if "__init__" in vars(base)]
    return {name: parameter for parameters in own for name, parameter in parameters.items()}


def _is_programs_own(owner: Any, name: str, present: Any, saved: Any) -> bool:
    """Whether an attribute has to stay as it is, instead of getting back what a backup has for it.

    Args:
        owner: whose attribute it is.
        name: of the attribute.
        present: its value, before the training goes on.
        saved: what the backup has, as `encode` returns it.
    """
    try:
        own = encode(present, {}, "")
    except (NotPlainError, RecursionError):
        if callable(present) and _kind(saved) not in _OBJECTS:
            return True
        own = {"elsewhere": True}
    if own == saved:
        return False
    assigned = _assigned_by(type(owner))
    is_received, kind = name in _parameters_of(type(owner)), _kind(own)
    texts = dict(_texts(own))
    if name in assigned and not (is_received and texts):
        return False
    if is_received and name not in assigned and kind not in (*_CONTAINERS, *_OBJECTS):
        return True
    if kind in _CONTAINERS and not texts and not is_received:
        return False
    try:
        found = list(_texts(saved))
        return any(texts.get(place) != text for place, text in found) or (() in texts and not found)
    except (TypeError, ValueError, LookupError, RecursionError):
        return True  # it is not what a backup holds


def _kind(encoded: Any) -> str | None:
    return next(iter(encoded), None) if isinstance(encoded, dict) else None


def _texts(encoded: Any, place: tuple = ()) -> Iterator[tuple[tuple, str]]:
    """All text in what `encode` has returned, except for the keys of dicts, and where it is."""
    if isinstance(encoded, str):
        yield place, encoded
    kind = _kind(encoded)
    content = encoded[kind] if kind else None
    if kind in ("path", "bytes", "bytearray"):
        yield place, content
    elif kind in _CONTAINERS:
        items = content[1] if kind in _WITH_HEAD else content
        for key, item in items if kind in (*_MAPPINGS, "defaultdict") else enumerate(items):
            yield from _texts(item, (*place, json.dumps(item if kind in ("set", "frozenset") else key)))


@functools.cache
def _assigned_by(cls: type) -> frozenset[str]:
    """The attributes that the methods of a class assign once training has begun."""
    return frozenset().union(*(_assigned_in(base, _BEFORE) for base in cls.__mro__))


@functools.cache
def kept_by_keras(cls: type) -> frozenset[str]:
    """The attributes that a class has from Keras' own classes."""
    bases = (base for base in cls.__mro__ if base.__module__.startswith("keras."))
    return frozenset().union(*(_assigned_in(base) for base in bases))


def _assigned_in(cls: type, but: Collection[str] = ()) -> frozenset[str]:
    """The attributes that the methods in a class' own body assign, except for some methods."""
    assigned: set[str] = set()
    for name, member in vars(cls).items():
        function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
        if name not in but:
            for code in _codes_of(getattr(function, "__code__", None)):
                assigned.update(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
    return frozenset(assigned)


def _codes_of(code: types.CodeType | None) -> Iterator[types.CodeType]:
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _codes_of(constant)


def encode_logs(logs: Mapping[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
    """Logs of a step or an epoch as JSON, and their arrays in `arrays`; without what cannot be saved."""
    found = {}
    for i, (name, value) in enumerate(logs.items()):
        own: dict[str, Any] = {}
        with contextlib.suppress(NotPlainError, RecursionError):
            found[name] = encode(value, own, f"logs/{i}")
            arrays.update(own)
    return found


def csv_lengths(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, int]:
    """Bytes in the file of each CSVLogger that writes on this process, by its file name."""
    loggers = [c for c in callbacks if isinstance(c, keras.callbacks.CSVLogger) and c.csv_file is not None]
    return {logger.filename: _length(logger.filename) for logger in loggers}


def resume_csv(
    callbacks: Sequence[keras.callbacks.Callback],
    saved: Mapping[str, int],
    until_begun: contextlib.ExitStack,
    is_finished: bool,
) -> None:
    """Lets the loggers append to their files, which are cut to the lengths that they had.

    The rows of epochs that are trained again must not be in a file twice.

    Args:
        callbacks: all of a fit, before their `on_train_begin`.
        saved: what `csv_lengths` returned.
        until_begun: closed after their `on_train_begin`; then the loggers are as the user made them.
        is_finished: whether the fit is finished: then later fits may have written to its files.
    """
    for logger in callbacks:
        if isinstance(logger, keras.callbacks.CSVLogger) and logger.filename in saved:
            until_begun.callback(setattr, logger, "append", logger.append)
            logger.append = True
            if not is_finished and _length(logger.filename) > saved[logger.filename]:
                os.truncate(logger.filename, saved[logger.filename])


def _length(path: str) -> int:
    """Bytes in a file; it is local, as `CSVLogger` on a remote path is refused."""
    return os.path.getsize(path) if os.path.exists(path) else 0
