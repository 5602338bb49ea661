"""The outcome of each fault: the rows of the drill's table, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tfdist.supervision.events import Event, of_kind

IDENTICAL = "identical"
DIFFERS = "differs"
NOT_COMPARABLE = "not comparable"
# The run did not come to its end, or the fault could not strike.
FAILED = "failed"
# The fault struck when nothing was left to train.
NOT_TESTED = "not tested"
_SHOWN_DETAILS = 5
_COLUMNS = ("detected after", "training again after", "steps redone")


@dataclass(frozen=True)
class Recovery:
    """How a run recovered from a fault.

    Attributes:
        detected: seconds from the fault until it was noticed; None: it never was.
        training_again: seconds from the fault until the training went on.
        steps_redone: steps that were done again.
    """

    detected: float | None = None
    training_again: float | None = None
    steps_redone: int | None = None


@dataclass(frozen=True)
class Outcome:
    """One row of the table: a fault and its outcome.

    Attributes:
        fault: name of the fault.
        title: of the fault, for people.
        result: one of the results of this module.
        recovery: how the run recovered.
        details: what differs, or what went wrong, a line each.
    """

    fault: str
    title: str
    result: str
    recovery: Recovery = Recovery()
    details: tuple[str, ...] = ()


def recovery(events: Sequence[Event], struck: float) -> Recovery:
    """How a run with these events recovered.

    Args:
        events: of the run; if it was started again by hand, of both runs.
        struck: when the fault struck.

    Example:
        >>> recovery(
        ...     [
        ...         {"event": "failure", "time": 10.25},
        ...         {"event": "training-again", "time": 13.0, "steps_redone": 4},
        ...     ],
        ...     struck=10.0,
        ... )
        Recovery(detected=0.25, training_again=3.0, steps_redone=4)
    """
    later = [event for event in events if event["time"] >= struck]
    noticed = of_kind(later, "preempted")
    if noticed:
        # The events of the processes have a step, that of the launcher has none.
        steps = [event["step"] for event in noticed if "step" in event]
        again = of_kind(later, "resumed")
        redone = max(steps) - again[0]["step"] if steps and again else None
    else:
        noticed = of_kind(later, "failure")
        again = of_kind(later, "training-again")
        redone = sum(event["steps_redone"] for event in again) if again else None
    return Recovery(_first(noticed, struck), _first(again, struck), redone)


def was_tested(events: Sequence[Event], struck: float, steps: int) -> bool:
    """Whether there was something left to train when a fault struck: the training went on, or was to.

    Args:
        events: as in `recovery`.
        struck: when the fault struck.
        steps: of the whole training.

    Example:
        >>> was_tested([{"event": "failure", "time": 10.25}, {"event": "complete", "time": 12.0}], 10.0, steps=80)
        False
    """
    later = [event for event in events if event["time"] >= struck]
    stopped = [event["step"] for event in of_kind(later, "preempted") if "step" in event]
    return max(stopped) < steps if stopped else bool(of_kind(later, "training-again"))


def _first(events: Sequence[Event], since: float) -> float | None:
    return round(events[0]["time"] - since, 2) if events else None


def show_table(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints the table, and below it what differs or went wrong."""
    console.print(Group(_table(outcomes), *map(_details, (row for row in outcomes if row.details))))


def to_json(outcomes: Sequence[Outcome]) -> str:
    """All outcomes as JSON, with all details.

    Example:
        >>> to_json([])
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
