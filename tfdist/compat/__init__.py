"""The only place where tfdist changes private functions of TensorFlow and Keras. Of tfdist it imports storage alone."""

from __future__ import annotations

from tfdist.compat.hooks import KerasHooks, use_without_strategy


def install(without_strategy: KerasHooks) -> None:
    """Installs every patch, once; never at import.

    Args:
        without_strategy: what is asked for models that have no tfdist strategy.

    Raises:
        RuntimeError: if Keras does not compute with TensorFlow.
    """
    import keras

    if (backend := keras.backend.backend()) != "tensorflow":
        raise RuntimeError(
            f"Received: Keras with the backend {backend!r}. Expected: 'tensorflow', which it is without KERAS_BACKEND."
        )
    use_without_strategy(without_strategy)
    for patch in patches():
        patch.install()


def patches() -> list:
    """All patches, in the order in which they are installed."""
    # Keras is imported with them.
    from tfdist.compat import (
        deferred_captures,
        keras_files,
        keras_sharded_slots,
        keras_state,
        keras_steps,
        keras_trainer,
    )

    modules = [deferred_captures, keras_steps, keras_trainer, keras_state, keras_sharded_slots, keras_files]
    return [patch for module in modules for patch in module.PATCHES]
