"""SIGTERM means what Python's program says, not TensorFlow's coordination service."""

from __future__ import annotations

import signal
import threading


def heed_sigterm() -> None:
    """Puts Python's handler of SIGTERM back.

    TensorFlow's preemption notifier, which comes with a multi-worker strategy, swallows the signal: a job could only be
    killed. It begins in a thread of its own, at some time after the strategy was made, so this is called again later.
    """
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
