"""What a function prints in its processes, in the cell of a notebook, in a terminal or wherever a script prints to.

The stream of a cell has no file descriptor that processes could write to: their output is read and written again. A
notebook obeys carriage returns, but not the sequences that erase a line, and sends each write to the browser. So a
progress bar is drawn anew a few times a second, and ever less often in the course of hours.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from tfdist.launcher.local.calls import RAISED
from tfdist.launcher.output import Terminal, outlets, plain

# A write of the live line, after so many seconds; and after this part of the time that has gone by.
_INTERVAL, _PART = 0.25, 1 / 500


class CallOutput(Terminal):
    """Writes to `sys.stdout`, as it is when this is made.

    What the processes print about an exception is not shown: `launch` raises it.

    Args:
        live: name of the first process.
        prefixed: whether each line begins with the name of its process.
        env: environment variables.
        hidden: lines of the processes that begin like this are left out.

    Example:
        >>> output = CallOutput("worker 0", prefixed=False, env={})
        >>> output.feed("worker 0", b"loss: 0.9\\rloss: 0.5\\n")
        >>> output.finish()
        loss: 0.5
    """

    def __init__(
        self, live: str, prefixed: bool, env: Mapping[str, str], hidden: re.Pattern[str] | None = None
    ) -> None:
        shown, errors = outlets(sys.stdout, sys.stderr)
        is_tty = shown.isatty() and env.get("TERM") != "dumb"
        self._in_cell = _is_of_cell(sys.stdout)
        colour = (is_tty or self._in_cell) and not env.get("NO_COLOR")
        super().__init__(shown, is_tty, colour, live, hidden=hidden, errors=errors)
        self._prefixed = prefixed
        self._raised: set[str] = set()
        self._began_at = self._drawn_at = time.monotonic()

    def feed(self, name: str, data: bytes, final: bool = False) -> None:
        """Takes what a process printed; `final` says that nothing follows."""
        super().feed(name, data, final)
        if final:
            self._raised.discard(name)  # another one may be started in its place

    def message(self, text: str) -> None:
        """Writes a line of the launcher's own: in a cell between those of the processes, else to standard error."""
        text = in_words_of_python(text)
        if not self._in_cell:
            super().message(text)
            return
        self._put(f"tfdist: {text}\n")
        self._show()

    def refresh(self) -> None:
        """Draws what has become due meanwhile. To be called again and again."""
        if self._in_cell:
            self._show()

    def _leaves_out(self, name: str, line: str) -> bool:
        if RAISED in line and name not in self._raised:
            self._raised.add(name)
            # A progress bar may not have ended its row.
            if begun := line.partition(RAISED)[0]:
                self._put(f"{self._prefix(name)}{begun}\n")
        return name in self._raised or super()._leaves_out(name, line)

    def _label(self, name: str) -> str:
        return super()._label(name) if self._prefixed else ""

    def _erased(self) -> str:
        if not self._in_cell:
            return super()._erased()
        return f"\r{' ' * len(plain(self._drawn))}\r"

    def _live_row(self) -> str:
        if not self._in_cell:
            return super()._live_row()
        row = self._buffers[self._live].row if self._live in self._buffers else ""
        if not row or self._live in self._raised:
            return self._drawn
        row = self._prefix(self._live) + self._coloured(row)
        now = time.monotonic()
        if row == self._drawn or now - self._drawn_at < max(_INTERVAL, _PART * (now - self._began_at)):
            return self._drawn
        self._drawn_at = now
        return row


def in_words_of_python(text: str) -> str:
    """A message about options of `tfdist run`, for who has given arguments of a function.

    Example:
        >>> in_words_of_python("--cpus-per-worker 9: 2 are usable. Use -n 2 (--max-restarts is 0)")
        'cpus_per_worker=9: 2 are usable. Use workers=2 (max_restarts is 0)'
        >>> in_words_of_python("runs--old/a --b/logs")  # folders stay what they are
        'runs--old/a --b/logs'
    """
    text = re.sub(r"(?<!\S)-n (?=\d)", "workers=", text)
    return re.sub(
        r"(?<![\w/.-])--([a-z]+(?:-[a-z]+)*)(?![\w/-])( (?=\d|auto|\w+=))?",
        lambda match: match[1].replace("-", "_") + ("=" if match[2] else ""),
        text,
    )


def _is_of_cell(stream: Any) -> bool:
    """Whether it is what ipykernel, which Jupyter, VS Code and Colab have, puts in the place of `sys.stdout`."""
    module = sys.modules.get("ipykernel.iostream")
    return module is not None and isinstance(stream, module.OutStream)
