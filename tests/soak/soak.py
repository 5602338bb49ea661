"""Disturbs a training again and again, and checks after each fault that nothing hangs, is left over or is lost."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.checkpointing.recovery import recovery
from benchmarks.checkpointing.step_log import StepReader, stop_after
from benchmarks.faults import SAVE_EVERY
from tests.processes import marked
from tests.small_disks import fill, small_disk
from tests.soak.plan import Strike, strikes
from tfdist.launcher.drill.comparison import compare
from tfdist.launcher.drill.faults import FAULTS, Trial, TrialError
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import SignalInbox
from tfdist.supervision.events import of_kind
from tfdist.supervision.exit_codes import PREEMPTED

_ROOT = Path(__file__).parents[2]
_PROGRAM = _ROOT / "benchmarks" / "faults" / "training.py"
_MARK = "SOAK_MARK"
# Far more than a cold start takes on a machine that does other things as well.
_HANG = 180.0
_ENDED = 60.0
_HANG_TIMEOUT = "30"
_TICK = 0.05
_OF_DRILL = {fault.name: fault.strike for fault in FAULTS if fault.name in ("corrupt", "truncate", "preempt")}
# After these, somebody has to start the launcher again.
_END_THE_LAUNCHER = {
    "preempt": PREEMPTED,
    "preempt-worker": PREEMPTED,
    "preempt-chief": PREEMPTED,
    "kill-launcher": 128 + signal.SIGKILL,
}
_SIGNALS = {
    "kill-worker": (signal.SIGKILL, (-1,)),
    "kill-chief": (signal.SIGKILL, (0,)),
    "kill-both": (signal.SIGKILL, (0, 1)),
    "stop-worker": (signal.SIGSTOP, (-1,)),
    "stop-chief": (signal.SIGSTOP, (0,)),
    "preempt-worker": (signal.SIGTERM, (-1,)),
    "preempt-chief": (signal.SIGTERM, (0,)),
}


class SoakError(AssertionError):
    """Something hangs, is left over, or is lost."""


@dataclass
class Report:
    """What has happened.

    Attributes:
        faults: how many faults of each kind have struck.
        lines: each of them, with its outcome.
        starts: how often the launcher was started.
        restarts: how often the launcher has restarted the processes.
        steps: of the training.
        redone: steps that were done again, all together.
        most_redone: the most after one fault.
    """

    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    lines: list[str] = field(default_factory=list)
    starts: int = 0
    restarts: int = 0
    steps: int = 0
    redone: int = 0
    most_redone: int = 0


class Soak:
    """A training of two workers under `tfdist run`, as long as the `with` block lasts.

    Args:
        folder: for everything that it writes.
        seed: of the faults.
        guardian: ends what runs if this process is killed.
        inbox: the signals to this process.
        say: where to tell what is going on.
    """

    def __init__(
        self, folder: Path, seed: int, guardian: Guardian, inbox: SignalInbox, say: Callable[[str], None]
    ) -> None:
        self.report = Report()
        self._folder, self._seed, self._say = folder, seed, say
        self._guardian, self._inbox = guardian, inbox
        self._log = StepReader(folder)
        self._trials: list[Trial] = []
        # The faults that have struck since the training last went on, and the number of launchers before each.
        self._pending: list[tuple[Strike, int]] = []
        self._struck = 0.0
        # The backups have a disk of their own, which can be full.
        self._disk = contextlib.ExitStack()
        self._number = 0
        # The backups of a launcher that writes them before the next step are never older than the interval.
        self._synchronous = False

    def __enter__(self) -> Soak:
        os.environ[_MARK] = uuid.uuid4().hex
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
        # The program is run as a file, so that Python does not look for `benchmarks` in the working directory.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # this user may not mount one
            self._disk.enter_context(small_disk(self._folder / "backups", "64m"))
        self._start(synchronous=False)
        return self

    def __exit__(self, *error: object) -> None:
        self._trial.__exit__()
        self._disk.close()
        del os.environ[_MARK]

    def run(self, seconds: float, pause: float) -> None:
        """Strikes until the time is over, lets the training end, and compares it with one that nobody disturbed.

        Args:
            seconds: how long there are faults.
            pause: seconds between two faults, on average, if the training recovers sooner.

        Raises:
            SoakError: the training has not survived; the text says what is wrong.
            Interrupted: this process got a signal.
        """
        self._until(lambda: self._trains, "the first steps")
        began = time.monotonic()
        for number, strike in enumerate(strikes(self._seed, can_fill=os.path.ismount(self._folder / "backups"))):
            if not strike.early:
                self._recover()
                self._wait(max(began + number * pause - time.monotonic(), 0.0))
            if time.monotonic() > began + seconds:
                break
            self._wait(strike.wait)
            self._strike(strike)
        self._recover()
        self._finish()

    @property
    def _trial(self) -> Trial:
        return self._trials[-1]

    def _start(self, synchronous: bool) -> None:
        self.report.starts += 1
        self._synchronous = synchronous
        self._trials.append(self._new_trial(self._folder, f"logs-{self.report.starts}", synchronous, "0.05"))
        self._trial.__enter__()

    def _new_trial(self, folder: Path, logs: str, synchronous: bool, pause: str) -> Trial:
        options = ["-n", "2", "--max-restarts", "100000", "--hang-timeout", _HANG_TIMEOUT]
        words = [str(_PROGRAM), str(folder), "--pause", pause, *(["--synchronous"] if synchronous else [])]
        return Trial([*options, *words], folder / logs, folder / "backups", math.inf, self._guardian, self._inbox)

    def _strike(self, strike: Strike) -> None:
        self._number += 1
        line = f"{self._number}. {strike} at step {self._log.last}"
        self._struck = time.monotonic()
        pending = (strike, self.report.starts)
        try:
            if strike.kind == "disk-full":
                self._fill_disk()
                pending = None
            else:
                self._do(strike.kind)
            self.report.faults[strike.kind] += 1
        except TrialError as error:
            # It has ended just before.
            line, pending = f"{line}: did not strike: {error}", None
        if pending:
            self._pending.append(pending)
        self._next_synchronous = strike.synchronous
        self.report.lines.append(line)
        self._say(line)

    def _do(self, kind: str) -> None:
        if kind == "kill-launcher":
            self._trial.kill()
        elif kind == "hang-worker":
            (self._folder / "hang-1").touch()
        elif kind in _OF_DRILL:
            _OF_DRILL[kind](self._trial)
        else:
            number, ranks = _SIGNALS[kind]
            names = self._trial.names
            if not names:
                raise TrialError("no process has been started yet")
            for rank in ranks:
                self._trial.signal(names[rank], number)

    def _fill_disk(self) -> None:
        failed = len(of_kind(self._trial.events, "not saved"))
        filler = self._folder / "backups" / "filler"
        fill(filler)
        self._until(lambda: len(of_kind(self._trial.events, "not saved")) > failed, "a backup to fail")
        saved = len(of_kind(self._trial.events, "saved"))
        filler.unlink()
        self._until(lambda: len(of_kind(self._trial.events, "saved")) > saved, "a backup after the full disk")

    def _recover(self) -> None:
        """Waits until both workers train again in new processes, and checks what was done again."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        kinds = [strike.kind for strike, _ in pending]
        damaged = any(kind in ("corrupt", "truncate") for kind in kinds)
        floor, synchronous = self._floor(damaged), self._synchronous
        needed = max((starts + 1 for strike, starts in pending if strike.kind in _END_THE_LAUNCHER), default=0)
        codes: list[int] = []
        end = time.monotonic() + _HANG
        while self.report.starts < needed or (found := recovery(self._log.read(), self._struck)) is None:
            if (code := self._trial.code) is not None:
                codes.append(code)
                self._check_code(code, pending)
                self._start_again()
            if time.monotonic() > end:
                raise SoakError(f"a hang: no training again within {_HANG:.0f} s after {', '.join(kinds)}")
            self._tick()
        before = self._furthest()
        resumed = before - found.redone
        self.report.redone += found.redone
        self.report.most_redone = max(self.report.most_redone, found.redone)
        outcome = f"again after {found.seconds:.1f} s from step {resumed}, {found.redone} redone; exit codes {codes}"
        self.report.lines.append(f"   {outcome}")
        self._say(f"   {outcome}")
        if resumed < floor:
            raise SoakError(f"lost: the training went on after step {resumed}, but step {floor} was saved")
        most = SAVE_EVERY * (2 if damaged else 1)
        if synchronous and found.redone > most:
            raise SoakError(f"lost: {found.redone} steps redone, expected at most {most}")
        if len(pending) == 1 and kinds[0].startswith("preempt") and found.redone:
            raise SoakError(f"lost: {found.redone} steps redone after a preemption, expected none")
        # A process that fails twice at the same step is not started again: go beyond it.
        self._until(lambda: self._log.last > before + 1 or self._trial.code is not None, "further steps")

    def _floor(self, damaged: bool) -> int:
        """The step of the newest backup that is whole."""
        events = itertools.chain.from_iterable(trial.events for trial in self._trials)
        saved = sorted({event["step"] for event in of_kind(list(events), "saved")})
        return [0, 0, *saved][-2 if damaged else -1]

    def _furthest(self) -> int:
        """How far the processes had come that there were when the last fault struck."""
        old = {step.pid for step in self._log.steps if step.time <= self._struck}
        return max(step.step for step in self._log.steps if step.pid in old)

    def _check_code(self, code: int, pending: list[tuple[Strike, int]]) -> None:
        """A fault on top of another may strike before fit, after which nothing is to be started again."""
        kinds = [strike.kind for strike, _ in pending]
        if len(kinds) == 1 and code != _END_THE_LAUNCHER.get(kinds[0]):
            raise SoakError(f"the launcher ended with exit code {code} after {kinds[0]}")

    def _start_again(self) -> None:
        self._trial.__exit__()
        self.report.restarts += len(of_kind(self._trial.events, "restart"))
        self._nothing_is_left()
        self._start(self._next_synchronous)

    def _nothing_is_left(self) -> None:
        end = time.monotonic() + _ENDED
        while left := marked(_MARK, os.environ[_MARK]):
            left = [pid for pid in left if pid != os.getpid()]
            if not left:
                return
            if time.monotonic() > end:
                raise SoakError(f"orphans: {list(map(_described, left))} live {_ENDED:.0f} s after their launcher")
            self._tick()

    def _finish(self) -> None:
        self.report.steps = self._log.last + 4 * SAVE_EVERY + 3
        stop_after(self._folder, self.report.steps)
        self._until(lambda: self._trial.code is not None, "the end of the training")
        if self._trial.code:
            raise SoakError(f"exit code {self._trial.code} at the end of the training")
        self.report.restarts += len(of_kind(self._trial.events, "restart"))
        self._nothing_is_left()
        self._say(f"an undisturbed run of {self.report.steps} steps")
        folder = self._folder / "undisturbed"
        folder.mkdir()
        stop_after(folder, self.report.steps)
        with self._new_trial(folder, "logs", False, "0") as trial:
            if code := trial.wait():
                raise SoakError(f"the undisturbed run ended with exit code {code}; see {trial.log_dir}")
        if different := compare(folder / "backups", self._folder / "backups", _HANG):
            raise SoakError("the end differs from that of an undisturbed run: " + "; ".join(different[:10]))

    @property
    def _trains(self) -> bool:
        return {step.rank for step in self._log.read()} == {0, 1}

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + _HANG
        while True:
            code = self._trial.code
            if condition():
                return
            if code is not None:
                raise SoakError(f"the launcher ended with exit code {code} before {what}; see {self._trial.log_dir}")
            if time.monotonic() > end:
                raise SoakError(f"a hang: waited {_HANG:.0f} s in vain for {what}")
            self._tick()

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._tick()

    def _tick(self) -> None:
        self._inbox.check()
        time.sleep(_TICK)


def _described(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
    return str(pid)
