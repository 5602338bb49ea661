"""The launcher's own output: lines of several processes with a prefix, one live line, and its own messages."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from typing import BinaryIO

from tfdist.launch.output import Cell, Line, LineBuffer, Move, render

_DIM, _NORMAL = "\x1b[2m", "\x1b[22m"
_ERASE_ROW = "\r\x1b[K"
_FALLBACK_SIZE = os.terminal_size((80, 24))


class Terminal:
    """Writes prefixed lines to a stream, and on a real terminal keeps one process's unfinished line live at the end.

    Args:
        stream: where the output of the processes goes.
        is_tty: whether that is a terminal that can erase a line.
        colour: whether colours are wanted.
        live: name of the process whose unfinished line is shown.
        columns: width to assume; the default asks the terminal each time, since it may be resized.

    Example:
        >>> import io
        >>> stream = io.BytesIO()
        >>> Terminal(stream, is_tty=False).feed("worker 0", b"hello\\n")
        >>> stream.getvalue()
        b'[worker 0] hello\\n'
    """

    def __init__(
        self,
        stream: BinaryIO,
        is_tty: bool,
        colour: bool = False,
        live: str | None = None,
        columns: int | None = None,
    ) -> None:
        self.is_tty = is_tty
        self._stream = stream
        self._colour = colour
        self._live = live
        self._columns = columns
        self._buffers: dict[str, LineBuffer] = {}
        self._drawn = ""
        self._on_old_row = False
        self._pending: list[str] = []

    @classmethod
    def standard(cls, live: str, env: Mapping[str, str]) -> Terminal:
        """The launcher's standard output."""
        is_tty = sys.stdout.isatty() and env.get("TERM") != "dumb"
        return cls(sys.stdout.buffer, is_tty, colour=is_tty and not env.get("NO_COLOR"), live=live)

    def feed(self, name: str, data: bytes, final: bool = False) -> None:
        """Takes what a process printed; `final` says that nothing follows."""
        for event in self._buffers.setdefault(name, LineBuffer()).feed(data, final):
            if isinstance(event, Line):
                text = render(event.cells, self._colour)
                self._put((self._prefix(name) + text if text else self._prefix(name).rstrip()) + "\n")
            elif isinstance(event, Move) and self.is_tty and name == self._live:
                self._put(self._row(name, event.cells) + event.sequence + "\r")
                self._on_old_row = True
        self._show_live()
        self._flush()

    def message(self, text: str) -> None:
        """Writes a line of the launcher's own to standard error, above the live line."""
        self._put("")
        self._flush()
        with contextlib.suppress(OSError):  # nobody reads it: see _flush
            print(f"tfdist: {text}", file=sys.stderr, flush=True)
        self._show_live()
        self._flush()

    def size_inside(self, name: str) -> os.terminal_size:
        """The room that is left of the terminal for what a process prints behind its prefix."""
        size = self._size()
        return os.terminal_size((max(size.columns - len(_label(name)), 1), size.lines))

    def _put(self, text: str) -> None:
        """Writes in place of the live line, or of the row to which the cursor was moved."""
        # Erased first and not behind the text: in the last column some terminals would erase its last character.
        if self._drawn or (self._on_old_row and text):
            self._pending.append(_ERASE_ROW)
            self._on_old_row = False
        self._pending.append(text)
        self._drawn = ""

    def _show_live(self) -> None:
        if not self.is_tty or self._live not in self._buffers:
            return
        cells = self._buffers[self._live].cells
        row = self._row(self._live, cells) if cells else ""
        if row != self._drawn:
            self._put(row)
            self._drawn = row

    def _row(self, name: str, cells: Iterable[Cell]) -> str:
        # One column stays free: in the last one some terminals wrap already.
        return self._prefix(name) + render(cells, self._colour, self.size_inside(name).columns - 1)

    def _prefix(self, name: str) -> str:
        label = _label(name)
        return f"{_DIM}{label}{_NORMAL}" if self._colour else label

    def _size(self) -> os.terminal_size:
        if self._columns is not None:
            return os.terminal_size((self._columns, _FALLBACK_SIZE.lines))
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except OSError:
            return _FALLBACK_SIZE
        return size if size.columns > 0 else _FALLBACK_SIZE

    def _flush(self) -> None:
        text = "".join(self._pending)
        self._pending.clear()
        if not text:
            return
        try:
            self._stream.write(text.encode("utf-8", "surrogateescape"))
            self._stream.flush()
        except OSError:
            # Whoever read the output is gone (a closed terminal, `| head`): the training and its logs go on without.
            self._stream = open(os.devnull, "wb")  # noqa: SIM115
            self.is_tty = False


def _label(name: str) -> str:
    return f"[{name}] "
