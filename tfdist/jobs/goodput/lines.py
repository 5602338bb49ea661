"""What the lines of the chief tell: how far it was, and what its time went into since the line before."""

from __future__ import annotations

from dataclasses import dataclass, field

from tfdist.jobs.status import is_number
from tfdist.supervision import time_spent
from tfdist.supervision.events import Event


@dataclass(frozen=True)
class Line:
    """A line of progress.

    Attributes:
        process: who has written it: name, host and process id.
        fit: number of the fit, in its process.
        trained: steps of this fit that the process has done.
        spent: what the time of its fits has gone into so far, in seconds; empty in the logs of older versions.
    """

    process: tuple[str, str, str]
    fit: int = 1
    trained: int = 0
    spent: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, event: Event) -> Line:
        """From an event of progress; what is damaged counts as nothing.

        Example:
            >>> Line.of({"name": "chief", "pid": 7, "fit": 2, "trained": "many", "spent": {"steps": 1.5}}).trained
            0
        """
        spent = event.get("spent")
        known = (*time_spent.KINDS, time_spent.WAITING)
        return cls(
            (event["name"], str(event.get("host")), str(event.get("pid"))),
            max(_whole(event.get("fit")), 1),
            _whole(event.get("trained")),
            {kind: max(spent[kind], 0.0) for kind in known if is_number(spent.get(kind))}
            if isinstance(spent, dict)
            else {},
        )

    def follows(self, before: Line | None) -> bool:
        """Whether the same process has written the line before, so that its times go on."""
        return (
            before is not None
            and before.process == self.process
            and all(self.spent.get(kind, 0.0) >= seconds for kind, seconds in before.spent.items())
        )

    def since(self, before: Line | None) -> dict[str, float]:
        """Seconds of each kind since the line before of the same process, or since the process' first fit."""
        earlier = before.spent if before is not None and self.follows(before) else {}
        return {kind: seconds - earlier.get(kind, 0.0) for kind, seconds in self.spent.items()}


def share_of_waiting(spent: dict[str, float]) -> float:
    """The share of the time of steps in which a process has waited for data.

    Example:
        >>> share_of_waiting({"steps": 10.0, "waiting_for_data": 4.0}), share_of_waiting({})
        (0.4, 0.0)
    """
    steps = spent.get(time_spent.STEPS, 0.0)
    return min(spent.get(time_spent.WAITING, 0.0) / steps, 1.0) if steps > 0 else 0.0


def _whole(value: object) -> int:
    return int(value) if is_number(value) and value >= 0 else 0  # type: ignore[arg-type, operator]
