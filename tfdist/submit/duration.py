"""Lengths of time as people write them, and as Slurm does."""

from __future__ import annotations

import re

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_WRITTEN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")


def parse(text: str) -> int:
    """Seconds of "90m", "1d12h" or, as for Slurm, "1-12:00:00". A number alone could be anything, and is refused.

    Raises:
        ValueError: it is none, or no time at all.

    Example:
        >>> parse("1h30m"), parse("1-12:00:00")
        (5400, 129600)
    """
    match = _WRITTEN.fullmatch(text) or _CLOCK.fullmatch(text)
    numbers = [int(number or 0) for number in match.groups()] if match else []
    seconds = sum(number * unit for number, unit in zip(numbers, _UNITS.values(), strict=False))
    if seconds == 0:
        raise ValueError(f"Received: {text!r}. Expected: a time such as 2h, 90m, 1d12h or 01:30:00, with its unit")
    return seconds


def for_slurm(seconds: int) -> str:
    """The form days-hours:minutes:seconds.

    Example:
        >>> for_slurm(129600), for_slurm(90)
        ('1-12:00:00', '0-00:01:30')
    """
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    day, hour = divmod(hours, 24)
    return f"{day}-{hour:02}:{minute:02}:{second:02}"


def in_words(seconds: float) -> str:
    """About how long it is.

    Example:
        >>> in_words(42.3), in_words(250), in_words(7200), in_words(200000)
        ('42 s', '4 min', '2.0 h', '2.3 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"
