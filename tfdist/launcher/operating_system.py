"""What the launcher asks of the operating system: new sessions, children that die with it, orphans, and signals."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK = 0.05
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def spawn(
    command: Sequence[str],
    output: int,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    before_exec: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a program in a session of its own, away from this process' terminal.

    Args:
        command: argument vector.
        output: file descriptor for its standard output and error, or `subprocess.DEVNULL`.
        env: its whole environment; None = this process' own.
        pass_fds: file descriptors that it inherits.
        before_exec: runs between fork and exec; not where this process has several threads.

    Raises:
        OSError: the command cannot be run.

    Example:
        >>> spawn(["true"], subprocess.DEVNULL).wait()
        0
    """
    return subprocess.Popen(
        command,
        env=None if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=pass_fds,
        preexec_fn=before_exec,
    )


def end_within(seconds: float, process: subprocess.Popen[bytes]) -> None:
    """Waits so long for the end of a process, and then kills it. In state D it is left: a disk does not answer.

    Example:
        >>> end_within(1.0, spawn(["true"], subprocess.DEVNULL))
    """
    for _ in range(2):
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            process.kill()


def die_with_parent(parent: int) -> Callable[[], None]:
    """Returns a function by which a child lets the kernel kill it as soon as its parent has ended.

    It is made ready beforehand so that a child can call it between fork and exec.

    Args:
        parent: number of the process that is, or is about to be, the parent of the caller.

    Example:
        >>> import subprocess
        >>> subprocess.Popen(["true"], preexec_fn=die_with_parent(os.getpid())).wait()
        0
    """
    prctl = ctypes.CDLL(None).prctl

    def promise() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)  # it ended before the kernel was asked to tell us

    return promise


def open_standard_streams() -> None:
    """Lets those that were closed (`>&-`) lead to nowhere: whatever is opened later would get their numbers.

    Example:
        >>> open_standard_streams()  # nothing is closed here
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Makes this process the parent of descendants whose own parent ends meanwhile.

    Only meanwhile: later orphans, helpers that a training script leaves behind, belong to the system's init process,
    since nobody here would ever wait for them.

    Raises:
        OSError: the system cannot do that.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Interrupted(Exception):
    """A signal asks this process to end.

    Attributes:
        signal: which one.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


class SignalInbox:
    """While it is entered, signals wait in it until `take` asks for them.

    Python hears signals in its main thread only: entered in another one, it hears what `put` says.

    Attributes:
        is_stopping: whether a signal that asks this process to end has ever come.

    Example:
        >>> with SignalInbox() as inbox:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     inbox.take()
        [<Signals.SIGTERM: 15>]
    """

    def __init__(self) -> None:
        self.is_stopping = False
        self._received: list[signal.Signals] = []
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in _STOP_SIGNALS:
            # nohup ignores SIGHUP so that the run outlives its terminal.
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, lambda number, frame: self.put(signal.Signals(number)))
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            # As some services leave it to what they start: the kernel would forget how a process has ended.
            self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def put(self, number: signal.Signals) -> None:
        """Lets `take` find a signal that nobody has sent."""
        self.is_stopping = self.is_stopping or number in _STOP_SIGNALS
        self._received.append(number)

    def take(self) -> list[signal.Signals]:
        """The signals since the last call, in order."""
        received, self._received = self._received, []
        return received

    def take_stop(self) -> signal.Signals | None:
        """The first of the signals since the last call that asks this process to end; None if there is none."""
        return next((number for number in self.take() if number in _STOP_SIGNALS), None)

    def check(self) -> None:
        """Raises `Interrupted` if a signal has come, since the last call, that asks this process to end."""
        if (number := self.take_stop()) is not None:
            raise Interrupted(number)

    def wait(self, seconds: float) -> None:
        """Waits so long, or until a signal asks this process to end: then it raises `Interrupted`."""
        end = time.monotonic() + seconds
        self.check()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(_TICK, left))
            self.check()

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            # None: installed by something other than Python, which cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
