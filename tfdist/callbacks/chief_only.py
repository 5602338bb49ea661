"""`tfdist.callbacks.on_chief`: what reports a training, once for all of its processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras

from tfdist.runtime.chief import ChiefOnly
from tfdist.strategies.hooks import install


def on_chief(
    callback: keras.callbacks.Callback | Callable[[], keras.callbacks.Callback | Sequence[keras.callbacks.Callback]],
) -> keras.callbacks.Callback:
    """Runs a callback on the chief only, so that a training of several processes is logged once.

    All processes pass it to `fit`, `evaluate` or `predict`. On the chief (`strategy.is_chief`) the callback then runs
    as if it had been passed itself, and `BackupAndRestore` saves its state; elsewhere nothing runs. In a single
    process, and without a strategy, it always runs.

    The logs at the end of an epoch are those of all processes; within an epoch, of the chief's rows. The callback may
    set `model.stop_training`: all processes stop. It must not change the model or its optimizer, and not call `fit`,
    `evaluate` or `predict`, for which all processes are needed: the others wait for the chief elsewhere, and all end
    with an error that says so. `ModelCheckpoint`, `CSVLogger` and `TensorBoard` need no `on_chief`.

    Args:
        callback: a callback of Keras; or a function without arguments, a class for example, that makes one or a list of
            them. It is called on the chief only, when the first fit begins, so that what it does before (`wandb.init`,
            say) is done once, too.

    Raises:
        ValueError: for anything else, and for callbacks that change the training and have to do so everywhere
            (`EarlyStopping`, learning rates, backups); for what a function has made when the fit begins.

    Example:
        >>> import keras, tfdist
        >>> class Printer(keras.callbacks.Callback):
        ...     def on_epoch_end(self, epoch, logs=None):
        ...         print("epoch", epoch, "is over")
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> import numpy as np
        >>> callbacks = [tfdist.callbacks.on_chief(Printer)]
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=callbacks, verbose=0)
        epoch 0 is over
    """
    install()
    return ChiefOnly(callback)
