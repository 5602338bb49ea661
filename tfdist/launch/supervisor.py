"""The main loop of a run: starts the processes, passes their output and signals on, and sees to it that all end."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tfdist.launch.failure import Failure, choose, exit_code
from tfdist.launch.guardian import Guardian
from tfdist.launch.plan import ProcessPlan
from tfdist.launch.process import Process
from tfdist.launch.signals import SignalInbox
from tfdist.launch.terminal import Terminal

_TICK = 0.02
# After a failure that looks like the consequence of another: how long the culprit may take to end as well.
_MOMENT = 2.0
# Once a peer has failed nothing can be saved any more; TensorFlow swallows SIGTERM, so most of this is waiting.
_FAILURE_GRACE = 2.0
# Wrappers such as `uv run` pass the Ctrl-C on that we already got from the terminal.
_SAME_KEY_PRESS = 0.3
_TAIL_LINES = 200
# More than a pipe or a pseudo-terminal holds when its process ends. Helpers may go on printing into it for ever.
_LAST_CHUNKS = 64
_LAST_BYTES = 256 * 1024


class Supervisor:
    """Runs the processes of a plan to their end.

    Args:
        plans: the processes, that with rank 0 first.
        log_dir: folder of the logs; it exists.
        terminal: where output and messages go.
        grace: seconds between a signal that is passed on and SIGKILL.

    Example:
        >>> Supervisor(plans, Path("logs"), terminal, grace=10).run()
        0
    """

    def __init__(self, plans: Sequence[ProcessPlan], log_dir: Path, terminal: Terminal, grace: float) -> None:
        self._terminal = terminal
        self._grace = grace
        self._processes = [Process(plan, log_dir) for plan in plans]
        self._selector = selectors.DefaultSelector()
        self._failures: list[Failure] = []
        self._first_failure_at = 0.0
        self._interrupt: signal.Signals | None = None
        self._interrupted_at = 0.0
        self._interrupted: list[Process] = []
        self._stopping = False
        self._trained_at: float | None = None
        self._released = False
        self._kill_at: float | None = None

    def run(self) -> int:
        """Starts all processes and returns the exit code of the run once none of them exists any more.

        Raises:
            OSError: a process could not be started; those already started have been killed.
        """
        with SignalInbox() as inbox, Guardian() as guardian, self._selector:
            started: list[Process] = []
            try:
                for process in self._processes:
                    self._start(process)
                    started.append(process)
                    guardian.add(process.group)
                while any(not process.is_over for process in started):
                    self._pass_on_output()
                    self._look_after(started, guardian)
                    self._obey(inbox.take())
                    self._decide()
            finally:
                for process in started:
                    process.kill()
                while any(not process.is_over for process in started):
                    self._look_after(started, guardian)
                    time.sleep(_TICK)
                for process in self._processes:
                    process.close()
        return self._conclude()

    def _start(self, process: Process) -> None:
        live = self._terminal.is_tty and process is self._processes[0]
        process.start(self._terminal.size_inside(process.plan.name) if live else None)
        if process.output is not None:
            self._selector.register(process.output, selectors.EVENT_READ, process)

    def _pass_on_output(self) -> None:
        for key, _ in self._selector.select(_TICK):
            self._hear(key.data)

    def _hear(self, process: Process) -> bytes:
        descriptor = process.output
        data = process.read()
        if process.output is None:
            self._selector.unregister(descriptor)  # type: ignore[arg-type]
        self._terminal.feed(process.plan.name, data, final=process.output is None)
        return data

    def _look_after(self, started: Sequence[Process], guardian: Guardian) -> None:
        for process in started:
            if process.is_over:
                continue
            if process.poll() and process.status != 0 and not self._stopping:
                self._note_failure(process)
            if process.is_over:
                guardian.remove(process.group)
                self._hear_the_rest(process)

    def _hear_what_is_there(self, process: Process) -> None:
        heard = 0
        for _ in range(_LAST_CHUNKS):
            if process.output is None or heard >= _LAST_BYTES:
                return
            data = self._hear(process)
            if not data:
                return
            heard += len(data)

    def _hear_the_rest(self, process: Process) -> None:
        self._hear_what_is_there(process)
        if process.output is not None:
            self._selector.unregister(process.output)
            process.close_output()
            self._terminal.feed(process.plan.name, b"", final=True)

    def _note_failure(self, process: Process) -> None:
        assert process.status is not None
        self._hear_what_is_there(process)
        self._first_failure_at = self._first_failure_at or time.monotonic()
        tail = process.tail(_TAIL_LINES)
        self._failures.append(Failure(process.plan.name, process.status, tail, str(process.log_path)))

    def _obey(self, signals: Sequence[signal.Signals]) -> None:
        for number in signals:
            if number == signal.SIGWINCH:
                first = self._processes[0]
                if self._terminal.is_tty:
                    first.resize(self._terminal.size_inside(first.plan.name))
            elif self._interrupt is None:
                self._begin_interrupt(number)
            elif number == signal.SIGINT and time.monotonic() - self._interrupted_at > _SAME_KEY_PRESS:
                self._kill_at = time.monotonic()

    def _begin_interrupt(self, number: signal.Signals) -> None:
        self._interrupt, self._interrupted_at = number, time.monotonic()
        self._interrupted = [process for process in self._processes if process.status is None]
        again = "; press Ctrl-C again to kill them now" if number == signal.SIGINT else ""
        count = f"{len(self._interrupted)} process{'' if len(self._interrupted) == 1 else 'es'}"
        self._terminal.message(f"{number.name} received and passed on to {count} (SIGKILL in {self._grace:g} s{again})")
        self._stop(number, self._grace)

    def _stop(self, number: signal.Signals, grace: float) -> None:
        self._stopping = True
        for process in self._processes:
            if process.status is None:
                process.signal(number)
        deadline = time.monotonic() + grace
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)

    def _decide(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            for process in self._processes:
                process.kill()
        if self._failures and not self._stopping:
            has_culprit = not choose(self._failures).is_consequence
            if has_culprit or now - self._first_failure_at > _MOMENT:
                self._stop(signal.SIGTERM, min(self._grace, _FAILURE_GRACE))
        trainers = (process for process in self._processes if process.plan.trains)
        if not (self._failures or self._released) and all(process.status is not None for process in trainers):
            self._trained_at = self._trained_at or now
            self._release(now - self._trained_at)

    def _release(self, since_training: float) -> None:
        """Ends what outlasts the training: parameter servers serve for ever, an evaluator may watch for ever."""
        evaluates = any(p.plan.job == "evaluator" and p.status is None for p in self._processes)
        if evaluates and (self._stopping or since_training < self._grace):
            return  # it may have the last checkpoint to evaluate, or has its signal already
        self._released = True
        if evaluates:
            self._terminal.message(
                f"the evaluator still runs {self._grace:g} s after the end of the training and is stopped now; "
                "a longer --grace gives it more time"
            )
        self._stop(signal.SIGTERM, min(self._grace, _FAILURE_GRACE))

    def _conclude(self) -> int:
        if self._failures:
            failure = choose(self._failures)
            self._terminal.message(failure.report())
            return failure.exit_code
        codes = {process.status for process in self._interrupted if process.plan.job != "ps"}
        if self._interrupt is None or not codes:
            return 0
        if len(codes) == 1 and (code := codes.pop()) is not None and code >= 0:
            return code  # all ended by themselves and agree, for instance on "saved, start me again"
        return exit_code(-self._interrupt)
