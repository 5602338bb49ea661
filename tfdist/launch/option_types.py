"""Values of the command's options that click has no type for."""

from __future__ import annotations

from typing import Any

import click

AUTO = "auto"


class CountOrAuto(click.ParamType):
    """A whole number, or "auto".

    Args:
        minimum: the least number allowed.

    Example:
        >>> CountOrAuto(1).convert("4", None, None)
        4
    """

    name = "K|auto"

    def __init__(self, minimum: int) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == AUTO:
            return value
        try:
            count = int(value)
        except ValueError:
            self.fail(f"{value!r}: expected a whole number or auto.", param, ctx)
        if count < self._minimum:
            self.fail(f"{value}: expected at least {self._minimum}, or auto.", param, ctx)
        return count


class SecondsOrAuto(click.ParamType):
    """A positive number of seconds, or None for "auto".

    Example:
        >>> SecondsOrAuto().convert("2.5", None, None), SecondsOrAuto().convert("auto", None, None)
        (2.5, None)
    """

    name = "SECONDS|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        if value == AUTO:
            return None
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if not seconds > 0:
            self.fail(f"{value!r}: expected a positive number of seconds, or auto.", param, ctx)
        return seconds


class WorkerRange(click.ParamType):
    """A number of workers, or the fewest and the most as MIN:MAX.

    Example:
        >>> WorkerRange().convert("1:3", None, None), WorkerRange().convert("2", None, None)
        ((1, 3), (2, 2))
    """

    name = "N|MIN:MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        fewest, separator, most = value.partition(":")
        try:
            bounds = (int(fewest), int(most if separator else fewest))
        except ValueError:
            self.fail(f"{value!r} is not a valid integer. Expected a number, or MIN:MAX such as 1:3.", param, ctx)
        if separator and not 1 <= bounds[0] <= bounds[1]:
            self.fail(f"{value!r}: expected MIN:MAX with 1 <= MIN <= MAX, for example 1:3.", param, ctx)
        return bounds
