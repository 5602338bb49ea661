"""In which formats pictures can be written."""

from __future__ import annotations

import os
from pathlib import Path


def wanted_endings(path: str | os.PathLike[str]) -> list[str]:
    """The endings that the name of a picture may have, if this one has none of them; empty if it has.

    Args:
        path: of the picture.

    Raises:
        ImportError: if matplotlib, which knows, is not installed.

    Example:
        >>> wanted_endings("curve.PNG"), "svg" in wanted_endings("curve")
        ([], True)
    """
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    return [] if Path(path).suffix[1:].lower() in known else sorted(known)
