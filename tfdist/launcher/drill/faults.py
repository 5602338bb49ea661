"""Runs of a script under `tfdist run`, and the faults that disturb them in the middle of their training."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.checkpoint.manifest import MANIFEST_NAME, VARIABLE, committed_checkpoints
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import SignalInbox, end_within, spawn
from tfdist.launcher.policy import exit_code
from tfdist.supervision.events import Event, EventStream, of_kind

_TICK = 0.02
_END_DEADLINE = 3.0


class TrialError(RuntimeError):
    """A run did not come as far as it should have; the text says why."""


class Trial:
    """A run of the script under `tfdist run`, which ends with the `with` block.

    Args:
        arguments: what follows `tfdist run`, without --log-dir.
        folder: where its logs go, and what the launcher prints, to `launcher.log`.
        backups: folder of its backups.
        deadline: when it must have ended, on the clock of `time.monotonic`; may be `math.inf`.
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
        self._events: list[Event] = []

    def __enter__(self) -> Trial:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.backups.mkdir(parents=True, exist_ok=True)
        with (self.log_dir / "launcher.log").open("ab") as log:
            # Away from the terminal's Ctrl-C: it is ended in order, by __exit__.
            self._process = spawn(self._command, log.fileno(), {**os.environ, VARIABLE: str(self.backups.absolute())})
        self._guardian.add(self._process.pid)
        return self

    @property
    def events(self) -> list[Event]:
        """All events so far."""
        self._events += self._stream.read()
        return self._events

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
        while True:
            code = self.code  # first: what happens before the end is found even if that comes at once
            if condition(self.events):
                return
            if code is not None:
                raise TrialError(f"the run ended with exit code {code} before {what}")
            self._inbox.check()
            if time.monotonic() > self._deadline:
                waited = self._deadline - self._started
                raise TrialError(f"waited {waited:.0f} s (--timeout) in vain for {what}")
            time.sleep(_TICK)

    def sleep(self, seconds: float) -> None:
        """Waits a while, or until the run ends; raises as `wait_for`."""
        end = time.monotonic() + seconds
        self.wait_for(lambda _: time.monotonic() > end or self.code is not None, "its end")

    def wait(self) -> int:
        """Waits for the end of the run and returns its exit code; raises as `wait_for`."""
        self.wait_for(lambda _: self.code is not None, "its end")
        return exit_code(self._process.returncode)

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            end_within(_END_DEADLINE, self._process)  # killed, its guardian ends what it has started
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


# A backup to fall back on, one that is disturbed, and one after that.
FEWEST_SAVES = 3

_PART_OF_TRAINING = 0.4
_HANG_FACTOR = 3.0
_SHORTEST_HANG = 8.0
_LONGEST_HANG = 30.0


@dataclass(frozen=True)
class Rhythm:
    """How an undisturbed run saves.

    Attributes:
        saves: how many backups there were before the last step.
        steps: the last step.
        pause: seconds between two backups, usually.
        longest_pause: seconds between two backups at most.
    """

    saves: int
    steps: int
    pause: float
    longest_pause: float

    def strike_after(self, saves_before: int, saves_left: int) -> int:
        """The number of the backup after which to strike: in the middle of the training, rather early.

        Args:
            saves_before: how many backups a fault needs before it strikes.
            saves_left: how many it needs afterwards.

        Example:
            >>> Rhythm(saves=10, steps=100, pause=1.0, longest_pause=1.0).strike_after(1, 0)
            4
        """
        wanted = max(math.ceil(_PART_OF_TRAINING * self.saves), saves_before)
        return max(min(wanted, self.saves - saves_left), 1)

    @property
    def hang_timeout(self) -> float | None:
        """Seconds after which this script hangs for certain; None: as long as `tfdist run` waits without being told.

        Whatever a process does, it has done it between two backups, and reported several times meanwhile.
        """
        seconds = max(_HANG_FACTOR * self.longest_pause, _SHORTEST_HANG)
        return round(seconds, 1) if seconds < _LONGEST_HANG else None


def rhythm(events: Sequence[Event]) -> Rhythm:
    """How the run with these events has saved.

    Example:
        >>> rhythm([{"event": "saved", "step": step, "time": float(step)} for step in (10, 20, 30, 30)])
        Rhythm(saves=2, steps=30, pause=10.0, longest_pause=10.0)
    """
    saved = of_kind(events, "saved")
    steps = saved[-1]["step"] if saved else 0
    # The last step is saved twice, and a fault that strikes then might come too late.
    times = [event["time"] for event in saved]
    while saved and saved[-1]["step"] == steps:
        saved.pop()
    pauses = [later - earlier for earlier, later in itertools.pairwise(times[: len(saved) + 1])]
    return Rhythm(len(saved), steps, statistics.median(pauses) if pauses else 0.0, max(pauses, default=0.0))


def backup_folders(root: Path) -> list[Path]:
    """The folders below `root`, itself included, that hold complete checkpoints."""
    return sorted(Path(folder) for folder, _, _ in os.walk(root) if committed_checkpoints(folder))


def newest_checkpoint(root: Path) -> Path | None:
    """The folder of the checkpoint that was completed last, in any backup folder below `root`."""
    newest = [folder / committed_checkpoints(str(folder))[-1] for folder in backup_folders(root)]
    return max(newest, key=lambda folder: (folder / MANIFEST_NAME).stat().st_mtime_ns, default=None)


def largest_file(checkpoint: Path) -> Path:
    """The largest file of a checkpoint but its manifest, which is only there once all others are."""
    files = [path for path in checkpoint.iterdir() if path.name != MANIFEST_NAME]
    return max(files, key=lambda path: path.stat().st_size)


def flip_bit(checkpoint: Path) -> None:
    """Alters one bit in the middle of a checkpoint's largest file."""
    with largest_file(checkpoint).open("r+b") as file:
        middle = os.fstat(file.fileno()).st_size // 2
        file.seek(middle)
        (byte,) = file.read(1)
        file.seek(middle)
        file.write(bytes([byte ^ 1]))


def truncate(checkpoint: Path) -> None:
    """Cuts a checkpoint's largest file off in its middle."""
    path = largest_file(checkpoint)
    os.truncate(path, path.stat().st_size // 2)


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: for the command line, such as "kill-worker".
        title: for the table.
        strike: does it to a run; returns when it struck the training, as `time.time`.
        saves_before: how many backups it needs before it strikes.
        saves_left: how many it needs afterwards, before the training ends.
        ends_run: whether the run has to be started again by hand.
        shrinks: whether the run is to go on with fewer workers, and to grow again.
    """

    name: str
    title: str
    strike: Callable[[Trial], float]
    saves_before: int = 1
    saves_left: int = 1
    ends_run: bool = False
    shrinks: bool = False


def faults_for(workers: int) -> list[Fault]:
    """The faults that there are with so many workers; a single one is the chief.

    Example:
        >>> [fault.name for fault in faults_for(1)][:2]
        ['kill-chief', 'hang']
    """
    return [fault for fault in FAULTS if workers > 1 or fault.name not in ("kill-worker", "shrink")]


def _send(rank: int, number: signal.Signals, trial: Trial) -> float:
    struck = time.time()
    trial.signal(trial.names[rank], number)
    return struck


_kill_worker = functools.partial(_send, -1, signal.SIGKILL)
_kill_chief = functools.partial(_send, 0, signal.SIGKILL)
_hang = functools.partial(_send, -1, signal.SIGSTOP)


def _damage_newest(damage: Callable[[Path], None], trial: Trial) -> float:
    trial.wait_for(lambda _: _has_another(newest_checkpoint(trial.backups)), "there was an older backup, too")
    # While they are stopped, nobody writes a newer checkpoint behind our back or removes the one that is damaged.
    for name in trial.names:
        trial.signal(name, signal.SIGSTOP)
    newest = newest_checkpoint(trial.backups)
    if newest is None:
        raise TrialError("there was no backup to damage")
    damage(newest)
    struck = _kill_chief(trial)
    with contextlib.suppress(TrialError):  # the launcher may have ended them already
        for name in trial.names[1:]:
            trial.signal(name, signal.SIGCONT)
    return struck


def _has_another(checkpoint: Path | None) -> bool:
    return checkpoint is not None and len(committed_checkpoints(str(checkpoint.parent))) > 1


def _fill_disk(trial: Trial) -> float:
    chief = trial.names[0]
    newest = newest_checkpoint(trial.backups)
    if newest is None:
        raise TrialError("there was no backup whose size tells what does not fit")
    # Too small for the largest file of a checkpoint, large enough for a line in the event log.
    trial.limit_file_size(chief, max(path.stat().st_size for path in newest.iterdir()) * 3 // 4)
    struck = time.time()
    trial.wait_for(lambda events: of_kind(events, "not saved") or of_kind(events, "failure"), "a backup failed")
    if not of_kind(trial.events, "not saved"):
        return struck  # something else could not be written, by ModelCheckpoint say, and has ended the process
    trial.limit_file_size(chief, None)
    trial.wait_for(_saved_again, "a backup succeeded again")
    return _kill_chief(trial)


def _saved_again(events: list[Event]) -> bool:
    kinds = [event["event"] for event in events]
    return "saved" in kinds[kinds.index("not saved") :]


def _preempt(trial: Trial) -> float:
    struck = time.time()
    trial.terminate()
    return struck


FAULTS = (
    Fault("kill-worker", "kill a worker", _kill_worker),
    Fault("kill-chief", "kill the chief", _kill_chief),
    Fault("hang", "hang a worker", _hang),
    Fault("corrupt", "corrupt the newest backup", functools.partial(_damage_newest, flip_bit), saves_before=2),
    Fault("truncate", "truncate the newest backup", functools.partial(_damage_newest, truncate), saves_before=2),
    Fault("disk-full", "fill the disk for a while", _fill_disk, saves_left=2),
    Fault("preempt", "SIGTERM, run again", _preempt, ends_run=True),
    Fault("shrink", "one worker fewer, then grow", _kill_worker, saves_left=2, shrinks=True),
)
