"""Starting the program of a plan: afresh, or forked from a process that has its imports behind it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Protocol

from tfdist.launch.guardian import Guardian
from tfdist.launch.kernel import death_pact
from tfdist.launch.plan import ProcessPlan
from tfdist.launch.zygote import Zygote, ZygoteError, can_fork

# Programs that train sooner than this have not imported TensorFlow: there is nothing to gain.
_WORTHWHILE = 2.0
_LONGEST_WAIT = 10.0


class Program(Protocol):
    """A started program: leader of a process group of its own, child of this process."""

    pid: int

    def wait(self) -> int:
        """Waits for its end and returns what `subprocess` calls returncode."""


StartProgram = Callable[[ProcessPlan, int], Program]


def start_afresh(plan: ProcessPlan, output: int) -> subprocess.Popen[bytes]:
    """Starts a program in a new process.

    Args:
        plan: what to run.
        output: file descriptor for its standard output and error.

    Raises:
        OSError: the command cannot be run.

    Example:
        >>> start_afresh(plan, output=1).wait()
        0
    """
    die_with_launcher = death_pact(os.getpid())

    def before_exec() -> None:
        # Between fork and exec. The launcher has one thread only, so that Python is safe there.
        die_with_launcher()
        if plan.cpus:
            os.sched_setaffinity(0, plan.cpus)

    return spawn(plan, output, before_exec)


def spawn(plan: ProcessPlan, output: int, before_exec: Callable[[], None] | None = None) -> subprocess.Popen[bytes]:
    """Starts a program in a session of its own.

    Args:
        plan: the program, its arguments and environment.
        output: file descriptor for all that it prints.
        before_exec: runs between fork and exec; not where this process has several threads.

    Raises:
        OSError: the command cannot be run.
    """
    return subprocess.Popen(
        plan.command,
        env=dict(plan.env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=before_exec,
    )


class WarmStarts:
    """Starts programs afresh at first, and from a zygote once there is one.

    Args:
        guardian: ends the zygote if the launcher is killed.
        enabled: whether there may be a zygote at all.

    Example:
        >>> with Guardian() as guardian, WarmStarts(guardian, enabled=True) as starts:
        ...     program = starts.start(plan, output=1)
        ...     starts.prepare(9.0)  # once it trains, which took 9 s
    """

    def __init__(self, guardian: Guardian, enabled: bool) -> None:
        self._guardian = guardian
        self._enabled = enabled
        self._zygote: Zygote | None = None
        self._plan: ProcessPlan | None = None
        self._fresh_start = 0.0

    def __enter__(self) -> WarmStarts:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def start(self, plan: ProcessPlan, output: int) -> Program:
        """Starts a program in the quickest way there is.

        Raises:
            OSError: the command cannot be run.
        """
        self._plan = plan
        if self._zygote is not None and self._zygote.is_ready() and self._zygote.fits(plan.command, plan.env):
            try:
                return self._zygote.spawn(plan.env, plan.cpus, output)
            except ZygoteError:
                self._close()
        return start_afresh(plan, output)

    def prepare(self, fresh_start: float) -> None:
        """Makes the next start a warm one. To be called when the programs train: before, it would delay them.

        Args:
            fresh_start: seconds that a program needs, when started afresh, to have all its imports behind it.
        """
        if not self._enabled or self._zygote is not None or self._plan is None:
            return
        self._fresh_start = fresh_start
        if fresh_start < _WORTHWHILE or not can_fork(self._plan.command):
            self._enabled = False
            return
        try:
            self._zygote = Zygote(self._plan.command, self._plan.env)
        except OSError:
            self._enabled = False
        else:
            self._guardian.add(self._zygote.group)

    def worth_waiting(self) -> float:
        """For how many seconds after a failure it pays to wait with the next start: imports that are under way end
        sooner than new ones would."""
        if self._zygote is None or not self._zygote.is_importing():
            return 0.0
        self._zygote.hurry()
        return min(self._fresh_start, _LONGEST_WAIT)

    def _close(self) -> None:
        if self._zygote is not None:
            self._guardian.remove(self._zygote.group)
            self._zygote.close()
            self._zygote = None
