"""Which cases of a parametrized test are part of `make test`; the others are for `make nightly`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def daily(cases: Iterable[Any], *names: str) -> list[Any]:
    """All cases, but those that are not named are marked as nightly.

    Args:
        cases: parameters: one value each, tuples of several, or what `pytest.param` makes.
        names: the ids of the cases of `make test`; without an id, what `str` makes of the first value.

    Raises:
        ValueError: a name is that of no case, or two cases have one id.

    Example:
        >>> @pytest.mark.parametrize("mode", daily(["recompute", "swap"], "swap"))
    """
    given = {}
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        parameters = case if hasattr(case, "marks") else pytest.param(*values)
        if given.setdefault(parameters.id or str(parameters.values[0]), parameters) is not parameters:
            raise ValueError(f"Received: two cases {parameters.id or parameters.values[0]!r}. Expected: ids.")
    if unknown := set(names) - set(given):
        raise ValueError(f"Received: {sorted(unknown)}. Expected: ids of cases, which are {sorted(given)}.")
    return [
        parameters if name in names else parameters._replace(marks=(*parameters.marks, pytest.mark.nightly))
        for name, parameters in given.items()
    ]
