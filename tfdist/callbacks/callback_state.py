"""The state of the other callbacks of a fit: their plain attributes, without a word from them.

Keras' callbacks keep what they know in attributes: EarlyStopping's `wait`, `best` and `best_weights`,
ReduceLROnPlateau's `cooldown_counter`, History's `history`. Everything that is made of numbers, text, arrays of
numbers, lists, tuples, dicts, sets and deques is saved. A callback that keeps something else has `get_state()`, which
returns plain data, and `set_state(data)`.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

_NOT_STATE = ("_model", "model", "params")
# What NumPy calls booleans, numbers and complex numbers: other arrays do not come back from a checkpoint as they were.
_NUMBERS = "biufc"
_CONTAINERS = (list, tuple, dict, set, collections.deque)


def settings(callbacks: Sequence[keras.callbacks.Callback]) -> list[dict[str, str]]:
    """What the user has passed to each callback and it keeps under the same name; to be asked before training."""
    found = []
    for callback in callbacks:
        parameters = inspect.signature(type(callback).__init__).parameters
        values = {name: value for name, value in vars(callback).items() if name in parameters and _is_plain(value)}
        found.append({name: repr(value) for name, value in values.items()})
    return found


def capture(
    callbacks: Sequence[keras.callbacks.Callback], passed: Sequence[dict[str, str]], arrays: dict[str, np.ndarray]
) -> list[dict]:
    """The state of callbacks as JSON-serialisable data.

    Args:
        callbacks: in their order in the fit.
        passed: their `settings`.
        arrays: receives the arrays, under names to which the data refers.

    Returns:
        One entry for each callback.
    """
    return [
        {
            "class": type(callback).__name__,
            # What compares values is a function; it is known again from the direction that it stands for.
            "compares": getattr(callback, "monitor_op", None) is not None,
            "settings": own,
            "state": encode(_state_of(callback), arrays, f"callbacks/{i}"),
        }
        for i, (callback, own) in enumerate(zip(callbacks, passed, strict=True))
    ]


def matching(callbacks: Sequence[keras.callbacks.Callback], entries: Sequence[dict], exactly: bool) -> list[dict]:
    """The saved entries of these callbacks.

    Args:
        callbacks: those of this fit.
        entries: what `capture` returned.
        exactly: whether there have to be no others; on other processes than the chief some may be missing.

    Raises:
        ValueError: if these are not the callbacks whose state was saved.
    """
    now, then = [type(c).__name__ for c in callbacks], [entry["class"] for entry in entries]
    rest = iter(entries)
    found = [entry for name in now if (entry := next((e for e in rest if e["class"] == name), None)) is not None]
    if len(found) != len(now) or (exactly and now != then):
        raise ValueError(
            f"The backup is of a fit with other callbacks. Received: {now}. Expected, as saved: {then}. Pass the same "
            "callbacks in the same order, or another backup_dir to begin anew."
        )
    return found


def restore(
    callbacks: Sequence[keras.callbacks.Callback],
    passed: Sequence[dict[str, str]],
    entries: Sequence[dict],
    arrays: dict[str, np.ndarray],
) -> None:
    """Gives callbacks the state that `capture` returned, except for settings that the user has changed since."""
    for callback, own, entry in zip(callbacks, passed, entries, strict=True):
        state = decode(entry["state"], arrays)
        if hasattr(callback, "set_state"):
            callback.set_state(state)
            continue
        if entry["compares"] and getattr(callback, "monitor_op", True) is None:
            # Done lazily by Keras, and it flips the sign of min_delta, which has been flipped in the saved state.
            callback._set_monitor_op()
        for name, value in state.items():
            if own.get(name) == entry["settings"].get(name):
                _set(callback, name, value)


def _set(callback: keras.callbacks.Callback, name: str, value: Any) -> None:
    """Sets an attribute; a container stays the object that it is, which the user's code may hold, too."""
    present = getattr(callback, name, None)
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


def _state_of(callback: keras.callbacks.Callback) -> Any:
    if hasattr(callback, "get_state"):
        return callback.get_state()
    parameters = inspect.signature(type(callback).__init__).parameters
    return {
        name: value
        for name, value in vars(callback).items()
        # Arrays that the user has passed (validation data, say) are there again in the next process.
        if name not in _NOT_STATE and _is_plain(value) and not (isinstance(value, np.ndarray) and name in parameters)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in _NUMBERS
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and _is_plain(item) for key, item in value.items())
    if isinstance(value, tuple):
        return type(value) is tuple and all(_is_plain(item) for item in value)
    if isinstance(value, _CONTAINERS):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def encode(value: Any, arrays: dict[str, np.ndarray], prefix: str) -> Any:
    """Plain data as JSON, and its arrays in `arrays`, under names that begin with `prefix`."""
    if isinstance(value, (np.ndarray, np.generic)):
        name = f"{prefix}/{len(arrays)}"
        arrays[name] = np.array(value)
        return {"array": name, "scalar": isinstance(value, np.generic)}
    if isinstance(value, dict):
        return {"dict": [[key, encode(item, arrays, prefix)] for key, item in value.items()]}
    for kind in _CONTAINERS:
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, arrays, prefix) for item in value]}
    if isinstance(value, float):
        return {"float": float(value).hex()}  # exact, and JSON has no infinity
    return value


def decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """What `encode` was given; containers of the user's own types are plain ones."""
    if not isinstance(value, dict):
        return value
    if "array" in value:
        array = arrays[value["array"]]
        return array[()] if value["scalar"] else array.copy()
    if "float" in value:
        return float.fromhex(value["float"])
    if "dict" in value:
        return {key: decode(item, arrays) for key, item in value["dict"]}
    ((name, items),) = value.items()
    kind = next(kind for kind in _CONTAINERS if kind.__name__ == name)
    return kind(decode(item, arrays) for item in items)
