"""Tables of `rich` as plain text."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


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
