"""A search on this machine: its tuners are started, watched, and started again, until the script has ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tfdist.launcher.arguments import Target
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import SignalInbox
from tfdist.launcher.output import Outlet, Terminal, hidden_lines
from tfdist.launcher.plan import Machine, ProcessPlan, RunOptions, default_workers
from tfdist.launcher.policy import Failure, GiveUp, Restart, RestartPolicy, exit_code, used_up
from tfdist.launcher.process import Process, ProcessGroup
from tfdist.launcher.run import log_folder, new_run_id, shortest
from tfdist.launcher.supervisor import FAILURE_GRACE, Attempt, Ending, Supervisor
from tfdist.plain_text import plain_table, plain_text
from tfdist.supervision.events import EventStream
from tfdist.supervision.exit_codes import PREEMPTED, REFUSED, UNSAVED
from tfdist.tuning.files import begin_again, claim, read_search, searches_in, write_search
from tfdist.tuning.member import START_AGAIN, Member, plan_tuners

# These end a tuner, but not the search: it was asked to stop, or its trial took too long.
_GOES_ON = (PREEMPTED, UNSAVED, START_AGAIN)
_LOOK_EVERY = 0.25
# A tuner ends a trial that takes too long itself, unless it is stopped: then it is ended so many seconds later.
_STOPPED_AFTER = 30.0
# How long the machine of tuner 0 may take to begin the search.
_LATEST = 3600.0
NO_SEARCH = (
    "Received: a script that has ended without a call of tuner.search(). Expected: a KerasTuner script, which makes a "
    "tuner, such as keras_tuner.RandomSearch(...), and calls its search(); use `tfdist run` for other scripts"
)
_SHOWN = 10
_ERROR_WIDTH = 60


def run(
    target: Target,
    tuners: int | None,
    only: int | None,
    cpus_per_worker: int | str,
    gpus_per_worker: int | str,
    env: Mapping[str, str],
    log_dir: str | None,
    grace: float,
    output: str,
    max_restarts: int,
    trial_timeout: float | None,
) -> int:
    """Does what the options of `tfdist tune` ask for, and returns its exit code.

    Raises:
        ValueError: the options do not fit the script, or the machine.
        OSError: a process could not be started, or another search is at work in the folder of the logs.
    """
    if target.kind == "command":
        raise ValueError(
            f"-- {target.words[0] if target.words else ''}: expected a Python file or -m MODULE, in which "
            "`tfdist tune` finds KerasTuner. Leave -- out."
        )
    python, unbuffered, *words = target.command()
    command = (python, unbuffered, "-m", "tfdist.tuning.program", *words)
    if only is not None and (tuners is None or log_dir is None or only >= tuners):
        raise ValueError(f"--only {only}: expected -n, more than {only}, and --log-dir, as in all other processes.")
    machine = Machine.this_one()
    count = tuners or default_workers(machine, gpus_per_worker)
    here = range(count) if only is None else (only,)
    name = new_run_id()
    folder = log_folder(log_dir, name)
    folder.mkdir(parents=True, exist_ok=True)
    # Started again, an element of a job array goes on with the search of its folder.
    member = Member(0, count, name if only is None else str(folder), str(folder), max_restarts, trial_timeout)
    shares = RunOptions(len(here), cpus_per_worker=cpus_per_worker, gpus_per_worker=gpus_per_worker, env=env)
    plans = plan_tuners(here, shares, command, machine, os.environ, member, show_all=output == "all")
    hidden = hidden_lines(output == "all", {**os.environ, **env})
    terminal = Terminal.standard(live=plans[here[0]].name, env=os.environ, hidden=hidden)
    what = f"{count} tuner{'' if count == 1 else 's'}" if only is None else f"tuner {only} of {count}"
    terminal.message(f"{what}; logs in {shortest(folder)}/")
    if 0 in plans:
        claim(folder, ".tune.lock", f"the folder of logs {shortest(folder)}", "choose another --log-dir")
        begin_again(folder)
    code = TuneRun(plans, member, terminal, grace).run()
    if 0 in plans:
        show(searches_in(folder, member.search_id))
    return code


class TuneRun(Supervisor):
    """Runs the tuners of a search on this machine.

    Args:
        plans: the process of each tuner here.
        member: any of the processes of the search.
        terminal: where output and messages go.
        grace: seconds between a signal that is passed on and SIGKILL.

    Example:
        >>> TuneRun(plans, member, terminal, 10.0).run()  # doctest: +SKIP
        0
    """

    def __init__(self, plans: Mapping[int, ProcessPlan], member: Member, terminal: Terminal, grace: float) -> None:
        super().__init__(len(plans), RestartPolicy(member.max_restarts), shortest(Path(member.folder)), terminal, grace)
        self._plans = plans
        self._member = member

    def _attempt(self, restart: Restart, inbox: SignalInbox, guardian: Guardian) -> Ending:
        with ProcessGroup([], self._log_dir, self.terminal, guardian) as group:
            return _TuneAttempt(group, inbox, self).run()

    def _conclude(self, ending: Ending) -> int:
        code = super()._conclude(ending)
        # What was interrupted may be started again, by Slurm say, and the others wait for that.
        if 0 in self._plans and ending.interrupt is None:
            self._files.call(lambda: write_search(self._member, 0, code=code))
        return code


class _TuneAttempt(Attempt):
    """Sees the tuners through to the end of the script in tuner 0.

    The others are started once that has begun its search: what the script does before, it does in one process, and a
    script that does not search is run only once.

    Args:
        group: without processes yet.
        inbox: the signals to the launcher.
        run: what is run.
    """

    _run: TuneRun

    def __init__(self, group: ProcessGroup, inbox: SignalInbox, run: TuneRun) -> None:
        super().__init__(run, group, inbox)
        self._waiting = {number: plan for number, plan in run._plans.items() if number}
        # Who has begun a trial since it was started, and how often in a row the others were started in vain.
        self._begun: set[str] = set()
        # Since when this has known that a tuner is at work on a trial.
        self._trials: dict[str, float] = {}
        self._in_vain: Counter[str] = Counter()
        self._events = EventStream(run._log_dir)
        run._files.call(self._events.read)  # what an earlier run has left in the folder
        self._begun_at, self._look_at = time.monotonic(), 0.0
        self._searches, self._ended = False, None
        run._files.call(self._read)
        # The script has failed at an earlier start: tuner 0 may be started again, too.
        self._old = self._ended or None
        # How the search ends, once that is decided.
        self._result = Ending(0)
        self._start({number: plan for number, plan in run._plans.items() if not number})

    def _is_over(self) -> bool:
        return self._stopping and self._group.is_over

    def _note_end(self, process: Process) -> None:
        status = self._group.status(process)
        if self._stopping:
            return
        if status:
            self._end_tuner(process, self._group.failure(process, status))
        elif process.plan.index == min(self._run._plans):
            self._run._files.call(self._read)
            self._end(1 if 0 in self._run._plans and not self._searches else 0, NO_SEARCH)

    def _go_on(self) -> None:
        now = time.monotonic()
        if self._stopping or now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY
        self._run._files.call(self._read)
        self._old = None if self._ended is None else self._old
        if self._ended != self._old and 0 not in self._run._plans:
            self._end(self._ended)
        elif self._waiting and self._searches:
            self._start(self._waiting)
            self._waiting = {}
        elif self._waiting and now - self._begun_at > _LATEST:
            self._end(1, f"tuner 0 has not begun its search within {_LATEST / 60:.0f} minutes; nothing to do here")
        self._end_stopped(now)
        self._start_replacements()

    def _read(self) -> None:
        """Reads what the tuners have written."""
        for event in self._events.read():
            if event["event"] in ("trial", "trial-again"):
                self._begun.add(event["name"])
                self._trials[event["name"]] = time.monotonic()
            elif event["event"] == "trial-ended":
                self._trials.pop(event["name"], None)
        folder, search_id = self._run._log_dir, self._run._member.search_id
        self._searches = self._searches or read_search(folder, search_id, 1) is not None
        self._ended = (read_search(folder, search_id, 0) or {}).get("code")

    def _end_stopped(self, now: float) -> None:
        """Ends tuners that do not end a trial which takes too long: a stopped process has no thread that would."""
        limit = self._run._member.trial_timeout
        for process in self._group.running:
            began = self._trials.get(process.plan.name, now)
            if limit is not None and now - began > limit + _STOPPED_AFTER:
                del self._trials[process.plan.name]
                self._terminal.message(f"{process.plan.name} neither goes on nor ends its trial after {limit:g} s")
                process.kill()

    def _start(self, plans: Mapping[int, ProcessPlan]) -> None:
        for plan in plans.values():
            self._group.add(plan)
        pids = {process.plan.name: process.group for process in self._group.processes}
        self._run._note_start(self._run._policy.used, len(pids), pids)

    def _end(self, code: int, error: str = "") -> None:
        self._result = Ending(code, error=error if code else "")
        self._stop(signal.SIGTERM, min(self._grace, FAILURE_GRACE))

    def _end_tuner(self, process: Process, failure: Failure) -> None:
        """Decides about a tuner that has failed."""
        process.kill()  # its helpers
        self._run._files.call(self._read)
        name, policy = process.plan.name, self._run._policy
        in_vain = self._in_vain[name] = 0 if name in self._begun else self._in_vain[name] + 1
        reason = None
        if failure.status == REFUSED:
            reason = f"not restarted: exit code {REFUSED} says that it would fail again"
        elif failure.status > 0 and failure.status not in _GOES_ON:
            reason = ""  # what is wrong with a trial only, KerasTuner catches
        elif policy.limit == 0 and failure.status != START_AGAIN:
            reason = f"not restarted: {used_up(0)}"
        elif in_vain > policy.limit:
            reason = f"not restarted: {name} has failed {in_vain} times in a row before it began a trial"
        if reason is not None:
            self._result = Ending(failure.exit_code, failure, decision=GiveUp(reason))
            self._stop(signal.SIGTERM, self._grace)
            return
        policy.used += 1
        self._begun.discard(name)
        self._trials.pop(name, None)
        self._pending[process] = policy.used, time.monotonic() + in_vain
        self._run._note_replacement(failure, policy.used, float(in_vain))

    def _ending(self) -> Ending:
        if self._interrupt is None:
            return self._result
        # A tuner that waits for a trial has nothing to save, and just ends by the signal.
        codes = {process.status for process in self._interrupted}
        if PREEMPTED in codes:
            codes.discard(-self._interrupt)
        agreed = codes.pop() if len(codes) == 1 else None
        code = agreed if agreed is not None and agreed > 0 else exit_code(-self._interrupt)
        return Ending(code, interrupt=self._interrupt)


def show(searches: Sequence[dict[str, Any]]) -> None:
    """Shows searches on the standard output; perhaps nobody reads that."""
    text = "".join(f"{summary_of(one)}\n\n{plain_text(table_of(one)).rstrip()}\n" for one in searches)
    shown = Outlet(sys.stdout)
    shown.write(text.encode(errors="surrogateescape"))
    shown.writer.close()


def table_of(search: dict[str, Any]) -> Table:
    """The best trials of a search.

    Example:
        >>> from tfdist.plain_text import plain_text
        >>> trial = {"trial": "0", "status": "COMPLETED", "score": 0.5, "error": None}
        >>> search = {"objective": "val_loss", "trials": [{**trial, "hyperparameters": {"units": 8}}]}
        >>> print(plain_text(table_of(search)).rstrip())  # doctest: +NORMALIZE_WHITESPACE
        trial   val_loss   units
        ────────────────────────
        0            0.5   8
    """
    trials = search["trials"][:_SHOWN]
    names = list(dict.fromkeys(name for trial in trials for name in trial["hyperparameters"]))
    rows = (
        (trial["trial"], _outcome(trial), *(_text(trial["hyperparameters"].get(name, "-")) for name in names))
        for trial in trials
    )
    return plain_table(("trial", search["objective"], *names), rows, right=(search["objective"],), wraps=names)


def summary_of(search: dict[str, Any]) -> str:
    """A search in a line.

    Example:
        >>> summary_of({"over": True, "project": "p", "trials": [{"status": "COMPLETED"}, {"status": "FAILED"}]})
        'search finished: 2 trials, 1 failed; p'
    """
    states = [trial["status"] for trial in search["trials"]]
    failed = states.count("FAILED")
    at_work = len(states) - failed - states.count("COMPLETED")
    parts = [f"{len(states)} trial{'' if len(states) == 1 else 's'}"]
    parts += [f"{count} {what}" for count, what in ((failed, "failed"), (at_work, "not ended")) if count]
    return f"search {'finished' if search['over'] else 'not finished'}: {', '.join(parts)}; {search['project']}"


def _outcome(trial: dict[str, Any]) -> str:
    if trial["score"] is not None:
        return _text(trial["score"])
    error = str(trial["error"] or "").strip().splitlines()
    return f"{trial['status'].lower()}{f': {error[-1][:_ERROR_WIDTH]}' if error else ''}"


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
