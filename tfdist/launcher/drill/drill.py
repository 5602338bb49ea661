"""`tfdist drill` from its options to the exit code."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tfdist.launcher.arguments import Target
from tfdist.launcher.drill.comparison import compare
from tfdist.launcher.drill.faults import FEWEST_SAVES, Fault, Rhythm, faults_for, rhythm
from tfdist.launcher.drill.outcome import (
    DIFFERS,
    FAILED,
    IDENTICAL,
    NOT_COMPARABLE,
    NOT_TESTED,
    Outcome,
    Recovery,
    recovery,
    seconds,
    show_table,
    to_json,
    was_tested,
)
from tfdist.launcher.drill.trial import Interrupted, Trial, TrialError
from tfdist.launcher.failure import exit_code
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import SignalInbox
from tfdist.launcher.run_plan import PlanError
from tfdist.log_folders import default_log_dir
from tfdist.supervision.events import Event, of_kind
from tfdist.supervision.exit_codes import PREEMPTED

_REFERENCE = "reference"
_NO_BACKUPS = (
    "the script saved no backup that tfdist knows of. Expected: a callback of fit that saves during the training:\n"
    '  model.fit(..., callbacks=[tfdist.callbacks.BackupAndRestore("backup")])\n'
    "tfdist drill tries out whether a run with it survives."
)
_TOO_LATE = (
    "nothing was left to train when the fault struck, after the last step. Train for more epochs or more slowly (time "
    "between two backups: {pause:.2f} s), or give BackupAndRestore a smaller save_freq."
)
_NOT_REPRODUCIBLE = (
    "two undisturbed runs differ, too. Call keras.utils.set_random_seed first, seed what else is random (numpy's "
    "default_rng, shuffle), and leave the time out of what is trained on."
)


class DrillError(RuntimeError):
    """There is nothing to compare with; the text says why and what to do."""


@dataclass(frozen=True)
class DrillOptions:
    """What the user asked for on the command line of `tfdist drill`.

    Attributes:
        workers: number of training processes.
        only: names of the faults; none: all.
        timeout: seconds that a run may take.
        hang_timeout: when a process counts as hung; None: what is long for this script.
        keep_going: whether to go on after a row that is not identical.
        log_dir: folder of logs and backups; None: one below tfdist-logs.
    """

    workers: int = 2
    only: tuple[str, ...] = ()
    timeout: float = 300.0
    hang_timeout: float | None = None
    keep_going: bool = False
    log_dir: str | None = None

    @property
    def faults(self) -> list[Fault]:
        """The faults to try out.

        Raises:
            PlanError: for a fault that there is not, with so many workers.
        """
        faults = faults_for(self.workers)
        known = [fault.name for fault in faults]
        for name in self.only:
            if name not in known:
                raise PlanError(f"--only {name}: expected one of {', '.join(known)} with -n {self.workers}.")
        return [fault for fault in faults if not self.only or fault.name in self.only]


def run_drill(target: Target, options: DrillOptions, as_json: bool) -> int:
    """Runs the drill, shows its result, and returns the exit code: 0 only if all rows are identical.

    Raises:
        PlanError: the options or the script are not there.
        OSError: the logs cannot be written.
    """
    faults = options.faults
    try:
        target.command()
    except ValueError as error:
        raise PlanError(str(error)) from None
    now = f"drill-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(options.log_dir or default_log_dir(now, os.getcwd(), tempfile.gettempdir()))
    messages = Console(stderr=True, highlight=False)
    with SignalInbox() as inbox, Guardian() as guardian:
        drill = Drill(target.typed, options, folder.absolute(), guardian, inbox, messages)
        try:
            outcomes = drill.run(faults)
        except DrillError as error:
            messages.print(f"tfdist: {error}", markup=False, soft_wrap=True)
            return 1
        except Interrupted as error:
            messages.print(f"tfdist: {error}: the drill and all that it has started are ended")
            return exit_code(-error.signal)
    if as_json:
        print(to_json(outcomes))
    else:
        show_table(outcomes, Console())
    if any(outcome.result != IDENTICAL for outcome in outcomes):
        messages.print(f"tfdist: logs, and the backups of what is not identical: {folder}/", soft_wrap=True)
        return 1
    return 0


class Drill:
    """The runs of a drill, one after another.

    Args:
        words: the script as it stands behind `tfdist run`.
        options: what the user asked for.
        folder: for logs and backups of all runs.
        guardian: ends what runs if this process is killed.
        inbox: the signals to this process.
        messages: where to tell what is going on.

    Example:
        >>> drill.run(faults_for(2))[0].result  # doctest: +SKIP
        'identical'
    """

    def __init__(
        self,
        words: Sequence[str],
        options: DrillOptions,
        folder: Path,
        guardian: Guardian,
        inbox: SignalInbox,
        messages: Console,
    ) -> None:
        self._words = words
        self._options = options
        self._folder = folder
        self._guardian = guardian
        self._inbox = inbox
        self._messages = messages
        self._reproducible: bool | None = None

    def run(self, faults: Sequence[Fault]) -> list[Outcome]:
        """Runs the reference and a run for each fault, up to the first that is not survived.

        Raises:
            DrillError: there is no reference to compare with.
            Interrupted: this process got a signal.
        """
        count = len(faults) + 1
        with self._saying(f"1/{count} an undisturbed run, as the reference"):
            natural = self._measure_reference()
        self._say(f"  {natural.steps} steps, {natural.saves} backups before the end")
        outcomes: list[Outcome] = []
        for number, fault in enumerate(faults, 2):
            with self._saying(f"{number}/{count} {fault.title}"):
                outcome = self._run_row(fault, natural)
            outcomes.append(outcome)
            self._say(f"  {_summary(outcome)}")
            if outcome.result == IDENTICAL:
                shutil.rmtree(self._backups(fault.name), ignore_errors=True)
            elif outcome.result != NOT_TESTED and not self._options.keep_going:
                break
        if all(outcome.result == IDENTICAL for outcome in outcomes):
            shutil.rmtree(self._backups(_REFERENCE), ignore_errors=True)
        return outcomes

    def _measure_reference(self) -> Rhythm:
        try:
            events = self._run_undisturbed(_REFERENCE)
        except TrialError as error:
            raise DrillError(f"the undisturbed run failed: {error}") from None
        if not of_kind(events, "saved"):
            raise DrillError(_NO_BACKUPS)
        natural = rhythm(events)
        if natural.saves < FEWEST_SAVES:
            raise DrillError(
                f"the script saved {natural.saves} backup(s) before the last step. Expected: at least {FEWEST_SAVES}, "
                "so that faults can strike in between. Train for more epochs, or give BackupAndRestore a smaller "
                "save_freq."
            )
        return natural

    def _run_undisturbed(self, name: str) -> list[Event]:
        with self._trial(name, name) as trial:
            code = trial.wait()
        if code:
            raise TrialError(f"exit code {code}; see {trial.log_dir}")
        return trial.events

    def _run_row(self, fault: Fault, natural: Rhythm) -> Outcome:
        back = Recovery()
        try:
            events, struck = self._run_disturbed(fault, natural)
            back = recovery(events, struck)
            differences = compare(self._backups(_REFERENCE), self._backups(fault.name), self._options.timeout)
            if not differences and not was_tested(events, struck, natural.steps):
                details = (_TOO_LATE.format(pause=natural.pause),)
                return Outcome(fault.name, fault.title, NOT_TESTED, back, details)
            if not differences:
                return Outcome(fault.name, fault.title, IDENTICAL, back)
            if not self._is_reproducible():
                return Outcome(fault.name, fault.title, NOT_COMPARABLE, back, (_NOT_REPRODUCIBLE,))
            return Outcome(fault.name, fault.title, DIFFERS, back, tuple(differences))
        except (TrialError, RuntimeError) as error:
            return Outcome(fault.name, fault.title, FAILED, back, (str(error),))

    def _run_disturbed(self, fault: Fault, natural: Rhythm) -> tuple[list[Event], float]:
        """Runs the script with a fault; returns all events, and when the fault struck."""
        saves = natural.strike_after(fault.saves_before, fault.saves_left)
        options = []
        if fault.name == "hang" and (seconds := self._options.hang_timeout or natural.hang_timeout):
            options = ["--hang-timeout", str(seconds)]
        with self._trial(fault.name, fault.name, options) as trial:
            trial.wait_for(lambda events: len(of_kind(events, "saved")) >= saves, f"backup {saves} was written")
            # Between two backups, so that there is something to do again.
            trial.sleep(natural.pause / 2)
            struck = fault.strike(trial)
            code = trial.wait()
        events = trial.events
        if fault.ends_run:
            if code != PREEMPTED:
                raise TrialError(
                    f"exit code {code} instead of {PREEMPTED} (saved, start me again); see {trial.log_dir}"
                )
            with self._trial(f"{fault.name}-again", fault.name) as trial:
                code = trial.wait()
            events = events + trial.events
        if code:
            raise TrialError(f"exit code {code}; see {trial.log_dir}")
        return events, struck

    def _is_reproducible(self) -> bool:
        """Whether two undisturbed runs are identical; found out by a second one, when it first matters."""
        if self._reproducible is None:
            name = f"{_REFERENCE}-2"
            self._say("  it ends differently; a second undisturbed run shows whether that ends like the first")
            self._run_undisturbed(name)
            self._reproducible = not compare(self._backups(_REFERENCE), self._backups(name), self._options.timeout)
        return self._reproducible

    def _trial(self, name: str, backups: str, options: Sequence[str] = ()) -> Trial:
        arguments = ["-n", str(self._options.workers), *options, *self._words]
        deadline = time.monotonic() + self._options.timeout
        return Trial(arguments, self._folder / name, self._backups(backups), deadline, self._guardian, self._inbox)

    def _backups(self, name: str) -> Path:
        return self._folder / name / "backups"

    def _saying(self, text: str) -> AbstractContextManager[object]:
        """Prints a line, and on a terminal shows that work is going on inside the `with` block."""
        self._say(text)
        return self._messages.status(" …") if self._messages.is_terminal else contextlib.nullcontext()

    def _say(self, text: str) -> None:
        self._messages.print(f"tfdist drill: {text}", markup=False, soft_wrap=True)


def _summary(outcome: Outcome) -> str:
    back = outcome.recovery
    if back.training_again is None:
        return outcome.result
    return (
        f"{outcome.result}: detected after {seconds(back.detected)}, training again after "
        f"{seconds(back.training_again)}, {back.steps_redone} step(s) redone"
    )
