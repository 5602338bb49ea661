"""An extension of Griffe, which reads docstrings for the site: it knows the section `Examples:`, and not `Example:`."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^( *)Example( \(.*\))?:$", re.MULTILINE)


def with_known_sections(docstring: str) -> str:
    """Renames sections that Griffe would take for text, in which `>>>` is a quotation.

    Example:
        >>> with_known_sections("Example (on the chief):")
        'Examples: Example (on the chief):'
    """
    return _SECTION.sub(lambda found: f"{found[1]}Examples: Example{found[2] or ''}:", docstring)


class KnownSections(griffe.Extension):
    """Changes all docstrings while they are loaded."""

    def on_object(self, *, obj: griffe.Object, **arguments: Any) -> None:
        if obj.docstring:
            obj.docstring.value = with_known_sections(obj.docstring.value)
