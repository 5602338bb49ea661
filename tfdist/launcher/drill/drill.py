"""`tfdist drill` from its options to the exit code."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tfdist.folders import current_folder, default_log_dir
from tfdist.launcher.arguments import Target
from tfdist.launcher.drill.comparison import compare
from tfdist.launcher.drill.faults import FEWEST_SAVES, Fault, Rhythm, Trial, TrialError, faults_for, rhythm
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import Interrupted, SignalInbox
from tfdist.launcher.plan import PlanError
from tfdist.launcher.policy import counted, exit_code
from tfdist.supervision.events import Event, of_kind
from tfdist.supervision.exit_codes import PREEMPTED

IDENTICAL = "identical"
# All steps were done, with other numbers of workers: another number rounds otherwise, and draws other random numbers.
COMPLETE = "complete"
SURVIVED = (IDENTICAL, COMPLETE)
DIFFERS = "differs"
NOT_COMPARABLE = "not comparable"
# The run did not come to its end, or the fault could not strike.
FAILED = "failed"
# The fault struck when nothing was left to train.
NOT_TESTED = "not tested"
_SHOWN_DETAILS = 5


@dataclass(frozen=True)
class Outcome:
    """One row of the table: a fault and its outcome.

    Attributes:
        fault: name of the fault.
        title: of the fault, for people.
        result: one of the results of this module.
        detected: seconds from the fault until it was noticed; None: it never was.
        training_again: seconds from the fault until the training went on.
        steps_redone: steps that were done again.
        details: what differs, or what went wrong, a line each.
    """

    fault: str
    title: str
    result: str
    detected: float | None = None
    training_again: float | None = None
    steps_redone: int | None = None
    details: tuple[str, ...] = ()


def recovery(events: Sequence[Event], struck: float) -> dict[str, Any]:
    """How a run with these events recovered, as an `Outcome` has it.

    Args:
        events: of the run; if it was started again by hand, of both runs.
        struck: when the fault struck.

    Example:
        >>> recovery(
        ...     [
        ...         {"event": "failure", "time": 10.25},
        ...         {"event": "training-again", "time": 13.0, "steps_redone": 4},
        ...     ],
        ...     struck=10.0,
        ... )
        {'detected': 0.25, 'training_again': 3.0, 'steps_redone': 4}
    """
    later = [event for event in events if event["time"] >= struck]
    noticed = of_kind(later, "preempted")
    if noticed and not of_kind(later, "failure"):
        # The events of the processes have a step, that of the launcher has none.
        steps = [event["step"] for event in noticed if "step" in event]
        again = of_kind(later, "resumed")
        redone = max(steps) - again[0]["step"] if steps and again else None
    else:
        noticed = of_kind(later, "failure")
        again = of_kind(later, "training-again")
        redone = sum(event["steps_redone"] for event in again) if again else None
    return {"detected": _first(noticed, struck), "training_again": _first(again, struck), "steps_redone": redone}


def was_tested(events: Sequence[Event], struck: float, steps: int) -> bool:
    """Whether there was something left to train when a fault struck: the training went on, or was to.

    Args:
        events: as in `recovery`.
        struck: when the fault struck.
        steps: of the whole training.

    Example:
        >>> was_tested([{"event": "failure", "time": 10.25}, {"event": "complete", "time": 12.0}], 10.0, steps=80)
        False
    """
    later = [event for event in events if event["time"] >= struck]
    stopped = [event["step"] for event in of_kind(later, "preempted") if "step" in event]
    return max(stopped) < steps if stopped else bool(of_kind(later, "training-again"))


def _first(events: Sequence[Event], since: float) -> float | None:
    return round(events[0]["time"] - since, 2) if events else None


def show_table(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints the table, and below it what differs or went wrong."""
    console.print(Group(_table(outcomes), *map(_details, (row for row in outcomes if row.details))))


def to_json(outcomes: Sequence[Outcome]) -> str:
    """All outcomes as JSON, with all details.

    Example:
        >>> to_json([])
        '{"identical": true, "rows": []}'
    """
    identical = all(outcome.result in SURVIVED for outcome in outcomes)
    return json.dumps({"identical": identical, "rows": [asdict(outcome) for outcome in outcomes]})


def seconds(value: float | None) -> str:
    """A duration as it stands in the table.

    Example:
        >>> seconds(3.14159), seconds(None)
        ('3.1 s', '-')
    """
    return "-" if value is None else f"{value:.1f} s"


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("fault", no_wrap=True)
    for column in ("detected after", "training again after", "steps redone"):
        table.add_column(column, justify="right")
    table.add_column("result", no_wrap=True)
    for outcome in outcomes:
        redone = "-" if outcome.steps_redone is None else str(outcome.steps_redone)
        result = Text(outcome.result, "green" if outcome.result in SURVIVED else "red")
        table.add_row(outcome.title, seconds(outcome.detected), seconds(outcome.training_again), redone, result)
    return table


def _details(outcome: Outcome) -> RenderableType:
    hidden = len(outcome.details) - _SHOWN_DETAILS
    lines = [*outcome.details[:_SHOWN_DETAILS], *([f"and {hidden} more (--json shows all)"] if hidden > 0 else [])]
    return Text(f"{outcome.fault}: {outcome.result}" + "".join(f"\n  {line}" for line in lines))


_REFERENCE = "reference"
_NOT_REPRODUCIBLE = (
    "two undisturbed runs differ, too. Call keras.utils.set_random_seed first, seed what else is random (numpy's "
    "default_rng, shuffle), and leave the time out of what is trained on."
)


class DrillError(RuntimeError):
    """There is nothing to compare with; the text says why and what to do."""


def run_drill(
    target: Target,
    workers: int,
    only: Sequence[str],
    timeout: float,
    hang_timeout: float | None,
    keep_going: bool,
    log_dir: str | None,
    as_json: bool,
) -> int:
    """Runs the drill, shows its result, and returns the exit code: 0 only if all rows are identical, or complete.

    Raises:
        PlanError: the options or the script are not there.
        OSError: the logs cannot be written.
    """
    faults = faults_for(workers)
    known = [fault.name for fault in faults]
    for name in only:
        if name not in known:
            raise PlanError(f"--only {name}: expected one of {', '.join(known)} with -n {workers}.")
    target.command()  # there has to be such a program
    now = f"drill-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(log_dir or default_log_dir(now, current_folder(), tempfile.gettempdir()))
    messages = Console(stderr=True, highlight=False)
    with SignalInbox() as inbox, Guardian() as guardian:
        drill = Drill(
            target.typed, workers, timeout, hang_timeout, keep_going, folder.absolute(), guardian, inbox, messages
        )
        try:
            outcomes = drill.run([fault for fault in faults if not only or fault.name in only])
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
    if any(outcome.result not in SURVIVED for outcome in outcomes):
        messages.print(f"tfdist: logs, and the backups of what is not identical: {folder}/", soft_wrap=True)
        return 1
    return 0


@dataclass
class Drill:
    """The runs of a drill, one after another.

    Attributes:
        words: the script as it stands behind `tfdist run`.
        workers: number of training processes.
        timeout: seconds that a run may take.
        hang_timeout: when a process counts as hung; None: what is long for this script.
        keep_going: whether to go on after a row that is not identical.
        folder: for logs and backups of all runs.
        guardian: ends what runs if this process is killed.
        inbox: the signals to this process.
        messages: where to tell what is going on.

    Example:
        >>> drill.run(faults_for(2))[0].result  # doctest: +SKIP
        'identical'
    """

    words: Sequence[str]
    workers: int
    timeout: float
    hang_timeout: float | None
    keep_going: bool
    folder: Path
    guardian: Guardian
    inbox: SignalInbox
    messages: Console

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
            if outcome.result in SURVIVED:
                shutil.rmtree(self._backups(fault.name), ignore_errors=True)
            elif outcome.result != NOT_TESTED and not self.keep_going:
                break
        if all(outcome.result in SURVIVED for outcome in outcomes):
            shutil.rmtree(self._backups(_REFERENCE), ignore_errors=True)
        return outcomes

    def _measure_reference(self) -> Rhythm:
        try:
            events = self._run_undisturbed(_REFERENCE)
        except TrialError as error:
            raise DrillError(f"the undisturbed run failed: {error}") from None
        if not of_kind(events, "saved"):
            raise DrillError(
                "the script saved no backup that tfdist knows of. Expected: a callback of fit that saves during the "
                'training:\n  model.fit(..., callbacks=[tfdist.callbacks.BackupAndRestore("backup")])\n'
                "tfdist drill tries out whether a run with it survives."
            )
        natural = rhythm(events)
        if natural.saves < FEWEST_SAVES:
            raise DrillError(
                f"the script saved {counted(natural.saves, 'backup')} before the last step. Expected: at least "
                f"{FEWEST_SAVES}, so that faults can strike in between. Train for more epochs, or give "
                "BackupAndRestore a smaller save_freq."
            )
        return natural

    def _run_undisturbed(self, name: str) -> list[Event]:
        with self._trial(name, name) as trial:
            code = trial.wait()
        if code:
            raise TrialError(f"exit code {code}; see {trial.log_dir}")
        return trial.events

    def _run_row(self, fault: Fault, natural: Rhythm) -> Outcome:
        back: dict[str, Any] = {}
        try:
            events, struck = self._run_disturbed(fault, natural)
            back = recovery(events, struck)
            differences = compare(
                self._backups(_REFERENCE), self._backups(fault.name), self.timeout, values=not fault.shrinks
            )
            grown = of_kind(events, "start")[-1]["workers"] == self.workers
            if not differences and not (grown and was_tested(events, struck, natural.steps)):
                too_late = (
                    "nothing was left to train when the fault struck, after the last step. Train for more epochs or "
                    f"more slowly (time between two backups: {natural.pause:.2f} s), or give BackupAndRestore a "
                    "smaller save_freq."
                )
                return Outcome(fault.name, fault.title, NOT_TESTED, **back, details=(too_late,))
            if not differences:
                return Outcome(fault.name, fault.title, COMPLETE if fault.shrinks else IDENTICAL, **back)
            if not self._is_reproducible:
                details = (_NOT_REPRODUCIBLE, *_causes(events))
                return Outcome(fault.name, fault.title, NOT_COMPARABLE, **back, details=details)
            return Outcome(fault.name, fault.title, DIFFERS, **back, details=tuple(differences))
        except RuntimeError as error:
            return Outcome(fault.name, fault.title, FAILED, **back, details=(str(error),))

    def _run_disturbed(self, fault: Fault, natural: Rhythm) -> tuple[list[Event], float]:
        """Runs the script with a fault; returns all events, and when the fault struck."""
        saves = natural.strike_after(fault.saves_before, fault.saves_left)
        options = []
        if fault.shrinks:
            most = self.workers
            options = ["-n", f"{most - 1}:{most}", "--regrow-after", str(max(natural.pause, 0.1))]
        if fault.name == "hang" and (seconds := self.hang_timeout or natural.hang_timeout):
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

    @functools.cached_property
    def _is_reproducible(self) -> bool:
        """Whether two undisturbed runs are identical; found out by a second one, when it first matters."""
        name = f"{_REFERENCE}-2"
        self._say("  it ends differently; a second undisturbed run shows whether that ends like the first")
        self._run_undisturbed(name)
        return not compare(self._backups(_REFERENCE), self._backups(name), self.timeout)

    def _trial(self, name: str, backups: str, options: Sequence[str] = ()) -> Trial:
        arguments = ["-n", str(self.workers), *options, *self.words]
        deadline = time.monotonic() + self.timeout
        return Trial(arguments, self.folder / name, self._backups(backups), deadline, self.guardian, self.inbox)

    def _backups(self, name: str) -> Path:
        return self.folder / name / "backups"

    def _saying(self, text: str) -> AbstractContextManager[object]:
        """Prints a line, and on a terminal shows that work is going on inside the `with` block."""
        self._say(text)
        return self.messages.status(" …") if self.messages.is_terminal else contextlib.nullcontext()

    def _say(self, text: str) -> None:
        self.messages.print(f"tfdist drill: {text}", markup=False, soft_wrap=True)


def _causes(events: Sequence[Event]) -> list[str]:
    """What the script's own processes know about why it reads other data in each run."""
    return list(dict.fromkeys(f"the data: {event['reason']}" for event in of_kind(events, "not repeatable")))


def _summary(outcome: Outcome) -> str:
    if outcome.training_again is None:
        return outcome.result
    return (
        f"{outcome.result}: detected after {seconds(outcome.detected)}, training again after "
        f"{seconds(outcome.training_again)}, {counted(outcome.steps_redone, 'step')} redone"
    )
