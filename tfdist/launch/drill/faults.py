"""The faults of a drill: what each of them does to a run in the middle of its training."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tfdist.callbacks.checkpoint_name import committed_checkpoints
from tfdist.launch.drill.checkpoint_damage import flip_bit, newest_checkpoint, truncate
from tfdist.launch.drill.trial import Trial, TrialError
from tfdist.supervision.event_stream import Event, of_kind


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
        # Frozen, nobody writes a newer checkpoint behind our back or removes the one that is damaged.
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
