"""Checks of arguments that strategies and callbacks have in common, and what is said once. Pure."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

# The value of `bucket_bytes` that lets tfdist choose.
AUTO = "auto"
_SAID = "_tfdist_said"


def check_count(name: str, value: Any) -> None:
    """Refuses what is no whole number of at least 1.

    Example:
        >>> check_count("num_microbatches", True)
        Traceback (most recent call last):
        ValueError: Received: num_microbatches=True. Expected: a whole number, at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"Received: {name}={value!r}. Expected: a whole number, at least 1.")


def check_bucket_bytes(value: Any) -> None:
    """Refuses what is no number of bytes.

    Example:
        >>> check_bucket_bytes(0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: Received: bucket_bytes=0. Expected: a positive whole number of bytes, 'auto', or None for all ...
    """
    if value not in (None, AUTO) and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
        raise ValueError(
            f"Received: bucket_bytes={value!r}. Expected: a positive whole number of bytes, 'auto', or None for all at "
            "once."
        )


def checked_shares(value: Any) -> list[float] | str | None:
    """A list of positive numbers, "auto" or `None`; refuses all else.

    Example:
        >>> checked_shares([2, 1])
        [2.0, 1.0]
        >>> checked_shares([2, 0])
        Traceback (most recent call last):
        ValueError: Received: batch_shares=[2, 0]. Expected: a list of positive numbers such as [2, 1], 'auto' or None.
    """
    if value is None or (isinstance(value, str) and value == AUTO):
        return value
    numbers = [] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    are_positive = all(isinstance(one, Real) and not isinstance(one, bool) and 0 < one < math.inf for one in numbers)
    if not (numbers and are_positive):
        raise ValueError(
            f"Received: batch_shares={value!r}. Expected: a list of positive numbers such as [2, 1], 'auto' or None."
        )
    return [float(one) for one in numbers]


def check_seconds(**values: Any) -> None:
    """Refuses what is no positive number of seconds.

    Example:
        >>> check_seconds(start_timeout="300")
        Traceback (most recent call last):
        ValueError: Received: start_timeout='300'. Expected: a positive number of seconds.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value) or value <= 0:
            raise ValueError(f"Received: {name}={value!r}. Expected: a positive number of seconds.")


def check_path(name: str, value: Any, example: str) -> None:
    """Refuses what is no path.

    Example:
        >>> check_path("log_dir", 3, "a folder, such as 'logs'")
        Traceback (most recent call last):
        ValueError: Received: log_dir=3. Expected: the path of a folder, such as 'logs'.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"Received: {name}={value!r}. Expected: the path of {example}.")


def is_new(owner: Any, what: str) -> bool:
    """Whether this is asked for the first time of an object, such as a model: a warning is given once.

    Args:
        owner: has attributes.
        what: names the warning.

    Example:
        >>> class Model: ...
        >>> model = Model()
        >>> is_new(model, "rounding"), is_new(model, "rounding"), is_new(model, "branches")
        (True, False, True)
    """
    if was_said(owner, what):
        return False
    # Past Keras, which would track an attribute.
    vars(owner).setdefault(_SAID, set()).add(what)
    return True


def was_said(owner: Any, what: str) -> bool:
    """Whether `is_new` was asked already."""
    return what in vars(owner).get(_SAID, ())
