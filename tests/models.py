"""What tests do with models again and again: compile them, make them in a scope, compare arrays, see warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


def ready(model: Any, *arguments: Any, **options: Any) -> Any:
    """The model, compiled."""
    model.compile(*arguments, **options)
    return model


def in_scope(strategy: Any, make: Callable[[], Any]) -> Any:
    """What a function makes in a strategy's scope."""
    with strategy.scope():
        return make()


def assert_arrays(found: Iterable[Any], expected: Iterable[Any], tolerance: float = 0.0) -> None:
    """Asserts that as many arrays are equal, or differ by `tolerance` at most."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def warned(call: Callable[[], Any], words: str) -> list[str]:
    """The warnings of a call that have these words."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in found if words in str(one.message)]
