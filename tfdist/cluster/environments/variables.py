"""Reading numbers from the environment."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.errors import ClusterError


def number(env: Mapping[str, str], name: str) -> int:
    """The whole number that a variable has.

    Raises:
        ClusterError: if it has none.

    Example:
        >>> number({"RANK": "3"}, "RANK")
        3
    """
    value = optional_number(env, name)
    if value is None:
        raise ClusterError(f"{name} is not set; expected a whole number")
    return value


def optional_number(env: Mapping[str, str], name: str) -> int | None:
    """The same; `None` if the variable is not set, or empty.

    Raises:
        ClusterError: if it is no whole number.

    Example:
        >>> optional_number({}, "RANK")
    """
    text = env.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ClusterError(f"{name} is {text!r}; expected a whole number") from None
