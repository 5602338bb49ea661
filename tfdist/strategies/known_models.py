"""Which models were checked and built as they are: `train_on_batch` would look at all attributes of all layers again.

What is compiled for a model does not become another before `compile` is called, which throws it away.
"""

from __future__ import annotations

import weakref
from typing import Any

# Weak on both sides: the functions of a model hold it.
_known: weakref.WeakKeyDictionary[Any, tuple] = weakref.WeakKeyDictionary()


def is_known(model: Any) -> bool:
    """Whether a model has the functions of steps, and the optimizer, that `note` was told of."""
    noted = _known.get(model)
    return noted is not None and all(
        (reference is not None and reference() is part) or reference is part is None
        for reference, part in zip(noted, _parts(model), strict=True)
    )


def note(model: Any) -> None:
    """Notes a model that was checked and built; one that has compiled nothing yet is looked at once more."""
    parts = _parts(model)
    if parts[:2] != (None, None):
        _known[model] = tuple(None if part is None else weakref.ref(part) for part in parts)


def _parts(model: Any) -> tuple:
    return model.train_function, model.test_function, model.optimizer
