"""The end of a process that serves: not before its chief's, and then for certain; and of one that is refused."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

# For what the program has registered to be done at its exit: a server must not outlive its job because of it.
_EXIT_SECONDS = 1.5


def say(text: str) -> None:
    """Writes a line to standard error, past Python's own buffers; nothing happens when nobody reads it.

    Example:
        >>> say("worker 1 serves worker 0")
    """
    with contextlib.suppress(OSError):
        os.write(2, f"tfdist: {text}\n".encode())


def ignore_signals(reason: str) -> None:
    """Answers signals that ask for an end with a line on standard error only.

    Args:
        reason: why, for that line.

    Example:
        >>> ignore_signals("worker 1 serves until worker 0 has ended")
    """
    if threading.current_thread() is not threading.main_thread():
        return  # Python lets no other thread change that

    def refuse(number: int, frame: FrameType | None) -> None:
        say(f"{signal.Signals(number).name} received: {reason}")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # Schedulers announce a preemption by the latter ones; what the program does with them is its own affair.
        if number in (signal.SIGTERM, signal.SIGINT) or signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, refuse)


def heed_signals() -> None:
    """Obeys the signals that ask for an end again.

    Example:
        >>> heed_signals()
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end(code: int = 0) -> NoReturn:
    """Ends the process as if the program had come to its end; the threads of TensorFlow's server do not count.

    Args:
        code: its exit code.

    Example:
        >>> end()
    """
    guard = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
    guard.daemon = True
    guard.start()
    atexit._run_exitfuncs()  # ends processes of multiprocessing, too
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
