"""Keras' files and callbacks in a job of several processes: the chief writes, and all processes stop together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdist.optimizers.sharded_optimizer import collect_slots
from tfdist.runtime.callback_order import is_on_every_process, is_the_chiefs
from tfdist.runtime.common_stop import CommonStop
from tfdist.strategies.keras_hooks import DataParallelHooks

# These do other things, too; only what writes is silenced.
_SAVERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


class JobHooks(DataParallelHooks):
    """Models of a strategy that may be one of several processes."""

    def save(self, model: Any, path: Any, with_optimizer: bool, write: Callable[[], Any]) -> Any:
        files = self._strategy._chief_io
        if files is None:
            return write()
        if with_optimizer:
            collect_slots(model)
        return files.save(path, write)

    def _arrange(self, callback_list: Any, callbacks: list, model: Any) -> list:
        """Leaves out what only the chief needs, and adds what makes the processes begin and stop together."""
        if self._strategy._chief_io is None:
            return callbacks
        restore = contextlib.ExitStack()
        is_chief = self._strategy.is_chief
        if not is_chief:
            callbacks = [callback for callback in callbacks if not is_the_chiefs(callback)]
        for callback in callbacks:
            for name, value in _changes(callback, is_chief).items():
                restore.callback(setattr, callback, name, getattr(callback, name, None))
                setattr(callback, name, value)
        together = Together(restore, list(filter(is_on_every_process, callbacks)))
        return [*callbacks, CommonStop(callback_list, callbacks), together]

    def arrange_callbacks(self, callback_list: Any, model: Any) -> None:
        # Keras may give one list its model twice.
        if not any(isinstance(callback, Together) for callback in callback_list.callbacks):
            super().arrange_callbacks(callback_list, model)


class Together(keras.callbacks.Callback):
    """Comes last on every process: all begin at the same point, and find all files written when `fit` returns.

    Args:
        restore: undoes what was changed on the other callbacks for the time of the fit.
        helpers: callbacks that need the other processes to have them, too; they are told whether these do.
    """

    comes_last = True

    def __init__(self, restore: contextlib.ExitStack, helpers: Sequence[Any] = ()):
        super().__init__()
        self._restore = restore
        self._helpers = helpers

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Raises ValueError on every process if callbacks have restored different states."""
        peers, optimizer = self.model.distribute_strategy._peers, self.model.optimizer
        steps = int(optimizer.iterations.numpy()) if optimizer is not None else 0
        own = {"epoch": self.model._initial_epoch or 0, "optimizer step": steps}
        helpers = [type(callback).__name__ for callback in self._helpers]
        told = peers.gather("begin", [own, helpers], "begin to train")
        everyone = [state for state, _ in told]
        for callback in self._helpers:
            callback._joined(all(theirs == helpers for _, theirs in told))
        if any(state != own for state in everyone):
            listing = "; ".join(f"{name}: {state}" for name, state in zip(peers.names, everyone, strict=True))
            raise ValueError(
                f"The processes would begin to train at different points. Received: {listing}. Expected: the same on "
                "all. A backup folder or a checkpoint must be on a file system that all of them share."
            )

    def on_train_end(self, logs: dict | None = None) -> None:
        self.model.distribute_strategy._chief_io.catch_up("finish its callbacks at the end of fit")
        self._restore.close()


def _changes(callback: keras.callbacks.Callback, is_chief: bool) -> dict[str, Any]:
    """The attributes that a callback gets for a fit on several processes."""
    if isinstance(callback, _SAVERS):
        save = functools.partial(_save_together, callback, is_chief)
        return {"_save_model": save} if is_chief else {"_save_model": save, "delete_checkpoint": False}
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        # Until the end of an epoch each process sees its own loss, and nobody waits there for one that stops alone.
        # The class's own: what an interrupted fit has left is no method of it.
        stop = type(callback).on_batch_end.__get__(callback)
        return {"on_batch_end": _do_nothing, "on_epoch_end": stop}
    return {}


def _save_together(callback: keras.callbacks.Callback, is_chief: bool, *args: Any, **kwargs: Any) -> None:
    """In place of `_save_model`, which is called on all processes after the same step.

    Whether the chief saves then, and under which name, may depend on what only its own batches tell.
    """
    collect_slots(callback.model)
    if is_chief:
        type(callback)._save_model(callback, *args, **kwargs)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces methods of callbacks that must not run on this process."""
