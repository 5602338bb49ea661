"""Keras' CSVLogger over restarts: rows of epochs that are trained again must not stand in the file twice."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import keras
import tensorflow as tf


def lengths(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, int]:
    """Bytes in the file of each CSVLogger that writes on this process, by its file name."""
    loggers = [c for c in callbacks if isinstance(c, keras.callbacks.CSVLogger) and c.csv_file is not None]
    return {logger.filename: tf.io.gfile.stat(logger.filename).length for logger in loggers}


def rewind(
    callbacks: Sequence[keras.callbacks.Callback], saved: dict[str, int], until_begun: contextlib.ExitStack
) -> None:
    """Cuts the files to the lengths that they had, and lets the loggers append to them.

    Args:
        callbacks: all of a fit, before their `on_train_begin`.
        saved: what `lengths` returned.
        until_begun: closed after their `on_train_begin`; then the loggers are as the user made them.
    """
    for logger in callbacks:
        if not isinstance(logger, keras.callbacks.CSVLogger) or logger.filename not in saved:
            continue
        until_begun.callback(setattr, logger, "append", logger.append)
        logger.append = True
        if not tf.io.gfile.exists(logger.filename):
            continue
        with tf.io.gfile.GFile(logger.filename, "rb") as file:
            content = file.read()
        kept = content[: saved[logger.filename]]
        if len(kept) < len(content):
            # Beside it first: a kill must not leave half of the user's file.
            beside = f"{logger.filename}.tfdist-rewound"
            with tf.io.gfile.GFile(beside, "wb") as file:
                file.write(kept)
            tf.io.gfile.rename(beside, logger.filename, overwrite=True)
