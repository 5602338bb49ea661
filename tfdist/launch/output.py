"""What a process prints, turned into lines: the part that understands progress bars.

A progress bar rewrites its line with carriage returns and backspaces. `LineBuffer` keeps the line as a terminal would
show it, so that a pipe gets its final state only and a terminal one live line.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
