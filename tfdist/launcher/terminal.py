"""What processes print, on its way to the terminal: prefixed lines, one live line, and the launcher's own messages.

A progress bar rewrites its line with carriage returns and backspaces. `LineBuffer` keeps the line as a terminal would
show it, so that a pipe gets its final state only and a terminal one live line. `hidden_lines` names lines that
TensorFlow writes while it starts and that are no error: they are in the logs only.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from tfdist.launcher.run_plan import LOG_LEVEL

RESET = "\x1b[0m"

_TOKEN = re.compile(
    r"\x1b\[(?P<parameters>[0-?]*)[ -/]*(?P<final>[@-~])"  # CSI: colours, erasing, moves of the cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: window titles, links
    r"|\x1b[^\[\]]"
    r"|(?P<control>[\r\n\b])"
    r"|(?P<text>[^\x1b\r\n\b]+)"
    r"|."
)
# The beginning of a sequence whose end is in the next chunk; a lone ESC that never continues must not hold back more.
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}|\][^\x07\x1b]{0,1024}\x1b?)?\Z")
_VERTICAL = frozenset("ABEFHJdf")
_STYLES_KEPT = 8

Cell = tuple[str, str]  # colour sequences in force, character
_DIM, _NORMAL = "\x1b[2m", "\x1b[22m"
_ERASE_ROW = "\r\x1b[K"
_FALLBACK_SIZE = os.terminal_size((80, 24))


@dataclass(frozen=True)
class Line:
    """A row that has ended."""

    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Move:
    """A sequence that leaves the row (cursor up, clear screen), and the row as it was then."""

    sequence: str
    cells: tuple[Cell, ...]


class LineBuffer:
    """One output stream, fed with bytes in chunks that may end anywhere.

    Example:
        >>> buffer = LineBuffer()
        >>> [render(line.cells) for line in buffer.feed(b"1/2\\r2/2 done\\nnext")]
        ['2/2 done']
        >>> render(buffer.cells)
        'next'
    """

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self._column = 0
        self._styles: list[str] = []
        self._unread = ""
        # Bytes that are not UTF-8 come out again as they went in.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def feed(self, data: bytes, final: bool = False) -> list[Line | Move]:
        """Takes a chunk and returns what it completed; the unfinished row stays in `cells`.

        Args:
            data: the bytes.
            final: whether nothing follows: the unfinished row is then returned as a line, too.
        """
        text = self._unread + self._decoder.decode(data, final)
        unfinished = None if final else _UNFINISHED.search(text)
        end = unfinished.start() if unfinished else len(text)
        self._unread = text[end:]
        events = list(self._read(text[:end]))
        if final and self.cells:
            events.append(Line(self._take()))
        return events

    def _read(self, text: str) -> Iterator[Line | Move]:
        for token in _TOKEN.finditer(text):
            if written := token["text"]:
                self._write(written)
            elif token["control"] == "\n":
                yield Line(self._take())
            elif token["control"] == "\r":
                self._column = 0
            elif token["control"] == "\b":
                self._column = max(self._column - 1, 0)
            elif (final := token["final"]) in _VERTICAL:
                yield Move(token[0], self._take())
            elif final:
                self._control(final, token["parameters"], token[0])

    def _write(self, text: str) -> None:
        if self._column > len(self.cells):
            self.cells.extend([("", " ")] * (self._column - len(self.cells)))
        style = "".join(self._styles)
        end = self._column + len(text)
        self.cells[self._column : end] = [(style, character) for character in text]
        self._column = end

    def _control(self, final: str, parameters: str, sequence: str) -> None:
        count = int(parameters) if parameters.isdigit() else 0
        if final == "m":
            # A reset (alone or first of several parameters) ends everything before it.
            if not parameters or parameters.split(";")[0] in ("", "0"):
                self._styles.clear()
            if parameters not in ("", "0"):
                self._styles = [*self._styles, sequence][-_STYLES_KEPT:]
        elif final == "K" and count == 0:
            del self.cells[self._column :]
        elif final == "K" and count == 1:
            self.cells[: self._column] = [("", " ")] * min(self._column, len(self.cells))
        elif final == "K":
            self.cells.clear()
        elif final == "C":
            self._column += max(count, 1)
        elif final == "D":
            self._column = max(self._column - max(count, 1), 0)
        elif final == "G":
            self._column = max(count - 1, 0)

    def _take(self) -> tuple[Cell, ...]:
        taken = tuple(self.cells)
        self.cells.clear()
        self._column = 0
        return taken


def render(cells: Iterable[Cell], colour: bool = False, columns: int | None = None) -> str:
    """The text of a row, with or without its colours, cut at a number of terminal columns."""
    out: list[str] = []
    current, used = "", 0
    for style, character in cells:
        used += _columns_of(character)
        if columns is not None and used > columns:
            break
        if colour and style != current:
            out.append((RESET if current else "") + style)
            current = style
        out.append(character)
    if current:
        out.append(RESET)
    return "".join(out)


def last_lines(log: bytes, count: int) -> tuple[str, ...]:
    """The last lines of a log that are not blank at the end, as a terminal would have shown them.

    Example:
        >>> last_lines(b"a\\n10%\\r90%\\nc\\n", 2)
        ('90%', 'c')
    """
    events = LineBuffer().feed(log, final=True)
    lines = [render(event.cells).rstrip() for event in events]
    while lines and not lines[-1]:
        lines.pop()
    return tuple(lines[-count:])


def _columns_of(character: str) -> int:
    if character < "\x7f":
        return 8 if character == "\t" else int(character >= " ")
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


class Terminal:
    """Writes prefixed lines to a stream, and on a real terminal keeps one process's unfinished line live at the end.

    Args:
        stream: where the output of the processes goes.
        is_tty: whether that is a terminal that can erase a line.
        colour: whether colours are wanted.
        live: name of the process whose unfinished line is shown.
        columns: width to assume; the default asks the terminal each time, since it may be resized.
        hidden: lines of the processes that begin like this are left out.

    Attributes:
        is_tty: whether the stream is a terminal.
        only: the process whose output is shown; None shows that of all.

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
        hidden: re.Pattern[str] | None = None,
    ) -> None:
        self.is_tty = is_tty
        self.only: str | None = None
        self._stream = stream
        self._colour = colour
        self._live = live
        self._columns = columns
        self._hidden = hidden
        self._buffers: dict[str, LineBuffer] = {}
        self._drawn = ""
        self._on_old_row = False
        self._pending: list[str] = []

    @classmethod
    def standard(cls, live: str, env: Mapping[str, str], hidden: re.Pattern[str] | None = None) -> Terminal:
        """The launcher's standard output."""
        is_tty = sys.stdout.isatty() and env.get("TERM") != "dumb"
        return cls(sys.stdout.buffer, is_tty, colour=is_tty and not env.get("NO_COLOR"), live=live, hidden=hidden)

    def feed(self, name: str, data: bytes, final: bool = False) -> None:
        """Takes what a process printed; `final` says that nothing follows."""
        if self.only is not None and name != self.only:
            return
        for event in self._buffers.setdefault(name, LineBuffer()).feed(data, final):
            if isinstance(event, Line):
                if self._leaves_out(name, render(event.cells)):
                    continue
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
        return os.terminal_size((max(size.columns - len(self._label(name)), 1), size.lines))

    def hides(self, line: str) -> bool:
        """Whether a line of a process is one of those that are not shown."""
        return self._hidden is not None and self._hidden.match(line) is not None

    def _leaves_out(self, name: str, line: str) -> bool:
        return self.hides(line)

    def _put(self, text: str) -> None:
        """Writes in place of the live line, or of the row to which the cursor was moved."""
        # Erased first and not behind the text: in the last column some terminals would erase its last character.
        if self._drawn or (self._on_old_row and text):
            self._pending.append(self._erased())
            self._on_old_row = False
        self._pending.append(text)
        self._drawn = ""

    def _erased(self) -> str:
        """What takes the live line away."""
        return _ERASE_ROW

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
        label = self._label(name)
        return f"{_DIM}{label}{_NORMAL}" if self._colour else label

    def _label(self, name: str) -> str:
        return f"[{name}] "

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


# TensorFlow's C++ part writes these lines before it heeds any setting, once per process, and again after each restart.
# Whoever sees `failed call to cuInit` on a machine without a GPU takes it for the reason of whatever happens next.
# As they stand at the beginning of a line.
_BARE = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    # The second line of "This TensorFlow binary is optimized".
    "To enable the following instructions: ",
)
# Behind what TensorFlow puts before its messages, which no line of a program has:
# "I0000 00:00:1795590664.79   30750 port.cc:153] ", "2026-11-25 07:11:04.79: I tensorflow/core/util/port.cc:153] ".
_PREFIX = r"(?:[IWE]\d{4} [\d:.]+ +\d+ |[\d-]{10} [\d:.]+: [IWE] )[\w./]+:\d+\] "
_ALWAYS = ("oneDNN custom operations are on.", "This TensorFlow binary is optimized ")
# Where there is a driver, these say why TensorFlow does not use the GPU.
_WITHOUT_DRIVER = ("Could not find cuda drivers on your machine", "failed call to cuInit")
# Native Linux, and Windows Subsystem for Linux.
_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")


def hidden_lines(show_all: bool, env: Mapping[str, str], has_driver: bool | None = None) -> re.Pattern[str] | None:
    """Which lines of the processes are not shown on the terminal; None shows all.

    Args:
        show_all: whether `--output all` was given.
        env: what the user has set for the processes. One who chooses TF_CPP_MIN_LOG_LEVEL wants to see what there is.
        has_driver: whether this machine has a driver for GPUs; by default it is looked for.

    Example:
        >>> hidden = hidden_lines(show_all=False, env={}, has_driver=False)
        >>> hidden.match("loss: 0.5") is None
        True
    """
    if show_all or LOG_LEVEL in env:
        return None
    if has_driver is None:
        has_driver = any(map(os.path.exists, _DRIVERS))
    texts = _ALWAYS if has_driver else _ALWAYS + _WITHOUT_DRIVER
    return re.compile(f"{_any_of(_BARE)}|{_PREFIX}{_any_of(texts)}")


def _any_of(texts: Sequence[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, texts))})"
