"""The oracle of a search that several tuners share: no trial is lost with its tuner, and none is handed out twice.

KerasTuner's own distributed mode (`KERASTUNER_ORACLE_IP`) keeps neither. The trial of a tuner that dies stays RUNNING
for ever, and the chief waits for it (keras-tuner issue 915). A chief that is started again queues the trials that its
tuners are still working on once more. `overwrite=True` lets each process that starts delete what the others have. A
failure of the oracle leaves its lock locked, and all wait.

Here the oracle is its files, in the folder of the project that all tuners see. Each call of a tuner takes a lock, reads
what the others have written, and writes what it changes in one piece before the tuner gets its answer. A tuner that was
started again gets the trial that it had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from keras_tuner import HyperParameters, Oracle
from keras_tuner.engine.trial import Trial

from tfdist.supervision.events import EventLog
from tfdist.tuning.files import ProjectMark, hold, read_search, turn_of, write_search
from tfdist.tuning.member import START_AGAIN, Member

PAUSE = 0.25
IDLE, RUNNING, STOPPED, COMPLETED, FAILED = "IDLE", "RUNNING", "STOPPED", "COMPLETED", "FAILED"
_OVER = (COMPLETED, FAILED)
# What reads or extends what the oracle knows, and needs nothing else.
_IN_TURN = ("get_trial", "get_best_trials", "get_space", "update_space", "remaining_trials")


class SharedOracle:
    """What a tuner has in place of its oracle while it searches. Its state is in the files of its project.

    Other attributes are those of the script's oracle.

    Args:
        oracle: the script's; it knows what the files said at the last turn.
        member: this process.
        number: which call of `search` in the script this is, from 1.
        project: the folder of the project.
    """

    def __init__(self, oracle: Oracle, member: Member, number: int, project: Path) -> None:
        self._oracle = oracle
        self._member = member
        self._number = number
        self._project = project
        self._mark = ProjectMark(project)
        self._journal = EventLog(member.folder, member.name)
        # All trials have ended. A later search may use the project, or remove it, while others have not left this one.
        self._closed = False
        self._limit: threading.Timer | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._oracle, name)
        return functools.partial(self._in_turn, found) if name in _IN_TURN else found

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedOracle:
        """The same: KerasTuner copies the callbacks of each trial, with the tuner and its oracle if they hold it."""
        return self

    def begin(self, save_tuner: Callable[[], None]) -> None:
        """Begins the search, or goes on with it, in the first process; the others come later.

        Args:
            save_tuner: writes the tuner's and the oracle's files.

        Raises:
            OSError: another search is at work in the project.
        """
        hold(self._project)
        with self._turn():
            if self._closed:  # the script was started again from its top
                return
            content = self._mark.content
            if content["search_id"] != self._member.search_id:
                # With other resources, each trial whose tuner was killed has all its chances again.
                content["handed"] = {}
            for name in ("failure", "stopped_with"):
                content.pop(name, None)
            content.update(search_id=self._member.search_id, number=self._number)
            self._recover()
            save_tuner()
            self._mark.write()
            facts = {"objective": self._oracle.objective.name, "max_trials": self._oracle.max_trials}
            counts = self._write()
            self._journal.write("search", number=self._number, project=str(self._project), **facts, counts=counts)

    def create_trial(self, tuner_id: str) -> Trial:
        """The trial that this tuner is to run; of status IDLE if it is to ask again.

        Raises:
            RuntimeError: the search has ended with an error in another process.
        """
        trial = self._create()
        if trial.status == IDLE:
            time.sleep(PAUSE)
        elif trial.status == RUNNING and self._member.trial_timeout is not None:
            self._limit = threading.Timer(self._member.trial_timeout, self._end_late, [trial])
            # KerasTuner tells by the name of its thread who holds the lock of an oracle, and keeps it after an error.
            self._limit.name, self._limit.daemon = threading.current_thread().name, True
            self._limit.start()
        return trial

    def update_trial(self, trial_id: str, metrics: dict[str, Any], step: int = 0) -> Trial:
        """As the oracle's."""
        with self._turn():
            self._check()
            numbers = {name: float(value) for name, value in metrics.items()}
            return self._oracle.update_trial(trial_id, numbers, int(step))

    def end_trial(self, trial: Trial) -> None:
        """Notes how this tuner's trial has ended; once.

        Raises:
            RuntimeError: the search has ended with an error in another process.
        """
        if self._limit is not None:
            self._limit.cancel()
        with self._turn():
            self._check()
            known = self._oracle.ongoing_trials.get(self._member.id)
            if known is not None and known.trial_id == trial.trial_id:
                self._end(trial)

    def spare(self) -> None:
        """Lets this tuner's trial keep its chances: its process was asked to stop, and has saved it."""
        with self._turn():
            trial = self._oracle.ongoing_trials.get(self._member.id)
            if trial is not None and not self._closed:
                handed = self._mark.content["handed"]
                handed[trial.trial_id] = handed.get(trial.trial_id, 0) - 1
                self._mark.write()

    def save(self) -> None:
        """Does nothing: each call is saved."""

    def close(self) -> None:
        """Notes that the search is over, unless the script of the first process has left it before."""
        with self._turn():
            has_failed = self._closed or "failure" in self._mark.content
            if not has_failed and self._has_stopped() and not self._is_busy():
                trials = [trial.get_state() for trial in self._oracle.trials.values()]
                state = {"oracle": self._oracle.get_state(), "states": trials}
                self._journal.write("searched", number=self._number, counts=self._write(state))

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One call of this process, with what the others have written before."""
        with turn_of(self._member):
            folder = Path(self._member.folder)
            search = None if self._closed else read_search(folder, self._member.search_id, self._number)
            if search is not None and search["over"]:
                self._oracle.trials = {state["trial_id"]: Trial.from_state(state) for state in search["states"]}
                self._oracle.set_state(search["oracle"])
                self._closed = True
            if not self._closed:
                self._mark = ProjectMark(self._project)
                # NFS answers from its memory what is asked about a file that is not opened.
                with contextlib.suppress(FileNotFoundError):
                    self._load(json.loads((self._project / "oracle.json").read_bytes()))
            yield

    def _in_turn(self, method: Callable, *args: Any, **kwargs: Any) -> Any:
        with self._turn():
            result = method(*args, **kwargs)
            if method.__name__ == "update_space" and not self._closed:
                self._oracle.save()
            return result

    def _load(self, state: dict[str, Any]) -> None:
        """Takes over what the files say. A trial without a place in the oracle's file was given to nobody."""
        before, trials = self._oracle.trials, {}
        for trial_id in state["start_order"]:
            known = before.get(trial_id)
            if known is None or known.status not in _OVER or trial_id not in state["end_order"]:
                path = self._project / f"trial_{trial_id}" / "trial.json"
                known = Trial.from_state(json.loads(path.read_bytes()))
            trials[trial_id] = known
        self._oracle.trials = trials
        self._oracle.set_state(state)

    def _recover(self) -> None:
        """Gives back the trials that no tuner of this search has: they are tried again."""
        oracle, queue = self._oracle, self._oracle._retry_queue
        members = {dataclasses.replace(self._member, tuner=tuner).id for tuner in range(self._member.tuners)}
        for tuner in set(oracle.ongoing_trials) - members:
            del oracle.ongoing_trials[tuner]
        at_work = {trial.trial_id for trial in oracle.ongoing_trials.values()}
        queue[:] = [one for one in dict.fromkeys(queue) if one not in at_work and one not in oracle.end_order]
        queue += [one for one in oracle.trials if one not in (*at_work, *queue, *oracle.end_order)]
        for trial in map(oracle.trials.__getitem__, queue):
            self._run_again(trial)
        for trial_id in at_work:
            oracle.trials[trial_id].status = RUNNING  # it may have ended in its own file only

    def _create(self) -> Trial:
        with self._turn():
            self._check()
            if self._closed:
                return _empty(STOPPED)
            # Its process was killed, or the search was interrupted.
            while (trial := self._oracle.ongoing_trials.get(self._member.id)) is not None:
                if self._may_go_on(trial):
                    return trial
                self._end(trial)
            if self._has_stopped() and not self._oracle._retry_queue:
                trial = _empty(STOPPED)
            else:
                self._fit_regressor()
                trial = self._call("create_trial", self._member.id)
                if trial.status == STOPPED:
                    self._mark.content["stopped_with"] = self._size_of_space()
                    self._mark.write()
            if trial.status == STOPPED:
                return _empty(IDLE) if self._is_busy() else trial
            if trial.status == RUNNING:
                self._mark.content["handed"].setdefault(trial.trial_id, 0)
                self._mark.write()
                values = trial.hyperparameters.values
                self._journal.write("trial", trial=trial.trial_id, hyperparameters=values, counts=self._write())
            return trial

    def _fit_regressor(self) -> None:
        """Lets a Bayesian oracle guess the scores of trials at work from those that have ended, as KerasTuner's does.

        Its regressor is in no file: each turn has a new one, and that takes every trial at work for a score of 1.
        """
        oracle = self._oracle
        ended = {name: trial for name, trial in oracle.trials.items() if trial.status == COMPLETED}
        if not (hasattr(oracle, "gpr") and ended and oracle.ongoing_trials):
            return
        everything = oracle.trials, oracle.ongoing_trials
        oracle.trials, oracle.ongoing_trials = ended, {}
        try:
            oracle.gpr.fit(*(np.nan_to_num(one, posinf=0, neginf=0) for one in oracle._vectorize_trials()))
        finally:
            oracle.trials, oracle.ongoing_trials = everything

    def _may_go_on(self, trial: Trial) -> bool:
        """Whether a tuner runs the trial that it has already; no longer if that has killed it again and again."""
        # A trial of an interrupted search has all its chances.
        handed = self._mark.content["handed"]
        times = handed[trial.trial_id] = handed.get(trial.trial_id, -1) + 1
        self._mark.write()
        if times > self._member.max_restarts:
            trial.status = FAILED
            trial.message = f"Its tuner was killed or lost {times} times (--max-restarts {self._member.max_restarts})."
            return False
        self._run_again(trial)
        # The oracle does it for new ones only, and their end would fail without.
        self._oracle._display.on_trial_begin(trial)
        self._oracle.save()
        self._journal.write("trial-again", trial=trial.trial_id, times=times, counts=self._write())
        return True

    def _run_again(self, trial: Trial) -> None:
        """A killed run may have reported metrics, of which KerasTuner would take the mean, or the best."""
        trial.status, trial.metrics = RUNNING, _empty(RUNNING).metrics
        self._oracle._save_trial(trial)

    def _end(self, trial: Trial) -> None:
        self._call("end_trial", trial)
        self._mark.content["handed"].pop(trial.trial_id, None)
        self._mark.write()
        kept = self._oracle.get_trial(trial.trial_id)
        outcome = _outcome(kept)
        ended = {"trial": kept.trial_id, "status": kept.status, "score": outcome["score"], "error": outcome["error"]}
        self._journal.write("trial-ended", **ended, counts=self._write())

    def _end_late(self, trial: Trial) -> NoReturn:
        """Ends a trial that takes too long, and this process with it: nothing else ends a trial that hangs."""
        why = f"It took longer than {self._member.trial_timeout:g} s (--trial-timeout)."
        try:
            self.end_trial(Trial.from_state({**trial.get_state(), "status": FAILED, "message": why}))
        except BaseException as error:  # the search has ended with it, and the trial does not
            print(f"tfdist: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        start_again(f"trial {trial.trial_id} has failed. {why}")

    def _call(self, method: str, argument: Any) -> Any:
        """Changes the oracle. It is written once, when the change is complete: oracles save in between, and go on."""
        vars(self._oracle)["save"] = lambda: None
        try:
            result = getattr(self._oracle, method)(argument)
        except Exception as error:
            self._mark.content.setdefault("failure", str(error))
            self._mark.write()
            raise
        finally:
            del vars(self._oracle)["save"]
        if not (isinstance(result, Trial) and result.status == IDLE):  # who waits, asks several times a second
            self._oracle.save()
        return result

    def _check(self) -> None:
        content = self._mark.content
        if not self._closed and ("failure" in content or content["number"] > self._number):
            raise RuntimeError(content.get("failure", "tuner 0 has left the search before its end"))

    def _has_stopped(self) -> bool:
        """Whether the oracle has no more trials.

        Asked again, a random search would go on drawing, and find values that a single tuner would not. But a trial
        that declares its hyperparameters itself makes more trials possible when it ends.
        """
        return self._mark.content.get("stopped_with", -1) >= self._size_of_space()

    def _size_of_space(self) -> int:
        return len(self._oracle.get_space().space)

    def _is_busy(self) -> bool:
        return bool(self._oracle.ongoing_trials or self._oracle._retry_queue)

    def _write(self, state: dict[str, Any] | None = None) -> dict[str, Any]:
        """Writes what has become of all trials, and counts them; with the oracle's state, the search is over."""
        oracle = self._oracle
        rows = [
            {
                "trial": trial.trial_id,
                "status": trial.status,
                **_outcome(trial),
                "hyperparameters": trial.hyperparameters.values,
            }
            for trial in oracle.get_best_trials(max(len(oracle.trials), 1))
        ]
        known = {"project": str(self._project), "objective": oracle.objective.name, "max_trials": oracle.max_trials}
        try:
            write_search(self._member, self._number, **known, over=state is not None, trials=rows, **(state or {}))
        except OSError as error:
            # The search goes on.
            warnings.warn(f"The table of the trials beside the logs is not complete: {error}", stacklevel=2)
        done = sum(row["status"] in _OVER for row in rows)
        best = rows[0] if rows and rows[0]["status"] == COMPLETED else {"score": None, "trial": None}
        running = len(oracle.ongoing_trials)
        return {"done": done, "running": running, "best": best["score"], "best_trial": best["trial"]}


def start_again(why: str) -> NoReturn:
    """Ends this process so that the launcher starts its tuner again."""
    print(f"tfdist: this tuner starts again: {why}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(START_AGAIN)


def _outcome(trial: Trial) -> dict[str, Any]:
    """Score and error of a trial. JSON has no numbers that are not finite: there the error says what the score is."""
    if trial.score is None or math.isfinite(trial.score):
        return {"score": trial.score, "error": trial.message}
    return {"score": None, "error": trial.message or f"the score is {trial.score}"}


def _empty(status: str) -> Trial:
    """A trial that is none, of this status."""
    return Trial(HyperParameters(), trial_id="", status=status)
