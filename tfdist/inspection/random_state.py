"""The global random state of a process, as JSON: what data is shuffled with."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat.upstream import context


def capture() -> list:
    """The states of TensorFlow's global seed and operation seeds, and of Python's and NumPy's global generators."""
    name, keys, *rest = np.random.get_state()
    # TensorFlow has no generator of operation seeds until a global seed is set.
    operations = getattr(context.context(), "_rng", None)
    return [context.global_seed(), operations and _of(operations), _of(random), [name, keys.tolist(), *rest]]


def restore(state: list) -> None:
    """Puts this process into a state that `capture` returned (in another one)."""
    seed, operations, python, (name, keys, *rest) = state
    tf.random.set_seed(seed)
    if operations is not None:
        _into(context.context()._rng, operations)
    _into(random, python)
    np.random.set_state((name, np.asarray(keys, "uint32"), *rest))


def is_state(state: Any) -> bool:
    """Whether this is what `capture` returns, so that `restore` will take it.

    Example:
        >>> is_state(capture()), is_state([1, None, [3, [1], None], ["MT19937", [], 0, 0, 0.0]])
        (True, False)
    """
    try:
        seed, operations, python, (name, keys, *rest) = state
        for internal in filter(None, (operations, python)):
            _into(random.Random(), internal)
        np.random.RandomState().set_state((name, np.asarray(keys, "uint32"), *rest))
    except (TypeError, ValueError, LookupError, ArithmeticError):
        return False
    return python is not None and (seed is None or (type(seed) is int and -(2**63) <= seed < 2**63))


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Afterwards, Python's and NumPy's global generators have the state that they had before this context.

    Example:
        >>> random.seed(1)
        >>> with kept():
        ...     drawn = random.random()
        >>> drawn == random.random()
        True
    """
    python, numbers = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


def _of(generator: random.Random) -> list:
    version, internal, gauss = generator.getstate()
    return [version, list(internal), gauss]


def _into(generator: random.Random, state: list) -> None:
    version, internal, gauss = state
    generator.setstate((version, tuple(internal), gauss))
