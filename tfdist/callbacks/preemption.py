"""The signal that says: this machine is taken away soon."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import keras


class PreemptionSignal:
    """Notes a signal that arrives while `fit` runs, instead of letting it end the process.

    Outside of `fit` (an exception ended it, say) the signal does what it did before.

    Args:
        number: the signal; `None` notes nothing.
        model: the model whose `fit` it is.

    Attributes:
        received: whether it came.
    """

    def __init__(self, number: signal.Signals | None, model: keras.Model):
        self._number = number
        self._model = model
        self._previous: object = None
        self._installed = False
        self.received = False

    @property
    def name(self) -> str:
        """Name of the signal."""
        return "no signal" if self._number is None else self._number.name

    def install(self) -> None:
        """Begins to listen. Only Python's main thread may; in another one nothing is noted.

        It comes after the strategy, because TensorFlow installs a handler of its own, which swallows SIGTERM.
        """
        if self._number is None or threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.signal(self._number, self._receive)
        self._installed = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if _in_fit_of(self._model, frame):
            self.received = True
            return
        self.uninstall()
        os.kill(os.getpid(), number)

    def uninstall(self) -> None:
        """Puts the previous handler back."""
        if self._installed:
            self._installed = False
            # None: installed by something other than Python; TensorFlow's would swallow the signal.
            signal.signal(self._number, signal.SIG_DFL if self._previous is None else self._previous)


def _in_fit_of(model: keras.Model, frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False
