"""When the events of a run happened: their times, without what the clock of a host has jumped."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.jobs.status import is_number
from tfdist.supervision.events import Event

# Smaller differences are those of a clock that is kept in step, and of lines that were written late.
_JUMP = 5.0
# What is later than now by more was written by nobody, and no host has been up for longer.
_FUTURE, _LONGEST = 86400.0, 1e9


def tells_of_chief(event: Event) -> bool:
    """Whether this is a line of progress of the process whose progress counts for the run: that with rank 0.

    Example:
        >>> [tells_of_chief({"event": "progress", "rank": rank}) for rank in (0, 1)]
        [True, False]
    """
    return event["event"] == "progress" and not event.get("rank")


def without_the_future(events: Sequence[Event], now: float) -> list[Event]:
    """The events that can have happened.

    Args:
        events: of a run.
        now: in seconds since 1970.

    Example:
        >>> without_the_future([{"time": 5.0}, {"time": 9e9}], now=10.0)
        [{'time': 5.0}]
    """
    return [event for event in events if event["time"] <= now + _FUTURE]


def corrected_times(events: Sequence[Event]) -> list[float]:
    """The time of each event, in their order; none is before the one above it.

    Two lines of the chief on one host tell by its other clock, which nobody sets, how much time has passed. If the time
    of day tells something else, it was set, and all later times are moved. What was written in between happened in
    between. Where no such line tells it, a clock that was set back stands still.

    Args:
        events: of a run, in the order of the log.

    Example:
        >>> def line(time, clock):
        ...     return {"time": time, "name": "chief", "event": "progress", "host": "a", "clock": clock}
        >>> corrected_times([line(100.0, 1.0), line(3700.0, 2.0), line(3710.0, 12.0)])
        [100.0, 101.0, 111.0]
    """
    times: list[float] = []
    shift = 0.0
    # The last line of the chief with both clocks: where it is, its host, its other clock.
    last: tuple[int, str, float] | None = None
    for number, event in enumerate(events):
        told = event["time"] + shift
        host, clock = event.get("host"), event.get("clock")
        if tells_of_chief(event) and isinstance(host, str) and is_number(clock) and 0 <= clock < _LONGEST:
            if last is not None and last[1] == host and clock >= last[2]:
                expected = times[last[0]] + clock - last[2]
                if abs(told - expected) > _JUMP:
                    shift, told = shift + expected - told, expected
                    times[last[0] + 1 :] = [min(time, told) for time in times[last[0] + 1 :]]
            last = number, host, clock
        times.append(max(told, times[-1]) if times else told)
    return times
