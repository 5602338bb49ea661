"""Workers that die while the others go on: each is started again alone, as long as the budget lasts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tfdist.launch.failure import Failure
from tfdist.launch.group import ProcessGroup
from tfdist.launch.process import Process
from tfdist.launch.restarts import Replacement


@dataclass(frozen=True)
class Loss:
    """A worker that has died and that the others can do without for a while.

    Attributes:
        failure: what became of it.
        lived: for how many seconds it had existed.
        left: how many workers there are without it, those included that are about to be started again.
    """

    failure: Failure
    lived: float
    left: int


# What to do about a loss: None leaves the place empty.
Replace = Callable[[Loss], Replacement | None]


class Replacements:
    """Fills the places of workers that have died.

    Args:
        group: the processes.
        ask: decides about a loss.
        worth_waiting: for how many seconds it pays to wait with a start.

    Example:
        >>> replacements = Replacements(group, lambda loss: Replacement(1, 0.0), lambda: 0.0)
        >>> if replacements.take(process):
        ...     replacements.start_due()
    """

    def __init__(self, group: ProcessGroup, ask: Replace, worth_waiting: Callable[[], float]) -> None:
        self._group = group
        self._ask = ask
        self._worth_waiting = worth_waiting
        self._pending: dict[Process, tuple[Replacement, float]] = {}

    def take(self, process: Process) -> bool:
        """Takes care of a process that has failed. False: nobody is left or about to come, and the training is lost."""
        others = [other for other in self._group.processes if other.plan.is_replaceable and other is not process]
        left = sum(other.status is None or other in self._pending for other in others)
        assert process.status is not None
        decision = self._ask(Loss(self._group.failure(process, process.status), process.lived, left))
        if decision is None:
            return left > 0
        process.kill()  # its helpers: they may hold its port
        self._pending[process] = decision, time.monotonic()
        return True

    def start_due(self) -> bool:
        """Starts what is due by now; returns whether a place was empty that is being filled.

        Raises:
            OSError: a process could not be started.
        """
        was_empty = bool(self._pending)
        for process, (replacement, since) in list(self._pending.items()):
            wait = max(replacement.delay, self._worth_waiting())
            if process.is_over and time.monotonic() - since >= wait:
                del self._pending[process]
                self._group.replace(process, replacement.number)
        return was_empty
