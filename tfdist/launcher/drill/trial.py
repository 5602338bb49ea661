"""One run of the user's script under `tfdist run`, in a process of its own, with its events."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tfdist.checkpoint.folder_lock import VARIABLE
from tfdist.launcher.failure import exit_code
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import SignalInbox, spawn
from tfdist.supervision.events import Event, EventStream, of_kind

_TICK = 0.02
_END_DEADLINE = 3.0


class TrialError(RuntimeError):
    """A run did not come as far as it should have; the text says why."""


class Interrupted(Exception):
    """The drill itself got a signal.

    Attributes:
        signal: which one.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


class Trial:
    """A run of the script under `tfdist run`, which ends with the `with` block.

    Args:
        arguments: what follows `tfdist run`, without --log-dir.
        folder: where its logs go, and what the launcher prints, to `launcher.log`.
        backups: folder of its backups.
        deadline: when it must have ended, on the clock of `time.monotonic`.
        guardian: ends it if this process is killed.
        inbox: the signals to this process.

    Attributes:
        backups: folder of its backups.
        log_dir: folder of its logs.

    Raises:
        OSError: on entry, if it cannot be started.

    Example:
        >>> arguments = ["-n", "2", "train.py"]
        >>> with Trial(arguments, folder, backups, deadline, guardian, inbox) as trial:  # doctest: +SKIP
        ...     trial.wait_for(lambda events: of_kind(events, "saved"), "its first backup")
        ...     trial.signal(trial.names[-1], signal.SIGKILL)
        ...     code = trial.wait()
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        backups: Path,
        deadline: float,
        guardian: Guardian,
        inbox: SignalInbox,
    ) -> None:
        self.backups = backups
        self.log_dir = folder
        self._command = [sys.executable, "-m", "tfdist", "run", "--log-dir", str(folder), *arguments]
        self._deadline = deadline
        self._started = time.monotonic()
        self._guardian = guardian
        self._inbox = inbox
        self._stream = EventStream(folder)

    def __enter__(self) -> Trial:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.backups.mkdir(parents=True, exist_ok=True)
        with (self.log_dir / "launcher.log").open("ab") as log:
            # Away from the terminal's Ctrl-C: it is ended in order, by __exit__.
            env = {**os.environ, VARIABLE: str(self.backups.absolute())}
            self._process = spawn(self._command, log.fileno(), env)
        self._guardian.add(self._process.pid)
        return self

    @property
    def events(self) -> list[Event]:
        """All events so far."""
        self._stream.read()
        return self._stream.events

    @property
    def processes(self) -> dict[str, int]:
        """The process groups of the current attempt by name, rank 0 first."""
        starts = of_kind(self.events, "start")
        return starts[-1]["processes"] if starts else {}

    @property
    def names(self) -> list[str]:
        """The names of the processes, rank 0 first."""
        return list(self.processes)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to one of the processes and to all that it has started.

        Raises:
            TrialError: it does not exist any more.
        """
        try:
            os.killpg(self.processes[name], number)
        except ProcessLookupError:
            raise TrialError(f"{name} had ended before the fault struck") from None

    def limit_file_size(self, name: str, size: int | None) -> None:
        """Lets a process write no file beyond a size; None: any size.

        A process that is not there any more has no files to limit.
        """
        pid = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    def terminate(self) -> None:
        """Sends SIGTERM to the launcher, as a scheduler does that wants the machine back."""
        self._process.terminate()

    def kill(self) -> None:
        """Kills the launcher, which cannot end what it has started."""
        self._process.kill()

    @property
    def code(self) -> int | None:
        """The exit code of the launcher; None while it runs."""
        returned = self._process.poll()
        return None if returned is None else exit_code(returned)

    def wait_for(self, condition: Callable[[list[Event]], object], what: str) -> None:
        """Waits until the events meet a condition.

        Raises:
            TrialError: the run has ended before, or its time is up.
            Interrupted: this process got a signal.
        """
        while not condition(self.events):
            if self._process.poll() is not None:
                if condition(self.events):
                    return
                raise TrialError(f"the run ended with exit code {exit_code(self._process.returncode)} before {what}")
            self._tick(what)

    def sleep(self, seconds: float) -> None:
        """Waits a while, or until the run ends; raises as `wait_for`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            self._tick("its end")

    def wait(self) -> int:
        """Waits for the end of the run and returns its exit code; raises as `wait_for`."""
        while self._process.poll() is None:
            self._tick("its end")
        self._stream.read()
        return exit_code(self._process.returncode)

    def _tick(self, what: str) -> None:
        number = self._inbox.take_stop()
        if number is not None:
            raise Interrupted(number)
        if time.monotonic() > self._deadline:
            waited = self._deadline - self._started
            raise TrialError(f"waited {waited:.0f} s (--timeout) in vain for {what}")
        time.sleep(_TICK)

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_END_DEADLINE)
            except subprocess.TimeoutExpired:
                # Its guardian then ends what it has started.
                self._process.kill()
                # It cannot be waited for while it waits for a disk that does not answer (state D).
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_DEADLINE)
        self._guardian.remove(self._process.pid)
        end = time.monotonic() + _END_DEADLINE
        while any(map(_exists, self.processes.values())) and time.monotonic() < end:
            time.sleep(_TICK)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # or the number is somebody else's by now
        return False
    return True
