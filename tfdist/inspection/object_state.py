"""The state of objects that a new process makes anew: variables, metrics, random number generators, and their like."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.inspection.replica_values import is_kept_per_replica, parts_of_variable

# Passed in place of the object that this process has: there are none since only data are read (those of a
# `get_state()`), or this one is missing.
NO_OBJECTS = object()
MISSING = object()


class NotRestoredError(ValueError):
    """A state cannot be put back: this process has no object like the one that it was taken from."""


class ObjectError(Exception):
    """What an object of the user's has raised, which is its cause."""


_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def take(value: Any, encode: Callable[[Any], Any], put: Callable[[Any], str]) -> dict | None:
    """The state of a variable, a metric, a random number generator, or anything with `get_state` and `set_state`.

    Args:
        value: the object.
        encode: makes JSON of plain data.
        put: keeps an array, and returns its name.

    Returns:
        The state as JSON; `None` for other objects.
    """
    if (variables := _variables_of(value)) is not None:
        if any(is_kept_per_replica(variable) for variable in variables):
            return None  # reading it is a collective, and only one process writes backups
        names = [put(np.array(parts_of_variable(variable)[0].read_value())) for variable in variables]
        return {"variable": names[0]} if isinstance(value, _VARIABLES) else {"variables": names}
    if isinstance(value, np.random.Generator):
        return {"generator": [type(value.bit_generator).__name__, encode(value.bit_generator.state)]}
    if isinstance(value, random.SystemRandom):
        return {"elsewhere": True}  # it has no state
    if isinstance(value, random.Random):
        return {"random": encode(value.getstate())}
    if hasattr(value, "get_state") and hasattr(value, "set_state") and not isinstance(value, type):
        return {"state": encode(value.get_state())}
    return None


_VARIABLES = (tf.Variable, keras.Variable)


def _variables_of(value: Any) -> list[Any] | None:
    if isinstance(value, _VARIABLES):
        return [value]
    if isinstance(value, keras.Metric):
        return list(value.variables)
    if isinstance(value, (keras.random.SeedGenerator, tf.random.Generator)):
        return [value.state]
    return None


def put_back(
    kind: str, state: Any, present: Any, decode: Callable[[Any], Any], arrays: Mapping[str, np.ndarray]
) -> Any:
    """Puts a state that `take` has returned as `{kind: state}` into the object of this process, and returns the object.

    Raises:
        NotRestoredError: if there is no such object, and none can be made.
    """
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
    if present is NO_OBJECTS and kind == "variable":
        return np.array(arrays[state])
    if present is not NO_OBJECTS and present is not MISSING:
        if kind == "elsewhere":
            return present
        if kind == "state" and hasattr(present, "set_state"):
            state = decode(state)
            try:
                present.set_state(state)
            except Exception as error:
                raise ObjectError from error
            return present
        names = [state] if kind == "variable" else state
        variables = _variables_of(present)
        if kind != "state" and variables is not None and len(variables) == len(names):
            for variable, name in zip(variables, names, strict=True):
                for part in parts_of_variable(variable):
                    part.assign(tf.constant(arrays[name], part.dtype))
            return present
    raise NotRestoredError("this process has no such object in its place")
