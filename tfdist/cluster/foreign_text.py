"""Text that comes from another process, made fit to be printed."""

from __future__ import annotations

_MOST = 5000


def cleaned(text: object, most: int = _MOST) -> str:
    """One line without control characters, which could move a terminal's cursor or set its title; cut where it is long.

    Args:
        text: What has come.
        most: The most characters to keep.

    Example:
        >>> cleaned("worker 1\\x1b[2J\\n")
        'worker 1\\\\x1b[2J\\\\n'
    """
    words = text if isinstance(text, str) else str(text)
    kept = words if len(words) <= most else f"{words[:most]}..."
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in kept)


def listed(names: list[str], more: int = 0, shown: int = 20) -> str:
    """Names for a message, the first ones of many.

    Args:
        names: The names.
        more: How many there are beside them.
        shown: How many to name.

    Example:
        >>> listed(["a", "b"]), listed(["a", "b", "c"], shown=2)
        ('a, b', 'a, b and 1 more')
    """
    more += max(0, len(names) - shown)
    return ", ".join(names[:shown]) + (f" and {more} more" if more else "")


def whole_number(text: str) -> int | None:
    """The number from 0 that a text is; None if it is none, or far too large.

    Example:
        >>> [whole_number(text) for text in ("12", "-1", "\u00b2", "", "9" * 5000)]
        [12, None, None, None, None]
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None
