"""The result of a drill for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tfdist.launch.drill.outcome import IDENTICAL, Outcome

_SHOWN_DETAILS = 5
_COLUMNS = ("detected after", "training again after", "steps redone")


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints the table, and below it what differs or went wrong."""
    console.print(Group(_table(outcomes), *map(_details, (row for row in outcomes if row.details))))


def as_json(outcomes: Sequence[Outcome]) -> str:
    """All outcomes as JSON, with all details.

    Example:
        >>> as_json([])
        '{"identical": true, "rows": []}'
    """
    rows = []
    for outcome in outcomes:
        fields = asdict(outcome)
        rows.append({**fields.pop("recovery"), **fields})
    return json.dumps({"identical": all(row.result == IDENTICAL for row in outcomes), "rows": rows})


def seconds(value: float | None) -> str:
    """A duration as it stands in the table.

    Example:
        >>> seconds(3.14159), seconds(None)
        ('3.1 s', '-')
    """
    return "-" if value is None else f"{value:.1f} s"


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("fault", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    table.add_column("result", no_wrap=True)
    for outcome in outcomes:
        back = outcome.recovery
        redone = "-" if back.steps_redone is None else str(back.steps_redone)
        style = "green" if outcome.result == IDENTICAL else "red"
        result = Text(outcome.result, style)
        table.add_row(outcome.title, seconds(back.detected), seconds(back.training_again), redone, result)
    return table


def _details(outcome: Outcome) -> RenderableType:
    hidden = len(outcome.details) - _SHOWN_DETAILS
    lines = [*outcome.details[:_SHOWN_DETAILS], *([f"and {hidden} more (--json shows all)"] if hidden > 0 else [])]
    return Text(f"{outcome.fault}: {outcome.result}" + "".join(f"\n  {line}" for line in lines))
