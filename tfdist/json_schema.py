"""JSON that others have written, read by a schema: it may be damaged, of another version, or made by an attacker.

A schema is a type; a dict of schemas by name (`"name?"` may be missing, `...` stands for all other names); a list of
one schema, for each element; a tuple of alternatives; or a
function that says whether a value is right.
"""

from __future__ import annotations

import json
from typing import Any

# No time, and no number of anything, is as large: what is read can be computed with.
_MOST = 1e15
_SHOWN = 60
NOTHING = type(None)
"""The schema of null."""


def anything(value: Any) -> bool:
    """The schema of all that JSON has."""
    return True


def is_count(value: Any) -> bool:
    """The schema of a whole number from 0 that TensorFlow can take."""
    return type(value) is int and 0 <= value < 1 << 63


def is_time(value: Any) -> bool:
    """The schema of seconds since 1970, up to the year 5138: the calendar of the C library ends somewhere."""
    return type(value) in (int, float) and 0 <= value < 1e11


ANY_OBJECT: dict[Any, Any] = {...: anything}
"""The schema of an object with whatever is in it."""


def read_json(content: bytes | str, schema: Any) -> Any:
    """The value that a JSON text holds, if it fits a schema. Nothing in it is run.

    Raises:
        ValueError: with what is wrong with it; its text is printable.

    Example:
        >>> read_json('{"pid": 7, "parts": [1, 2]}', {"pid": int, "parts": [int], "name?": str})
        {'pid': 7, 'parts': [1, 2]}
        >>> read_json('{"pid": "7"}', {"pid": int})
        Traceback (most recent call last):
        ValueError: its pid is '7'
    """
    try:
        # Given bytes, json guesses the encoding, and imports what decodes it.
        value = json.loads(content.decode() if isinstance(content, bytes) else content)
    except (ValueError, RecursionError) as error:
        what = f"no JSON ({error})" if content.strip("\0 \n" if isinstance(content, str) else b"\0 \n") else "empty"
        raise ValueError(f"it is {what}") from None
    check(value, schema)
    return value


def check(value: Any, schema: Any, place: str = "") -> None:
    """Raises ValueError, with the place that is wrong, unless a value from JSON fits a schema."""
    if isinstance(schema, tuple):
        _check_one_of(value, schema, place)
    elif isinstance(schema, dict) and isinstance(value, dict):
        required = (name for name in schema if name is not ... and not name.endswith("?"))
        for name in required:
            if name not in value:
                raise ValueError(f"its {place}{name} is missing")
        for name, one in value.items():
            expected, shown = schema.get(name, schema.get(f"{name}?", schema.get(...))), ascii(name)[1:-1][:_SHOWN]
            if expected is None:
                raise ValueError(f"it has {place}{shown}, which this version cannot read")
            check(one, expected, f"{place}{shown}.")
    elif isinstance(schema, list) and isinstance(value, list):
        for one in value:
            check(one, schema[0], place)
    elif not _fits(value, schema):
        raise ValueError(f"{f'its {place[:-1]}' if place else 'it'} is {ascii(value)[:_SHOWN]}")


def _check_one_of(value: Any, schemas: tuple[Any, ...], place: str) -> None:
    problems = []
    for one in schemas:
        try:
            return check(value, one, place)
        except ValueError as error:
            problems.append(error)
    raise problems[0]


def _fits(value: Any, schema: Any) -> bool:
    if schema is NOTHING:
        return value is None
    if isinstance(schema, type):
        is_whole = type(value) is int and schema is float
        is_right = type(value) is schema or is_whole
        return is_right and (not isinstance(value, int | float) or abs(value) < _MOST)
    return callable(schema) and bool(schema(value))
