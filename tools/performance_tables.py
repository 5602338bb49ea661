"""Takes the tables of docs/performance.md over from the benchmarks' pages.

Example:
    python tools/performance_tables.py docs/performance.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PLACE = re.compile(
    r"^<!-- table: (?P<page>\S+), (?P<line>.+?)(?: \| (?P<cell>.+))? -->\n[\s\S]*?^<!-- /table -->$", re.MULTILINE
)


def table_below(text: str, line: str, cell: str | None = None) -> str:
    """The first table of a page below the line that begins with a text, without rows of what could not be measured.

    Args:
        text: of the page.
        line: the beginning of the line.
        cell: what one of a row's first two cells has to be; all rows by default.

    Raises:
        ValueError: if there is no such line, no table below it, or no such row.

    Example:
        >>> table_below("a 1:\\n\\n| x |\\n|---|\\n| 1 |\\n| 2 |\\n\\nend", "a", "2")
        '| x |\\n|---|\\n| 2 |'
    """
    found = re.search(rf"^{re.escape(line)}[\s\S]*?\n((?:^\|.*\n)+)", f"{text}\n", re.MULTILINE)
    if not found:
        raise ValueError(f"Received: {line!r}. Expected: the beginning of a line above a table; correct the mark.")
    head, dashes, *rows = found[1].rstrip("\n").splitlines()
    measured = [row for row in rows if "|  |  |" not in row]
    kept = [row for row in measured if cell is None or cell in [part.strip() for part in row.split("|")[1:3]]]
    if not kept:
        raise ValueError(f"Received: {cell!r} for {line!r}. Expected: one of the first two cells of a row.")
    return "\n".join([head, dashes, *kept])


def filled(text: str, root: Path) -> str:
    """Renews what is between the marks `<!-- table: PAGE, LINE -->` and `<!-- /table -->`.

    With `PAGE, LINE | CELL` there are only the rows with that cell.

    Args:
        text: of a page.
        root: the folder that the pages in the marks are relative to.

    Raises:
        ValueError: if a table is not found.
    """

    def renewed(place: re.Match) -> str:
        begin, end = place[0].splitlines()[0], place[0].splitlines()[-1]
        return f"{begin}\n\n{table_below((root / place['page']).read_text(), place['line'], place['cell'])}\n\n{end}"

    return _PLACE.sub(renewed, text)


def main(arguments: list[str]) -> int:
    """Renews the tables in the files that are named; returns the exit code."""
    for path in map(Path, arguments):
        path.write_text(filled(path.read_text(), _ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
