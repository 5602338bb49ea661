"""The state of the other callbacks of a fit, taken from their attributes.

Keras' callbacks keep what they know in attributes: EarlyStopping's `wait`, `best` and `best_weights`,
ReduceLROnPlateau's `cooldown_counter`, History's `history`. Everything that `plain_data` can express is saved. A
callback that keeps something else has `get_state()`, which returns plain data, and `set_state(data)`.
"""

from __future__ import annotations

import collections
import functools
import inspect
import io
import json
import logging
import threading
import types
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoint.plain_data import NotPlainError, decode, encode
from tfdist.inspection.object_state import NotRestoredError

_NOT_STATE = ("_model", "model", "params")
# Values of these types are the same in every process, or no backup could bring them back.
_STATELESS = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type, np.ufunc),
    *(functools.partial, logging.Logger, io.IOBase, type(threading.Lock()), type(threading.RLock())),
    *(tf.types.experimental.PolymorphicFunction, tf.summary.SummaryWriter, tf.data.Dataset, tf.distribute.Strategy),
)


def settings(callbacks: Sequence[keras.callbacks.Callback]) -> list[dict[str, str]]:
    """The arguments of each callback that it keeps under their names, as they are before the training."""
    found = []
    for callback in callbacks:
        parameters = _parameters_of(callback)
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
) -> list[dict]:
    """The state of callbacks as JSON-serialisable data.

    Args:
        callbacks: in their order in the fit.
        passed: their `settings`.
        arrays: receives the arrays, under the names that the data has for them.
        elsewhere: ids of the objects whose state is saved elsewhere.

    Returns:
        One entry for each callback.

    Raises:
        NotPlainError: if a callback's `get_state()` returns what cannot be saved.
    """
    elsewhere = {*elsewhere, *map(id, callbacks)}
    entries = []
    for i, (callback, own) in enumerate(zip(callbacks, passed, strict=True)):
        state, unsaved = _state_of(callback, arrays, f"callbacks/{i}", elsewhere)
        entries.append(
            {
                "class": type(callback).__name__,
                # The function that compares values cannot be saved; Keras chooses it anew.
                "compares": getattr(callback, "monitor_op", None) is not None,
                "settings": own,
                "state": state,
                "unsaved": unsaved,
            }
        )
    return entries


def _state_of(
    callback: keras.callbacks.Callback, arrays: dict[str, Any], prefix: str, elsewhere: Collection[int]
) -> tuple[dict, list[str]]:
    """A callback's state, and the names of the attributes that cannot be saved."""
    if hasattr(callback, "get_state"):
        try:
            return encode(callback.get_state(), arrays, prefix, elsewhere), []
        except NotPlainError as error:
            raise NotPlainError(
                f"{type(callback).__name__}.get_state() returned what cannot be saved. {error}"
            ) from None
    parameters = _parameters_of(callback)
    pairs, unsaved = [], []
    for name, value in vars(callback).items():
        # Arrays that the user has passed (validation data, say) are there again in the next process.
        if name in _NOT_STATE or id(value) in elsewhere or (name in parameters and _holds_arrays(value)):
            continue
        own: dict[str, Any] = {}
        try:
            pairs.append([name, encode(value, own, f"{prefix}/{name}", elsewhere)])
        except (NotPlainError, RecursionError):
            if not isinstance(value, _STATELESS) and name not in parameters:
                unsaved.append(name)
        else:
            arrays.update(own)
    # What else Keras' own callbacks keep is no state.
    return {"dict": pairs}, [] if type(callback).__module__.startswith("keras.") else unsaved


def _parameters_of(callback: keras.callbacks.Callback) -> Mapping[str, Any]:
    return inspect.signature(type(callback).__init__).parameters


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_arrays, value.values()))
    return isinstance(value, np.ndarray) or (isinstance(value, (list, tuple)) and any(map(_holds_arrays, value)))


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
        if hasattr(callback, "set_state"):
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
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and not pair[0].startswith("__")
    ]


def _set(callback: keras.callbacks.Callback, name: str, present: Any, value: Any) -> None:
    """Sets an attribute. A container is changed in place, since the user's code may refer to it."""
    if value is present:
        return
    if isinstance(present, list) and isinstance(value, list):
        present[:] = value
    elif isinstance(present, (dict, set)) and isinstance(value, (dict, set)):
        present.clear()
        present.update(value)
    elif isinstance(present, collections.deque) and isinstance(value, collections.deque):
        present.clear()
        present.extend(value)
    else:
        setattr(callback, name, value)
