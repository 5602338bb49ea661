"""The only place where tfdist changes private functions of TensorFlow and Keras."""

from __future__ import annotations


def install() -> None:
    """Installs every patch, once; called when the first tfdist strategy is built, never at import."""
    for patch in patches():
        patch.install()


def patches() -> list:
    """All patches, in the order in which they are installed."""
    from tfdist.compat import (
        deferred_captures,
        keras_callbacks,
        keras_elastic,
        keras_losses,
        keras_metrics,
        keras_optimizers,
        keras_saving,
        keras_seeds,
        keras_sharded_slots,
        keras_trainer,
        keras_variables,
    )

    modules = [
        deferred_captures,
        keras_losses,
        keras_metrics,
        keras_optimizers,
        keras_trainer,
        keras_callbacks,
        keras_elastic,
        keras_saving,
        keras_seeds,
        keras_variables,
        keras_sharded_slots,
    ]
    return [patch for module in modules for patch in module.PATCHES]
