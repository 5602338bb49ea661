"""Keras' CSVLogger over restarts: the rows of epochs that are trained again must not be in the file twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import keras
import tensorflow as tf

# For each file of a fit that was finished before this process: its length at the end of the fit, and its length when
# this process looked.
_ends: dict[str, tuple[int, int]] = {}


def lengths(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, int]:
    """Bytes in the file of each CSVLogger that writes on this process, by its file name."""
    loggers = [c for c in callbacks if isinstance(c, keras.callbacks.CSVLogger) and c.csv_file is not None]
    return {logger.filename: _length(logger.filename) for logger in loggers}


def rewind(
    callbacks: Sequence[keras.callbacks.Callback], saved: Mapping[str, int], until_begun: contextlib.ExitStack
) -> None:
    """Cuts the files to the lengths that they had, and lets the loggers append to them.

    Args:
        callbacks: all of a fit, before their `on_train_begin`.
        saved: what `lengths` returned.
        until_begun: closed after their `on_train_begin`; then the loggers are as the user made them.
    """
    for logger in _appending(callbacks, saved, until_begun):
        _cut(logger.filename, saved[logger.filename])


def leave_alone(
    callbacks: Sequence[keras.callbacks.Callback], saved: Mapping[str, int], until_begun: contextlib.ExitStack
) -> None:
    """Leaves the files of a finished fit as they are: later fits may have written to them. Arguments as of `rewind`."""
    for logger in _appending(callbacks, saved, until_begun):
        _ends[logger.filename] = (saved[logger.filename], _length(logger.filename))


def begin_anew(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Before a fit without a backup: removes the rows that it wrote to the file of an earlier one before it was killed.

    These rows follow those of the earlier fit, as long as this process has written nothing there.
    """
    for logger in callbacks:
        if isinstance(logger, keras.callbacks.CSVLogger) and logger.append and logger.filename in _ends:
            end, seen = _ends.pop(logger.filename)
            if _length(logger.filename) == seen:
                _cut(logger.filename, end)


def _appending(
    callbacks: Sequence[keras.callbacks.Callback], saved: Mapping[str, int], until_begun: contextlib.ExitStack
) -> Iterator[keras.callbacks.CSVLogger]:
    for logger in callbacks:
        if isinstance(logger, keras.callbacks.CSVLogger) and logger.filename in saved:
            until_begun.callback(setattr, logger, "append", logger.append)
            logger.append = True
            yield logger


def _cut(path: str, length: int) -> None:
    if _length(path) <= length:
        return
    with tf.io.gfile.GFile(path, "rb") as file:
        kept = file.read(length)
    # A copy is written first: a kill must not leave half of the user's file.
    beside = f"{path}.tfdist-rewound"
    with tf.io.gfile.GFile(beside, "wb") as file:
        file.write(kept)
    tf.io.gfile.rename(beside, path, overwrite=True)


def _length(path: str) -> int:
    return tf.io.gfile.stat(path).length if tf.io.gfile.exists(path) else 0
