"""Signals to the launcher, collected for its main loop instead of interrupting it."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """While it is entered, signals wait in it until `take` asks for them.

    Example:
        >>> with SignalInbox() as inbox:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     inbox.take()
        [<Signals.SIGTERM: 15>]
    """

    def __init__(self) -> None:
        self._received: list[signal.Signals] = []
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> SignalInbox:
        for number in (*STOP_SIGNALS, signal.SIGWINCH):
            # nohup ignores SIGHUP so that the run outlives its terminal.
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))

    def take(self) -> list[signal.Signals]:
        """The signals since the last call, in order."""
        received, self._received = self._received, []
        return received

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: installed by something other than Python, which cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
