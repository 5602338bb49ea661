"""What processes print, on its way to the terminal: prefixed lines, one live line, and the launcher's own messages.

A progress bar rewrites its line: what comes after the last carriage return is shown, so that a pipe gets its final
state only and a terminal one live line. Other moves of the cursor are left out: bars below each other are not live.
`hidden_lines` names lines that TensorFlow writes while it starts and that are no error: they are in the logs only.
What may wait, for a disk or a reader, is done in a thread: the launcher itself hears signals meanwhile.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import functools
import io
import os
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, TextIO

from tfdist.launcher.plan import LOG_LEVEL, QUIET

# More bytes than this do not wait to be written: they are dropped.
_MOST_WAITING = 2 << 20
# While more than this wait and move, who prints is made to wait, and nothing is dropped.
_MUCH = 1 << 18
# What has not moved for so many seconds is stuck.
_PATIENCE = 2.0
_TICK = 0.005
# Of what is larger, a pipe that waits says nothing before it has taken all of it.
_PIECE = select.PIPE_BUF
_STUCK = "nobody reads it, or its disk does not answer"
# Who read it is gone (a closed terminal, `| head`), and wants no more of it.
_NOT_WANTED = (errno.EPIPE, errno.EIO)


class Writer:
    """Writes in a thread of its own, in order. What cannot be written is dropped, and counted.

    Attributes:
        problem: why something was dropped, in the system's words; empty as long as nothing was.

    Example:
        >>> writer, written = Writer(), []
        >>> writer.do(5, lambda: written.append("hello"))
        >>> writer.close()
        >>> written, writer.dropped
        (['hello'], 0)
    """

    def __init__(self) -> None:
        self.problem = ""
        self._jobs: queue.SimpleQueue[tuple[int, Callable[[], object]] | None] = queue.SimpleQueue()
        self._moved_at = 0.0
        # Each is changed by one thread only: no lock is held while this process forks.
        self._asked = self._refused = 0
        self._done = self._failed = 0
        self._has_thread = False

    @property
    def dropped(self) -> int:
        """How many bytes were not written."""
        return self._refused + self._failed

    @property
    def is_behind(self) -> bool:
        """Whether much waits to be written, and moves: it pays to wait with more."""
        return self._asked - self._done > _MUCH and not self._is_stuck

    @property
    def _is_stuck(self) -> bool:
        return self._asked > self._done and time.monotonic() - self._moved_at > _PATIENCE

    def do(self, size: int, job: Callable[[], object]) -> None:
        """Lets the thread write so many bytes by calling a function; they are dropped if that raises OSError."""
        if self._asked == self._done:
            self._moved_at = time.monotonic()
        if self._asked - self._done > _MOST_WAITING:
            self._refused += size
            self.problem = self.problem or _STUCK
            return
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=self._work, name="tfdist-writer", daemon=True).start()
        self._asked += size
        self._jobs.put((size, job))

    def call(self, job: Callable[[], object]) -> None:
        """Does something that may wait for a disk, and returns when it is done, or stuck: then it is done later."""
        self.do(1, job)
        self.drain()

    def drain(self) -> None:
        """Waits until all is written, as long as it moves."""
        while self._asked > self._done and not self._is_stuck:
            time.sleep(_TICK)

    def moved(self) -> None:
        """Says that some of what is being written was: a slow reader is no stuck one."""
        self._moved_at = time.monotonic()

    def close(self) -> None:
        """The same; then its thread ends, and what waits is counted as dropped."""
        self.drain()
        if (left := self._asked - self._done) > 0:
            self._asked -= left
            self._refused += left
            self.problem = self.problem or _STUCK
        if self._has_thread:
            self._has_thread = False
            self._jobs.put(None)

    def _work(self) -> None:
        while (asked := self._jobs.get()) is not None:
            size, job = asked
            try:
                job()
            except OSError as error:
                self._failed += size
                self.problem = error.strerror or str(error)
            self.moved()
            self._done += size


class Outlet:
    """A standard stream in the place of a binary one: a thread writes to it.

    Args:
        stream: `sys.stdout`, say. None, where that was closed: nothing is written.

    Attributes:
        writer: its thread.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.writer = Writer()
        self._stream = stream
        self._descriptor = -1
        # What only looks like a file may write elsewhere, too.
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):  # it writes into memory, or was closed
                self._descriptor = stream.fileno()

    def write(self, data: bytes) -> None:
        """Takes what is to be written."""
        if self._stream is not None:
            self.writer.do(len(data), functools.partial(self._write, self._stream, data))

    def fileno(self) -> int:
        """Its file descriptor; -1 if it has none."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)

    def _write(self, stream: TextIO, data: bytes) -> None:
        try:
            if self._descriptor < 0:
                stream.write(data.decode("utf-8", "replace"))
            stream.flush()  # also what the program has printed before
            if self._descriptor >= 0:
                write_all(self._descriptor, data, self.writer.moved)
        except ValueError:
            pass  # somebody has closed it
        except OSError as error:
            if error.errno not in _NOT_WANTED:
                raise


def outlets(stdout: TextIO | None, stderr: TextIO | None) -> tuple[Outlet, Outlet]:
    """Both standard streams; they have one writer, and keep their order, where they lead to the same place."""
    shown, errors = Outlet(stdout), Outlet(stderr)
    places = [os.fstat(one.fileno()) for one in (shown, errors) if one.fileno() >= 0]
    if len(places) == 2 and os.path.samestat(*places):
        errors.writer = shown.writer
    return shown, errors


def write_all(descriptor: int, data: bytes, moved: Callable[[], None] = lambda: None) -> None:
    """Writes all of it, also where a pipe does not wait by itself.

    Args:
        descriptor: where to.
        data: the bytes.
        moved: is called whenever some of it is written.

    Raises:
        OSError: there is no room, or nobody reads.
    """
    while data:
        try:
            data = data[os.write(descriptor, data[:_PIECE]) :]
            moved()
        except BlockingIOError:
            select.select([], [descriptor], [])


_RESET = "\x1b[0m"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, erasing, moves of the cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: window titles, links
    r"|\x1b[^\[\]]?|\x08"
)
# The beginning of a sequence, whose end comes with the next chunk.
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*)\Z")
# A longer row is broken: a program may print 60 MB without an end of a line.
_LONGEST_ROW = 1 << 14

_DIM, _NORMAL = "\x1b[2m", "\x1b[22m"
_ERASE_ROW = "\r\x1b[K"
_USUAL_COLUMNS = 80


class LineBuffer:
    """One output stream, fed with bytes in chunks that may end anywhere. Rows keep their colours.

    Example:
        >>> buffer = LineBuffer()
        >>> buffer.feed(b"1/2\\r2/2 done\\nnext")
        ['2/2 done']
        >>> buffer.row
        'next'
    """

    def __init__(self) -> None:
        self._raw = ""
        # Bytes that are not UTF-8 come out again as they went in.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    @property
    def row(self) -> str:
        """The unfinished row, as it stands."""
        return _shown(_UNFINISHED.sub("", self._raw))

    def feed(self, data: bytes, final: bool = False) -> list[str]:
        """Takes a chunk and returns the rows that it ends.

        Args:
            data: the bytes.
            final: whether nothing follows: the unfinished row is then returned, too.
        """
        *ended, self._raw = (self._raw + self._decoder.decode(data, final)).split("\n")
        rows = [_shown(one) for one in ended]
        self._raw = _after_return(self._raw)
        while len(self._raw) > _LONGEST_ROW:
            rows.append(_shown(self._raw[:_LONGEST_ROW]))
            self._raw = self._raw[_LONGEST_ROW:]
        if final and self._raw:
            rows.append(_shown(self._raw))
            self._raw = ""
        return rows


def _after_return(raw: str) -> str:
    """What the last carriage return leaves of a row; one at the end erases nothing yet."""
    return raw[raw.rstrip("\r").rfind("\r") + 1 :]


def _shown(raw: str) -> str:
    row = _after_return(raw).rstrip("\r")
    return _SEQUENCE.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else "", row)


def plain(row: str) -> str:
    """A row without its colours."""
    return _COLOUR.sub("", row)


def last_lines(log: bytes, count: int) -> tuple[str, ...]:
    """The last lines of a log that are not blank at the end, as a terminal would have shown them.

    Example:
        >>> last_lines(b"a\\n10%\\r90%\\nc\\n", 2)
        ('90%', 'c')
    """
    lines = [plain(row).rstrip() for row in LineBuffer().feed(log, final=True)]
    while lines and not lines[-1]:
        lines.pop()
    return tuple(lines[-count:])


class Terminal:
    """Writes prefixed lines to a stream, and on a real terminal keeps one process's unfinished line live at the end.

    Args:
        stream: where the output of the processes goes; an `Outlet` waits for nobody.
        is_tty: whether that is a terminal that can erase a line.
        colour: whether colours are wanted.
        live: name of the process whose unfinished line is shown.
        hidden: lines of the processes that begin like this are left out.
        errors: where the launcher's own messages go; by default `sys.stderr`.

    Attributes:
        is_tty: whether the stream is a terminal.

    Example:
        >>> import io
        >>> stream = io.BytesIO()
        >>> Terminal(stream, is_tty=False).feed("worker 0", b"hello\\n")
        >>> stream.getvalue()
        b'[worker 0] hello\\n'
    """

    def __init__(
        self,
        stream: BinaryIO | Outlet,
        is_tty: bool,
        colour: bool = False,
        live: str | None = None,
        hidden: re.Pattern[str] | None = None,
        errors: Outlet | None = None,
    ) -> None:
        self.is_tty = is_tty
        self._stream = stream
        self._errors = errors
        self._colour = colour
        self._live = live
        self._hidden = hidden
        self._buffers: dict[str, LineBuffer] = {}
        self._drawn = ""
        self._pending = ""

    @classmethod
    def standard(cls, live: str, env: Mapping[str, str], hidden: re.Pattern[str] | None = None) -> Terminal:
        """The launcher's standard output."""
        shown, errors = outlets(sys.stdout, sys.stderr)
        is_tty = shown.isatty() and env.get("TERM") != "dumb"
        return cls(shown, is_tty, not env.get("NO_COLOR") and is_tty, live, hidden=hidden, errors=errors)

    @property
    def is_behind(self) -> bool:
        """Whether much waits to be shown: more of it can wait where it comes from."""
        return isinstance(self._stream, Outlet) and self._stream.writer.is_behind

    def feed(self, name: str, data: bytes, final: bool = False) -> None:
        """Takes what a process printed; `final` says that nothing follows."""
        for row in self._buffers.setdefault(name, LineBuffer()).feed(data, final):
            if not self._leaves_out(name, plain(row)):
                text = self._coloured(row)
                self._put((self._prefix(name) + text if text else self._prefix(name).rstrip()) + "\n")
        self._show()

    def message(self, text: str) -> None:
        """Writes a line of the launcher's own to standard error, above the live line."""
        self._put("")
        self._flush()
        if self._errors is not None:
            self._errors.write(f"tfdist: {text}\n".encode(errors="backslashreplace"))
        else:
            print(f"tfdist: {text}", file=sys.stderr, flush=True)
        self._show()

    def finish(self) -> None:
        """Returns when all is written, or nobody reads it; says how much that was."""
        if isinstance(self._stream, Outlet):
            writer = self._stream.writer
            writer.close()
            if writer.dropped:
                self.message(f"{writer.dropped} bytes of the output were not shown: {writer.problem}")
        if self._errors is not None:
            self._errors.writer.close()

    def columns_inside(self, name: str) -> int | None:
        """How many columns of the terminal are left for what a process prints behind its prefix; None: no terminal."""
        return max(self._width() - len(self._label(name)), 1) if self.is_tty else None

    @property
    def shows_both(self) -> bool:
        """Whether what the processes print and the launcher's messages go to the same place."""
        one_place = isinstance(self._stream, Outlet) and self._errors and self._errors.writer is self._stream.writer
        return self.is_tty or bool(one_place)

    def hides(self, line: str) -> bool:
        """Whether a line of a process is one of those that are not shown."""
        return self._hidden is not None and self._hidden.match(line) is not None

    def _leaves_out(self, name: str, line: str) -> bool:
        return self.hides(line)

    def _put(self, text: str) -> None:
        """Writes in place of the live line."""
        # Erased first and not behind the text: in the last column some terminals would erase its last character.
        self._pending += (self._erased() if self._drawn else "") + text
        self._drawn = ""

    def _erased(self) -> str:
        """What takes the live line away."""
        return _ERASE_ROW

    def _show(self) -> None:
        """Draws the live line if it has changed, and passes on all that was put."""
        row = self._live_row()
        if row != self._drawn:
            self._put(row)
            self._drawn = row
        self._flush()

    def _live_row(self) -> str:
        """What the live line is to be; empty if there is to be none."""
        row = self._buffers[self._live].row if self.is_tty and self._live in self._buffers else ""
        if not row:
            return ""
        from rich.cells import cell_len, set_cell_size

        # One column stays free: in the last one some terminals wrap already.
        room = self._width() - len(self._label(self._live)) - 1
        fits = cell_len(plain(row)) <= room
        return self._prefix(self._live) + (self._coloured(row) if fits else set_cell_size(plain(row), room))

    def _coloured(self, row: str) -> str:
        """A row with its colours, which end with it; or without, where none are wanted."""
        if not self._colour:
            return plain(row)
        return row + _RESET if _COLOUR.search(row) and not row.endswith(_RESET) else row

    def _prefix(self, name: str) -> str:
        label = self._label(name)
        return f"{_DIM}{label}{_NORMAL}" if self._colour and label else label

    def _label(self, name: str) -> str:
        return f"[{name}] "

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _USUAL_COLUMNS
        except OSError:
            return _USUAL_COLUMNS

    def _flush(self) -> None:
        if self._pending:
            self._stream.write(self._pending.encode("utf-8", "surrogateescape"))
            self._pending = ""


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
        env: what the user has set for the processes. One who asks for more by TF_CPP_MIN_LOG_LEVEL gets all there is.
        has_driver: whether this machine has a driver for GPUs; by default it is looked for.

    Example:
        >>> hidden = hidden_lines(show_all=False, env={}, has_driver=False)
        >>> hidden.match("loss: 0.5") is None
        True
    """
    if show_all or env.get(LOG_LEVEL, QUIET) < QUIET:
        return None
    if has_driver is None:
        has_driver = any(map(os.path.exists, _DRIVERS))
    texts = _ALWAYS if has_driver else _ALWAYS + _WITHOUT_DRIVER
    return re.compile(f"{_any_of(_BARE)}|{_PREFIX}{_any_of(texts)}")


def _any_of(texts: Sequence[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, texts))})"
