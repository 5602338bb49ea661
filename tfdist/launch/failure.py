"""Which of several failed processes a run names, and how it words that."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

# What TensorFlow raises in the healthy processes once a peer is gone.
_CONSEQUENCES = ("UnavailableError", "AbortedError", "CancelledError")
# The line that ends a Python traceback: "package.module.SomeError: text".
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout))(?::|$)")

_LINES_SHOWN = 20
_EXCEPTION_WIDTH = 160


@dataclass(frozen=True)
class Failure:
    """A process that ended with something else than 0, or that stood still.

    Attributes:
        name: for people, such as "worker 1".
        status: what `subprocess` calls returncode: the exit code, or minus the number of the signal.
        tail: the last lines that it printed, more than are shown: TensorFlow writes long texts behind the name of an
            exception.
        log_path: where all of them are.
        hang: for a process that did not end but stood still, what was observed, such as "stands still at step 3".
    """

    name: str
    status: int
    tail: tuple[str, ...] = ()
    log_path: str = ""
    hang: str = ""

    @property
    def exit_code(self) -> int:
        """As a shell reports it: 128 + signal for a killed process."""
        return exit_code(self.status)

    @property
    def is_consequence(self) -> bool:
        """Whether its last exception is one that TensorFlow raises because another process went away."""
        match = _EXCEPTION.match(self.exception)
        return match is not None and match.group(1) in _CONSEQUENCES

    @property
    def exception(self) -> str:
        """The last line that looks like the end of a traceback; empty if there is none."""
        return next((line for line in reversed(self.tail) if _EXCEPTION.match(line)), "")

    @property
    def cause(self) -> str:
        """What happened, in few words.

        Example:
            >>> Failure("worker 1", 1, ("ValueError: no such column",)).cause
            'worker 1 failed with exit code 1 (ValueError: no such column)'
        """
        if self.hang:
            return f"{self.name} {self.hang}"
        if self.status < 0:
            return f"{self.name} was killed by {signal_name(-self.status)}"
        exception = self.exception
        if len(exception) > _EXCEPTION_WIDTH:
            exception = exception[:_EXCEPTION_WIDTH] + "…"
        return f"{self.name} failed with exit code {self.status}" + (f" ({exception})" if exception else "")

    def report(self) -> str:
        """What the launcher says at the end of the run."""
        lines = "".join(f"\n  {line}" for line in self.tail[-_LINES_SHOWN:]) or "\n  (it printed nothing)"
        return f"{self}; its last lines:{lines}\ntfdist: its complete log: {self.log_path}"

    def __str__(self) -> str:
        if self.hang:
            return self.cause
        if self.status >= 0:
            return f"{self.name} failed with exit code {self.status}"
        hint = "; the kernel does that when memory runs out" if self.status == -signal.SIGKILL else ""
        return f"{self.name} was killed by {signal_name(-self.status)} (exit code {self.exit_code}{hint})"


def choose(failures: Sequence[Failure]) -> Failure:
    """The failure to name: the first one that is not the mere consequence of another, otherwise the first.

    Args:
        failures: at least one, in the order in which the processes ended, all within the same moment.

    Example:
        >>> str(choose([Failure("worker 0", 1, ("UnavailableError: peer gone",)), Failure("worker 1", 3)]))
        'worker 1 failed with exit code 3'
    """
    return next((failure for failure in failures if not failure.is_consequence), failures[0])


def exit_code(status: int) -> int:
    """A `subprocess` returncode as a shell's exit code."""
    return status if status >= 0 else 128 - status


def signal_name(number: int) -> str:
    """ "SIGTERM" for 15; "signal 63" where there is no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
