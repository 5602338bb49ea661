"""What came of one fault: a row of the drill's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.supervision.event_stream import Event, of_kind

IDENTICAL = "identical"
DIFFERS = "differs"
NOT_COMPARABLE = "not comparable"
# The run did not come to its end, or the fault could not strike.
FAILED = "failed"
# It struck when nothing was left to train.
NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Recovery:
    """How a run came back.

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
    """A row.

    Attributes:
        fault: name of the fault.
        title: of the fault, for people.
        result: one of the results of this module.
        recovery: how the run came back.
        details: what differs, or what went wrong, a line each.
    """

    fault: str
    title: str
    result: str
    recovery: Recovery = Recovery()
    details: tuple[str, ...] = ()


def recovery(events: Sequence[Event], struck: float) -> Recovery:
    """How a run with these events came back.

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
        # The processes tell their step, the launcher does not.
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
