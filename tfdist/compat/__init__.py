"""The only place where tfdist changes functions of TensorFlow and Keras; it imports storage and cluster alone."""

from __future__ import annotations

from typing import Any

from tfdist.compat.preparation import prepare_in_turn


def install(without_strategy: Any, in_step: Any) -> None:
    """Installs every patch, once; never at import.

    Args:
        without_strategy: `StrategyHooks` that are asked for models that have no tfdist strategy.
        in_step: a module of functions for what stands in a step.

    Raises:
        RuntimeError: if Keras does not compute with TensorFlow.
    """
    import keras

    if (backend := keras.backend.backend()) != "tensorflow":
        raise RuntimeError(
            f"Received: Keras with the backend {backend!r}. Expected: 'tensorflow', which it is without KERAS_BACKEND."
        )
    from tfdist.compat.keras import use

    use(without_strategy, in_step)
    for patch in patches():
        patch.install()
    prepare_in_turn()


def patches() -> list:
    """All patches, in the order in which they are installed."""
    # Keras is imported with them.
    from tfdist.compat import cache_files, deferred_captures, keras, keras_files, scopes

    modules = [deferred_captures, keras, keras_files, scopes, cache_files]
    return [patch for module in modules for patch in module.PATCHES]
