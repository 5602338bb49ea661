"""Programs of a cluster with parameter servers: many sections in one, because TensorFlow takes seconds to start."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from tests.cluster.attempt import attempt, found_on


def run_sections(sections: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """In the chief: what each section returns, or how it fails, by name."""
    return {name: attempt(name, section) for name, section in sections.items()}


def part(sections: Collection[Callable[[], Any]], wanted: Collection[str]) -> dict[str, Any]:
    """Runs those of some functions whose names are wanted."""
    named = {section.__name__: section for section in sections}
    return run_sections({name: named[name] for name in wanted})


def found(results: dict[str, Any], name: str) -> Any:
    """In the test: what a section returned; fails with its traceback if it returned nothing."""
    return found_on([results], 0, name)


def largest(first: Any, second: Any) -> float:
    """The largest absolute difference of two lists of arrays; infinite if their shapes differ."""
    a, b = [np.asarray(x, "float64") for x in first], [np.asarray(x, "float64") for x in second]
    if [x.shape for x in a] != [x.shape for x in b]:
        return float("inf")
    return max((float(np.abs(x - y).max(initial=0.0)) for x, y in zip(a, b, strict=True)), default=float("inf"))
