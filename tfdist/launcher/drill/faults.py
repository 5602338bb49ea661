"""The faults of a drill: what each of them does to a run in the middle of its training, and when."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.checkpoint.manifest import MANIFEST_NAME, committed_checkpoints
from tfdist.launcher.drill.trial import Trial, TrialError
from tfdist.supervision.events import Event, of_kind

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
    """

    name: str
    title: str
    strike: Callable[[Trial], float]
    saves_before: int = 1
    saves_left: int = 1
    ends_run: bool = False


def faults_for(workers: int) -> list[Fault]:
    """The faults that there are with so many workers; a single one is the chief.

    Example:
        >>> [fault.name for fault in faults_for(1)][:2]
        ['kill-chief', 'hang']
    """
    return [fault for fault in FAULTS if workers > 1 or fault.name != "kill-worker"]


def _kill_worker(trial: Trial) -> float:
    return _send(trial, trial.names[-1], signal.SIGKILL)


def _kill_chief(trial: Trial) -> float:
    return _send(trial, trial.names[0], signal.SIGKILL)


def _hang(trial: Trial) -> float:
    return _send(trial, trial.names[-1], signal.SIGSTOP)


def _send(trial: Trial, name: str, number: signal.Signals) -> float:
    struck = time.time()
    trial.signal(name, number)
    return struck


def _damage_newest(damage: Callable[[Path], None]) -> Callable[[Trial], float]:
    def strike(trial: Trial) -> float:
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

    return strike


def _has_another(checkpoint: Path | None) -> bool:
    return checkpoint is not None and len(committed_checkpoints(str(checkpoint.parent))) > 1


def _fill_disk(trial: Trial) -> float:
    chief = trial.names[0]
    newest = newest_checkpoint(trial.backups)
    if newest is None:
        raise TrialError("there was no backup whose size tells what does not fit")
    # Too small for the largest file of a checkpoint, large enough for a line in the event log.
    trial.limit_file_size(chief, max(path.stat().st_size for path in newest.iterdir()) * 3 // 4)
    trial.wait_for(lambda events: of_kind(events, "not saved"), "a backup failed")
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
    Fault("corrupt", "corrupt the newest backup", _damage_newest(flip_bit), saves_before=2),
    Fault("truncate", "truncate the newest backup", _damage_newest(truncate), saves_before=2),
    Fault("disk-full", "fill the disk for a while", _fill_disk, saves_left=2),
    Fault("preempt", "SIGTERM, run again", _preempt, ends_run=True),
)
