"""The pages of the documentation, and what is in them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)
_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        page: its path from the root of the repository.
        line: of its first line of code.
        language: "python", "console", ...; empty without one.
        text: the code.
        output: the block of language "text" that follows with nothing in between; else `None`.
    """

    page: str
    line: int
    language: str
    text: str
    output: str | None = None

    @property
    def place(self) -> str:
        """For messages and names of tests."""
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str, *languages: str) -> list[Block]:
    """The code blocks of a page in these languages."""
    text = read(page)
    found = list(_BLOCK.finditer(text))
    blocks = []
    for match, following in itertools.zip_longest(found, found[1:]):
        below = following is not None and following[2] == "text" and not text[match.end() : following.start()].strip()
        line = text.count("\n", 0, match.start(3)) + 1
        blocks.append(Block(page, line, match[2], match[3], following[3] if below else None))
    return [block for block in blocks if block.language in languages]


def blocks(*languages: str) -> Iterator[Block]:
    """Those of all pages."""
    for page in PAGES:
        yield from blocks_of(page, *languages)


def prose(page: str) -> str:
    """A page without its code blocks."""
    return _BLOCK.sub("", read(page))


def side(diff: str, mark: str) -> str:
    """The old text of a diff for the mark "-", the new one for "+".

    Example:
        >>> side(" a\\n-b\\n+c\\n", "-")
        'a\\nb\\n'
    """
    kept = (line for line in diff.splitlines(keepends=True) if line[0] in (" ", "\n", mark))
    return "".join(line[1:] if line[0] != "\n" else line for line in kept)


def anchors(page: str) -> set[str]:
    """What can be linked to in a page, by the rules of GitHub, which those of the site follow."""
    text = prose(page)
    found = set(re.findall(r'id="([^"]+)"', text))
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        anchor = re.sub(r"[^\w\- ]", "", plain).strip().lower().replace(" ", "-")
        count = sum(1 for other in found if re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other))
        found.add(f"{anchor}-{count}" if count else anchor)
    return found
