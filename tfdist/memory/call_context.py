"""What Keras tells the layers inside of a call besides their arguments, kept for a call that comes later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from keras.src.backend.common import global_state
from keras.src.layers.layer import CallContext

_ATTRIBUTE = "current_call_ctx"


def context_values() -> dict[str, Any]:
    """What the call in which this is called tells its layers: whether they train, say.

    Example:
        >>> context_values()
        {}
    """
    context = global_state.get_global_attribute(_ATTRIBUTE)
    return {key: value for key, value in vars(context).items() if key != "entry_layer"} if context else {}


@contextlib.contextmanager
def call_context(values: Mapping[str, Any]) -> Iterator[None]:
    """Tells layers the same again, and leaves alone what the model has collected in its own call."""
    previous = global_state.get_global_attribute(_ATTRIBUTE)
    # It belongs to no layer, so that none ends it.
    context = CallContext(entry_layer=None)
    for key, value in values.items():
        context.set_value(key, value)
    global_state.set_global_attribute(_ATTRIBUTE, context)
    try:
        yield
    finally:
        global_state.set_global_attribute(_ATTRIBUTE, previous)
