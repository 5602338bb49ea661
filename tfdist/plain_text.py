"""Tables of `rich` as plain text."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


def plain_text(*parts: RenderableType, width: int = 120) -> str:
    """What a terminal would show of this, without colours, blank lines at its ends, and spaces at the ends of lines.

    Args:
        parts: one below the other.
        width: of the terminal, in characters.

    Example:
        >>> plain_text("one", "two")
        'one\\ntwo'
    """
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).strip("\n")


def plain_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    right: Collection[str] = (),
    wraps: Collection[str] = (),
) -> Table:
    """A table without lines between its columns.

    Args:
        titles: of its columns.
        rows: from the top.
        right: the columns that are aligned to the right.
        wraps: those whose cells may take several lines.

    Example:
        >>> table = plain_table(("name", "count"), [("one", "1")], right=("count",))
        >>> print(plain_text(table))  # doctest: +NORMALIZE_WHITESPACE
        name   count
        ────────────
        one        1
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        table.add_column(Text(title), justify="right" if title in right else "left", no_wrap=title not in wraps)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
