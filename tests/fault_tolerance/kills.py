"""How a training process ends itself, as `kill -9` or a preemption would, at a chosen point."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import keras

from tfdist.checkpoint import store

_WRITING = {"tensors": (store, "save_tensors"), "manifest": (os, "replace")}


class Kill(keras.callbacks.Callback):
    """Sends this process a signal.

    Args:
        when: name of the callback method, such as "on_train_batch_begin"; "after the save" for the end of an epoch
            once the backup has been asked for.
        number: at which call of that method in this process.
        signal_number: which signal; `None` raises RuntimeError instead.
    """

    def __init__(self, when: str, number: float, signal_number: int | None = signal.SIGKILL) -> None:
        super().__init__()
        self._signal = signal_number
        calls = itertools.count(1)

        def method(*args: Any, **kwargs: Any) -> None:
            if next(calls) == number:
                self.send()

        setattr(self, "on_epoch_end" if when == "after the save" else when, method)
        # Where the backup puts what has to see what it has done.
        self.comes_last = when == "after the save"

    def send(self) -> None:
        """Ends the process, or asks it to end."""
        if self._signal is None:
            raise RuntimeError("the end of this fit")
        os.kill(os.getpid(), self._signal)

    def get_state(self) -> dict[str, Any]:
        """Nothing: a process that goes on does not die where the one before did."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing."""


def while_writing(stage: str, number: int) -> None:
    """Lets this process be killed while it writes a backup.

    Args:
        stage: "tensors" (half of them are written) or "manifest" (all but the name of the last file is there).
        number: which backup of this process.
    """
    module, name = _WRITING[stage]
    original = getattr(module, name)
    calls = itertools.count(1)

    def killed(*args: Any) -> None:
        if next(calls) < number:
            original(*args)
            return
        if stage == "tensors":
            original(*args)
            data = f"{args[0]}.data-00000-of-00001"
            os.truncate(data, os.path.getsize(data) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, killed)
