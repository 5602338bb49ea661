"""Lets tools that only know `setup.py` build tfdist, and makes the README one that can be read anywhere.

On an index of packages, links to other files of the repository lead nowhere. With an address of the repository
(`Repository` in `[project.urls]` of pyproject.toml) they lead there; without one, only their text is left. Every other
setting is in pyproject.toml.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from setuptools import setup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_ROOT = Path(__file__).parent
# A block of code, or a link in Markdown: an exclamation mark if it is a picture, its text, and where it leads.
_CODE_OR_LINK = re.compile(r"^```.*?^```|(!?)\[([^\]]*)\]\(([^)\s]+)\)", re.MULTILINE | re.DOTALL)


def readable_anywhere(text: str, repository: str | None) -> str:
    """A README in which no link depends on the files beside it.

    Args:
        text: the README, in Markdown.
        repository: the address of the repository, if it has one.
    """

    def replaced(match: re.Match) -> str:
        picture, words, target = match.groups()
        if target is None or re.match(r"[a-z]+:", target):
            return match[0]
        if repository is None:
            return words
        # Headings have no anchors on an index either.
        path = f"README.md{target}" if target.startswith("#") else target
        return f"{picture}[{words}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/HEAD/{path})"

    return _CODE_OR_LINK.sub(replaced, text)


if __name__ == "__main__":
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        long_description=readable_anywhere(
            (_ROOT / "README.md").read_text(encoding="utf-8"), project.get("urls", {}).get("Repository")
        ),
        long_description_content_type="text/markdown",
    )
