"""The oracle of a search that several tuners share: no trial is lost with its tuner, and none is handed out twice.

KerasTuner's own distributed mode (`KERASTUNER_ORACLE_IP`) keeps neither. The trial of a tuner that dies stays RUNNING
for ever, and the chief waits for it (keras-tuner issue 915). A chief that is started again queues the trials that its
tuners are still working on once more. `overwrite=True` lets each process that starts delete what the others have. A
failure of the oracle leaves its lock locked, and all wait.

Here an answer to a tuner is written to disk before it is given, in one piece. A tuner that asks again, because it has
not heard the answer or because it was started again, gets the same answer.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from keras_tuner import HyperParameters, Oracle
from keras_tuner.engine.trial import Trial

from tfdist.atomic_files import write_atomically
from tfdist.supervision.events import EventLog
from tfdist.tuning.member import Member, id_of, name_of
from tfdist.tuning.results import SearchFile

# In the folder of a project: whose search it is, and what tfdist has to know of its trials.
MARK = "tfdist-search.json"

IDLE, RUNNING, STOPPED, COMPLETED, FAILED = "IDLE", "RUNNING", "STOPPED", "COMPLETED", "FAILED"
_OVER = (COMPLETED, FAILED)


class SearchFailedError(RuntimeError):
    """The search has ended with an error of the oracle, which the process that keeps it raises."""


class ProjectMark:
    """What tfdist keeps in the folder of a project.

    Args:
        project: the folder.
    """

    def __init__(self, project: Path) -> None:
        self._path = project / MARK
        try:
            self.content: dict[str, Any] = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            self.content = {}

    def is_of(self, search_id: str, number: int) -> bool:
        """Whether the project belongs to a search of this id, and to this or a later call of `search` in its script."""
        return self.content.get("search_id") == search_id and self.content.get("number", 0) >= number

    @property
    def id(self) -> str:
        """Tells this project from others that were, or will be, in the same folder."""
        return self.content.setdefault("id", secrets.token_hex(4))

    def write(self) -> None:
        """Writes it down."""
        write_atomically(self._path, json.dumps(self.content))


class SharedOracle:
    """Answers the tuners' calls of an oracle's methods.

    Args:
        oracle: the script's, which lives in this process.
        member: this process.
        number: which call of `search` in the script this is, from 1.
        project: the folder of the project.

    Attributes:
        failure: what has ended the search, if an error has.
    """

    def __init__(self, oracle: Oracle, member: Member, number: int, project: Path) -> None:
        self._oracle = oracle
        self._member = member
        self._number = number
        self._lock = threading.RLock()
        # KerasTuner tells by the name of its thread who holds the lock of an oracle, and keeps it after an exception.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfdist-oracle")
        # How large the search space was when the oracle has said that there are no more trials.
        self._stopped_with: int | None = None
        self._mark = ProjectMark(project)
        self.failure: Exception | None = None
        of_same = self._mark.content.get("search_id") == member.search_id
        # Trials that a killed tuner has had: in another search, with other resources, each has all its chances again.
        self._handed: dict[str, list] = self._mark.content.get("handed", {}) if of_same else {}
        self._begun: dict[str, float] = self._mark.content.get("begun", {}) if of_same else {}
        self._seconds: dict[str, float] = self._mark.content.get("seconds", {})
        self._file = SearchFile(Path(member.folder), number, project)
        # The script was started again from its top: the trials that are at work are those of a later search.
        self._closed = of_same and self._mark.content.get("number", 0) > number
        if self._closed:
            return
        with self._lock:
            with self._unsaved():
                self._recover(project)
            oracle.save()
        journal = self._journal(0)
        facts = {"objective": oracle.objective.name, "max_trials": oracle.max_trials, "counts": self._counts()}
        journal.write("search", number=number, project=str(project), **facts)
        self._write_mark()
        self._write_results()

    @property
    def is_over(self) -> bool:
        """Whether all trials have ended, and there will be no more."""
        with self._lock:
            return self.failure is not None or (self._has_stopped() and not self._is_busy())

    def create_trial(self, tuner: int, attempt: str) -> Trial:
        """The trial that a tuner is to run; of status IDLE if it is to ask again later.

        Args:
            tuner: which one asks.
            attempt: the start of the tuner that asks.

        Raises:
            SearchFailedError: the search has ended with an error.
        """
        with self._lock:
            self._check()
            if self._closed:
                return _empty(STOPPED)
            while (trial := self._oracle.ongoing_trials.get(id_of(tuner))) is not None:
                if self._may_go_on(tuner, trial, attempt):
                    return trial
                self._end(tuner, trial)
            return self._next(tuner, attempt)

    def end_trial(self, tuner: int, state: dict[str, Any]) -> None:
        """Notes how a trial has ended. To hear it again changes nothing.

        Raises:
            SearchFailedError: the search has ended with an error.
        """
        with self._lock:
            self._check()
            known = self._oracle.ongoing_trials.get(id_of(tuner))
            if known is not None and known.trial_id == state["trial_id"]:
                self._end(tuner, Trial.from_state(state))

    def update_trial(self, trial_id: str, metrics: dict[str, float], step: int) -> Trial:
        """As the oracle's."""
        with self._lock:
            self._check()
            return self._run("update_trial", trial_id, metrics, step)

    def get_trial(self, trial_id: str) -> Trial:
        """As the oracle's."""
        with self._lock:
            return self._oracle.get_trial(trial_id)

    def get_best_trials(self, count: int) -> list[Trial]:
        """As the oracle's."""
        with self._lock:
            return self._oracle.get_best_trials(count)

    def get_space(self) -> HyperParameters:
        """As the oracle's."""
        with self._lock:
            return self._oracle.get_space()

    def update_space(self, hyperparameters: HyperParameters) -> None:
        """As the oracle's."""
        with self._lock:
            self._oracle.update_space(hyperparameters)

    def remaining_trials(self) -> int | None:
        """As the oracle's."""
        with self._lock:
            return self._oracle.remaining_trials()

    def state(self) -> dict[str, Any]:
        """All that the oracle knows, as plain data; `set_state` takes it up."""
        with self._lock:
            return {
                "oracle": self._oracle.get_state(),
                "trials": [trial.get_state() for trial in self._oracle.trials.values()],
            }

    def close(self) -> None:
        """Notes that the search is over, or that the script has left it."""
        with self._lock:
            self._thread.shutdown()
            if self._closed:
                return
            is_complete = self.is_over and self.failure is None
            self._write_results(is_complete)
            if is_complete:
                journal = self._journal(0)
                journal.write("searched", number=self._number, counts=self._counts())
                self._closed = True
            else:
                self.failure = self.failure or SearchFailedError("tuner 0 has left the search before its end")

    def _next(self, tuner: int, attempt: str) -> Trial:
        waiting = bool(self._oracle._retry_queue)
        trial = None if self._has_stopped() and not waiting else self._call("create_trial", id_of(tuner))
        if trial is not None and trial.status == STOPPED:
            self._stopped_with = self._size_of_space()
        if trial is None or trial.status == STOPPED:
            return _empty(IDLE if self._is_busy() else STOPPED)
        if trial.status == RUNNING:
            if trial.trial_id not in self._oracle._display.trial_start:  # it was begun without being shown
                self._show(trial)
            self._handed[trial.trial_id] = [attempt, self._handed.get(trial.trial_id, ["", 0])[1]]
            self._begun[trial.trial_id] = time.time()
            self._write_mark()
            values = trial.hyperparameters.values
            journal = self._journal(tuner)
            journal.write("trial", trial=trial.trial_id, hyperparameters=values, counts=self._counts())
            self._write_results()
        return trial

    def _may_go_on(self, tuner: int, trial: Trial, attempt: str) -> bool:
        """Whether a tuner runs the trial that it has already; no longer if that has killed it again and again."""
        # A trial of an interrupted search has all its chances.
        before, times = self._handed.get(trial.trial_id, ["", -1])
        if before == attempt:
            return True  # it has not heard the last answer
        times += 1
        goes_on = times <= self._member.max_restarts
        if goes_on:
            self._forget_metrics(trial)
            self._show(trial)
        self._handed[trial.trial_id] = [attempt, times]
        self._write_mark()
        if goes_on:
            journal = self._journal(tuner)
            journal.write("trial-again", trial=trial.trial_id, times=times)
            return True
        trial.status = FAILED
        trial.message = f"Its tuner was killed or lost {times} times (--max-restarts {self._member.max_restarts})."
        return False

    def _end(self, tuner: int, trial: Trial) -> None:
        begun = self._begun.pop(trial.trial_id, None)
        if begun is not None:
            spent = self._seconds.get(trial.trial_id, 0.0) + time.time() - begun
            self._seconds[trial.trial_id] = round(max(spent, 0.0), 3)
        self._call("end_trial", trial)
        self._handed.pop(trial.trial_id, None)
        self._write_mark()
        kept = self._oracle.get_trial(trial.trial_id)
        outcome = _outcome(kept)
        ended = {"trial": kept.trial_id, "status": kept.status, "score": outcome["score"], "error": outcome["error"]}
        journal: EventLog = self._journal(tuner)
        seconds = self._seconds.get(kept.trial_id)
        journal.write("trial-ended", **ended, seconds=seconds, counts=self._counts())
        self._write_results()

    def _call(self, method: str, argument: Any) -> Any:
        try:
            with self._unsaved():
                result = self._run(method, argument)
            if not (isinstance(result, Trial) and result.status == IDLE):  # who waits, asks several times a second
                self._oracle.save()
            return result
        except Exception as error:
            self.failure = error
            raise SearchFailedError(str(error)) from error

    def _run(self, method: str, *arguments: Any) -> Any:
        return self._thread.submit(getattr(self._oracle, method), *arguments).result()

    def _check(self) -> None:
        if self.failure is not None:
            raise SearchFailedError(str(self.failure))

    def _forget_metrics(self, trial: Trial) -> None:
        """A killed run may have reported some, of which KerasTuner would take the mean, or the best."""
        trial.metrics = _empty(trial.status).metrics
        self._oracle._save_trial(trial)

    def _show(self, trial: Trial) -> None:
        """Prints that a trial begins; the oracle does it for new ones only, and its end would fail without."""
        self._oracle._display.on_trial_begin(trial)
        self._oracle.save()

    @contextlib.contextmanager
    def _unsaved(self) -> Iterator[None]:
        """The oracle's state is written once, when a change is complete: oracles save in between, and go on then."""
        vars(self._oracle)["save"] = lambda: None
        try:
            yield
        finally:
            del vars(self._oracle)["save"]

    def _recover(self, project: Path) -> None:
        """Mends what `Oracle.reload` makes of a search that was killed, or of one whose tuners still run."""
        oracle = self._oracle
        started, queue = oracle.start_order, oracle._retry_queue
        # A trial whose file was written, but not the oracle's, was given to nobody: it is made again, the same.
        for trial_id in set(oracle.trials) - set(started):
            del oracle.trials[trial_id]
        # One that has ended in its own file only is not over: who ran it says so again, or runs it again.
        queue[:] = [one for one in dict.fromkeys(queue) if one in oracle.trials and one not in oracle.end_order]
        tuners = [id_of(tuner) for tuner in range(self._member.tuners)]
        with contextlib.suppress(OSError, ValueError):
            for tuner, trial_id in json.loads((project / "oracle.json").read_bytes())["ongoing_trials"].items():
                if tuner in tuners and trial_id in queue:
                    queue.remove(trial_id)
                    oracle.ongoing_trials[tuner] = oracle.trials[trial_id]
        at_work = {trial.trial_id for trial in oracle.ongoing_trials.values()}
        for trial_id, trial in oracle.trials.items():
            if trial.status == RUNNING and trial_id not in at_work and trial_id not in queue:
                queue.append(trial_id)
        for trial in map(oracle.trials.__getitem__, queue):
            self._forget_metrics(trial)
        for trial in oracle.ongoing_trials.values():
            trial.status = RUNNING
            self._begun.setdefault(trial.trial_id, time.time())

    def _has_stopped(self) -> bool:
        """Whether the oracle has no more trials.

        Asked again, a random search would go on drawing, and find values that a single tuner would not. But a trial
        that declares its hyperparameters itself makes more trials possible when it ends.
        """
        return self._stopped_with is not None and self._stopped_with >= self._size_of_space()

    def _size_of_space(self) -> int:
        return len(self._oracle.get_space().space)

    def _is_busy(self) -> bool:
        return bool(self._oracle.ongoing_trials or self._oracle._retry_queue)

    def _write_mark(self) -> None:
        of_trials = {"handed": self._handed, "begun": self._begun, "seconds": self._seconds}
        self._mark.content.update(id=self._mark.id, search_id=self._member.search_id, number=self._number, **of_trials)
        self._mark.write()

    def _write_results(self, is_over: bool = False) -> None:
        trials = self._oracle.get_best_trials(max(len(self._oracle.trials), 1))
        rows = [
            {
                "trial": trial.trial_id,
                "status": trial.status,
                **_outcome(trial),
                "seconds": self._seconds.get(trial.trial_id),
                "hyperparameters": trial.hyperparameters.values,
            }
            for trial in trials
        ]
        self._file.write(is_over, rows, **self._facts())

    def _facts(self) -> dict[str, Any]:
        objective = self._oracle.objective
        return {"objective": objective.name, "direction": objective.direction, "max_trials": self._oracle.max_trials}

    def _counts(self) -> dict[str, Any]:
        states = [trial.status for trial in self._oracle.trials.values()]
        done = [trial for trial in self._oracle.get_best_trials(1) if trial.status == COMPLETED]
        score = _outcome(done[0])["score"] if done else None
        best = {"best": score, "best_trial": None if score is None else done[0].trial_id}
        over = sum(state in _OVER for state in states)
        return {"done": over, "running": len(self._oracle.ongoing_trials), **best}

    def _journal(self, tuner: int) -> EventLog:
        return EventLog(self._member.folder, name_of(tuner))


def set_state(oracle: Oracle, state: dict[str, Any]) -> None:
    """Lets an oracle know all that another one knows, whose search is over."""
    trials = map(Trial.from_state, state["trials"])
    oracle.trials = {trial.trial_id: trial for trial in trials}
    oracle.set_state(state["oracle"])


def _outcome(trial: Trial) -> dict[str, Any]:
    """Score and error of a trial. JSON has no numbers that are not finite: there the error says what the score is."""
    if trial.score is None or math.isfinite(trial.score):
        return {"score": trial.score, "error": trial.message}
    return {"score": None, "error": trial.message or f"the score is {trial.score}"}


def _empty(status: str) -> Trial:
    """A trial that is none, of this status."""
    return Trial(HyperParameters(), trial_id="", status=status)
