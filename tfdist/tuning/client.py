"""The oracle as a tuner sees it: each call of its methods is a request to the process that keeps the oracle."""

from __future__ import annotations

import builtins
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from keras_tuner import HyperParameters, Oracle
from keras_tuner.engine.trial import Trial

from tfdist.cluster import sockets
from tfdist.cluster.connections import ENDS, authenticate, framed, receive, send
from tfdist.tuning.member import START_AGAIN, Meeting, Member
from tfdist.tuning.service import LARGEST, LEAVES, SEARCHES, STATE

Answer = dict[str, Any]

PAUSE = 0.25
# Between the processes of a trial, which go on together.
_SHORT_PAUSE = 0.02
_CONNECT_SECONDS = 10.0
# An oracle may think for long about its next trial.
_ANSWER_SECONDS = 3600.0
# So long may the process that keeps the oracle be away; on one machine, tfdist ends the search before.
_AWAY_SECONDS = 3600.0
# A process that is not the first of its tuner may have missed an answer that a former start of the oracle has given.
_MISSED_SECONDS = 60.0


class OracleClient:
    """What a tuner has in place of its oracle while it searches.

    Other attributes are those of the script's oracle, which knows nothing of the trials of other processes.

    Args:
        oracle: the script's.
        member: this process.
        number: which call of `search` in the script this is, from 1.
        ask: answers a request.
    """

    def __init__(self, oracle: Oracle, member: Member, number: int, ask: Callable[[Answer], Answer]) -> None:
        self._oracle = oracle
        self._member = member
        self._number = number
        self._ask = ask
        self._trial = self._call_number = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_oracle":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._oracle, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> OracleClient:
        """The same: KerasTuner copies the callbacks of each trial, with the tuner and its oracle if they hold it."""
        return self

    @property
    def verbose(self) -> Any:
        """As the oracle's."""
        return self._oracle.verbose

    @verbose.setter
    def verbose(self, value: Any) -> None:
        self._oracle.verbose = value

    def create_trial(self, tuner_id: str) -> Trial:
        """Waits for a trial; one of status STOPPED says that there are no more."""
        return Trial.from_state(self._call("create_trial"))

    def end_trial(self, trial: Trial) -> None:
        """Reports how a trial has ended; with several processes, once all of them have."""
        member = self._member
        if member.processes > 1 and trial.status == "COMPLETED" and not _trains_together():
            _refuse(
                f"Received: a script that has trained a trial without a strategy, and --workers-per-trial "
                f"{member.processes}. Expected: a strategy such as tfdist.MultiWorkerMirroredStrategy, which lets the "
                "processes of a trial train together: create it at the top of the script, and pass it to the tuner "
                "as distribution_strategy=, or leave --workers-per-trial out"
            )
        self._call("end_trial", trial.get_state())
        self._trial, self._call_number = self._trial + 1, 0

    def update_trial(self, trial_id: str, metrics: dict[str, Any], step: int = 0) -> Trial:
        """Reports metrics of a trial."""
        numbers = {name: float(value) for name, value in metrics.items()}
        return Trial.from_state(self._call("update_trial", trial_id, numbers, int(step)))

    def get_trial(self, trial_id: str) -> Trial:
        """What the oracle knows of a trial."""
        return Trial.from_state(self._call("get_trial", trial_id))

    def get_best_trials(self, num_trials: int = 1) -> list[Trial]:
        """The best trials so far."""
        return [Trial.from_state(state) for state in self._call("get_best_trials", num_trials)]

    def get_space(self) -> HyperParameters:
        """The search space."""
        return HyperParameters.from_config(self._call("get_space"))

    def update_space(self, hyperparameters: HyperParameters) -> None:
        """Adds to the search space."""
        self._call("update_space", hyperparameters.get_config())

    def remaining_trials(self) -> int | None:
        """How many trials may still begin."""
        return self._call("remaining_trials")

    def save(self) -> None:
        """Does nothing: the process that keeps the oracle saves it."""

    def reload(self) -> None:
        """Does nothing, as `save`."""

    def wait_for_search(self, number: int) -> None:
        """Returns when the script has begun this search in the process that keeps the oracle."""
        while self._ask({"name": SEARCHES}).get("value", 0) < number:
            time.sleep(PAUSE)

    def state(self) -> Answer:
        """All that the shared oracle knows."""
        return self._ask({"name": STATE, "search": self._number})["value"]

    def leave(self) -> None:
        """Says that this process needs nothing more of the search."""
        self._ask({"name": LEAVES, "search": self._number, "rank": self._member.rank})

    def _call(self, name: str, *arguments: Any) -> Any:
        member = self._member
        request = {
            "search": self._number,
            "tuner": member.tuner,
            "rank": member.rank,
            "attempt": member.attempt,
            "trial": self._trial,
            "call": self._call_number,
            "name": name,
            "arguments": arguments,
        }
        missed = _Missed(member)
        while "wait" in (answer := self._ask(request)):
            missed.check()
            in_step = member.processes > 1 and name != "create_trial"
            time.sleep(_SHORT_PAUSE if in_step else PAUSE)
        self._call_number += 1
        if "again" in answer:
            _start_again(answer["again"])
        if "failed" in answer:
            self._fail(answer["failed"])
        if "error" in answer:
            kind, text = answer["error"]
            known = getattr(builtins, kind, None)
            is_error = isinstance(known, type) and issubclass(known, Exception)
            raise known(text) if is_error else RuntimeError(f"{kind}: {text}")
        return answer["value"]

    def _fail(self, text: str) -> NoReturn:
        if self._member.keeps_oracle:
            raise SearchEndedError(text)
        while True:  # the process that keeps the oracle raises the error, and tfdist ends the others
            time.sleep(PAUSE)


class SearchEndedError(BaseException):
    """Leaves the search in the process that keeps the oracle. Not an `Exception`: a tuner catches these in a trial."""


class Remote:
    """Asks the process that keeps the oracle, wherever that is, and waits while it is away.

    Args:
        member: this process.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._answered = ""

    def __call__(self, request: Answer) -> Answer:
        """The answer to a request.

        Raises:
            ConnectionError: that process has been away for too long.
        """
        deadline, problem = time.monotonic() + _AWAY_SECONDS, "it has not begun its search"
        while time.monotonic() < deadline:
            meeting = Meeting.read(Path(self._member.folder), self._member.search_id)
            hosts = meeting.hosts if meeting is not None and meeting.port else ()
            # The one that has answered before comes first: another may cost a time-out each time.
            for host in sorted(hosts, key=lambda one: one != self._answered):
                try:
                    answer = _exchange((host, meeting.port), meeting.key, request)
                    self._answered = host
                    return answer
                except ENDS as error:
                    problem = f"{host}: {sockets.reason_of(error)}"
            time.sleep(PAUSE)
        raise ConnectionError(
            f"the process that keeps the oracle was away for {_AWAY_SECONDS / 60:.0f} minutes ({problem})"
        )


def _exchange(place: tuple[str, int], key: str, request: Answer) -> Answer:
    connection = framed(sockets.connect(place, _CONNECT_SECONDS))
    with connection:
        authenticate(connection, key.encode(), first=False)
        send(connection, request, time.monotonic() + _CONNECT_SECONDS)
        return receive(connection, LARGEST, time.monotonic() + _ANSWER_SECONDS)


class _Missed:
    """Notices that a process waits for an answer that the tuner's first one got before the oracle was started again."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._since = time.monotonic()
        self._start = self._current()

    def check(self) -> None:
        if not self._member.rank or time.monotonic() - self._since < _MISSED_SECONDS:
            return
        if self._current() != self._start:
            _start_again("the oracle was started again in the middle of a call")

    def _current(self) -> str:
        meeting = Meeting.read(Path(self._member.folder), self._member.search_id) if self._member.rank else None
        return meeting.start if meeting else ""


def _trains_together() -> bool:
    jobs = sys.modules.get("tfdist.runtime.job")
    return jobs is not None and jobs.joined() is not None


def _start_again(why: str) -> NoReturn:
    print(f"tfdist: this tuner starts again: {why}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # The others may wait for this process in a collective, which no exception would end.
    os._exit(START_AGAIN)


def _refuse(text: str) -> NoReturn:
    from tfdist.supervision.exit_codes import REFUSED

    print(f"tfdist: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(REFUSED)
