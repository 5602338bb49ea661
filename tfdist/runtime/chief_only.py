"""The place of a callback that runs on the chief alone, until a fit begins and it is known which process that is.

Before the callbacks of a fit are arranged it is replaced: on the chief by the callbacks that it stands for, which are
then callbacks like all others (they see the model, are part of a backup, may stop the fit), elsewhere by nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfdist.compat.upstream import is_default
from tfdist.runtime.callback_order import Arranged, is_on_every_process
from tfdist.runtime.job import joined

# Not every release of Keras has them all.
_CHANGE_THE_TRAINING = tuple(
    getattr(keras.callbacks, name)
    for name in (
        *("BackupAndRestore", "EarlyStopping", "LearningRateScheduler", "ReduceLROnPlateau"),
        *("SwapEMAWeights", "TerminateOnNaN"),
    )
    if hasattr(keras.callbacks, name)
)
_EXPECTED = "Expected: a callback of Keras, or a function without arguments that returns one or a list of them"


class ChiefOnly(Arranged):
    """What `tfdist.callbacks.on_chief` returns.

    Args:
        given: a callback, or what makes one or a list of them.

    Raises:
        ValueError: if it is neither, or a callback that has to run on all processes.
    """

    def __init__(self, given: Any):
        super().__init__()
        self._made: list[keras.callbacks.Callback] | None = None
        if isinstance(given, keras.callbacks.Callback):
            self._made = [_checked(given)]
        elif not callable(given) or not _takes_no_arguments(given):
            raise ValueError(f"Received: on_chief({given!r}). {_EXPECTED}, such as on_chief(lambda: MyLogger(1)).")
        self._make = given

    def made(self) -> list[keras.callbacks.Callback]:
        """The callbacks, which are made when this is called for the first time."""
        if self._made is None:
            made = self._make()
            if not (isinstance(made, (list, tuple)) and all(isinstance(one, keras.callbacks.Callback) for one in made)):
                made = [made]
            self._made = [_checked(one) for one in made]
        return self._made


def replaced(callback_list: Any, callbacks: list, strategy: Any) -> list:
    """The callbacks of a fit, with what is the chief's on the chief only.

    Args:
        callback_list: Keras' list.
        callbacks: those in it.
        strategy: that of the model.
    """
    if not any(isinstance(callback, ChiefOnly) for callback in callbacks):
        return callbacks
    is_chief, found = _is_chief(strategy), []
    for callback in callbacks:
        if not isinstance(callback, ChiefOnly):
            found.append(callback)
        elif is_chief:
            found += callback.made()
            _call_in_turn(callback_list, callback.made())
    return found


def _is_chief(strategy: Any) -> bool:
    """Whether this process reports for all; without a strategy of tfdist, it may still be one of several."""
    job = joined()
    return getattr(strategy, "is_chief", job is None or job.peers.rank == 0)


def _call_in_turn(callback_list: Any, callbacks: list) -> None:
    """What Keras does with the callbacks that it has known from the start: it calls batch hooks in its own thread."""
    for kind, hooks in (
        ("train", ("on_train_batch_end", "on_batch_end")),
        ("test", ("on_test_batch_end",)),
        ("predict", ("on_predict_batch_end",)),
    ):
        for callback in callbacks:
            if not getattr(callback, "async_safe", False) and not all(is_default(getattr(callback, h)) for h in hooks):
                setattr(callback_list, f"_async_{kind}", False)


def _checked(callback: Any) -> keras.callbacks.Callback:
    name = type(callback).__name__
    if not isinstance(callback, keras.callbacks.Callback):
        raise ValueError(f"Received: a function for on_chief that returned {callback!r}. {_EXPECTED}.")
    if isinstance(callback, (*_CHANGE_THE_TRAINING, Arranged)) or is_on_every_process(callback):
        raise ValueError(
            f"Received: on_chief({name}). Expected: a callback that only reports, such as a logger. {name} changes the "
            f"training, or needs all processes, so that these would part: pass it to fit as it is, on every process."
        )
    return callback


def _takes_no_arguments(function: Callable) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # some built-in classes do not tell
        return True
    return True
