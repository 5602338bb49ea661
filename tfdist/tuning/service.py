"""The oracle's process serves the others: a request and its answer for each connection, both JSON.

A tuner may have several processes, which run the same trial in step. Its first one asks the oracle, and the others get
the answers that it got: the n-th call of each gets the same answer. A trial has ended when all of them say so.

request                                                                  answer
{"search": 1, "tuner": 2, "rank": 0, "attempt": "a", "trial": 0,
 "call": 0, "name": "create_trial", "arguments": []}                     {"value": ...}, {"error": [type, text]},
                                                                         {"wait": true}: ask again in a moment, or
                                                                         {"again": text}: the tuner has to start again
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_tuner import HyperParameters

from tfdist.cluster import sockets
from tfdist.cluster.connections import Connection, Listener, authenticate, receive, send
from tfdist.tuning.member import Meeting, Member, own_hosts
from tfdist.tuning.shared_oracle import COMPLETED, IDLE, SearchFailedError, SharedOracle

# Requests that any process makes for itself. The last one is of a process of the tuner that keeps the oracle, which
# must not end before.
SEARCHES, STATE, LEAVES = "searches", "state", "leaves"
_WAIT: dict[str, Any] = {"wait": True}
LARGEST = 1 << 26  # bytes of a message
_SECONDS = 60.0
_PAUSE = 0.02
# When one process of a tuner has failed in a trial, the others either fail as well, or wait for it in vain.
_PATIENCE = 30.0


@dataclass
class _Tuner:
    """What the processes of a tuner have been told, and have said."""

    attempt: str = ""
    answers: dict[tuple[int, int], tuple[str, dict[str, Any]]] = field(default_factory=dict)
    endings: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    first_ending: dict[int, float] = field(default_factory=dict)
    ended: dict[int, dict[str, Any]] = field(default_factory=dict)


class OracleService:
    """Answers the processes of a search.

    Args:
        member: this process, which keeps the oracle.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._searches: list[SharedOracle] = []
        self._tuners: dict[tuple[int, int], _Tuner] = {}
        # Of which search which process of this tuner has been told all, which it asks for when it leaves the search.
        self._told: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._key = secrets.token_hex(32)
        bound = sockets.bind_host("127.0.0.1", 0) if member.alone else sockets.bind_everywhere(0, reuse=False)
        guests = member.tuners * member.processes
        self._listener = Listener(bound, self._serve, "tfdist-oracle", guests)

    def open(self, shared: SharedOracle) -> None:
        """Serves one more search, and lets the others know where.

        Raises:
            OSError: the file by which they find it cannot be written.
        """
        self._searches.append(shared)
        member = self._member
        where = (own_hosts(member.alone), self._listener.port, self._key, member.attempt)
        Meeting(member.search_id, *where).write(Path(member.folder))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        if request["name"] == SEARCHES:
            return {"value": len(self._searches)}
        number, rank = request["search"], request.get("rank", 0)
        if number > len(self._searches):
            return _WAIT  # it is ahead of this process
        shared = self._searches[number - 1]
        if request["name"] == STATE:
            return {"value": shared.state()}
        if request["name"] == LEAVES:
            self._told.add((number, rank))
            return {"value": None}
        with self._lock:
            tuner = self._tuners.get((number, request["tuner"]))
            if tuner is None or tuner.attempt != request["attempt"]:
                tuner = self._tuners[number, request["tuner"]] = _Tuner(request["attempt"])
        if request["name"] == "end_trial":
            with self._lock:
                return self._end(shared, tuner, request)
        place = request["trial"], request["call"]
        if place in tuner.answers:
            name, answer = tuner.answers[place]
            if name == request["name"]:
                return answer
            return {"again": f"the first process has called {name}, and process {rank} calls {request['name']}"}
        if rank > 0:
            return _WAIT
        answer = self._ask(shared, request)
        if answer is not _WAIT:
            self._keep(tuner, request, answer)
        return answer

    def wait_for_processes(self) -> None:
        """Waits until the other processes of this tuner have left the last search; then this one may end."""
        number = len(self._searches)
        while len([1 for search, _ in tuple(self._told) if search == number]) < self._member.processes - 1:
            time.sleep(_PAUSE)

    def _serve(self, connection: Connection) -> None:
        authenticate(connection, self._key.encode(), first=True)
        deadline = time.monotonic() + _SECONDS
        request = receive(connection, LARGEST, deadline)
        send(connection, self.answer(request), time.monotonic() + _SECONDS)
        # The listener resets the connection, which would drop what is still on its way: the client hangs up first.
        connection.poll(_SECONDS)

    def _keep(self, tuner: _Tuner, request: dict[str, Any], answer: dict[str, Any]) -> None:
        trial = request["trial"]
        tuner.answers = {place: known for place, known in tuner.answers.items() if place[0] >= trial - 1}
        tuner.answers[trial, request["call"]] = request["name"], answer

    def _ask(self, shared: SharedOracle, request: dict[str, Any]) -> dict[str, Any]:
        try:
            value = _CALLS[request["name"]](shared, request, *request["arguments"])
        except SearchFailedError as error:
            return {"failed": str(error)}
        except Exception as error:
            return {"error": [type(error).__name__, str(error)]}
        return _WAIT if isinstance(value, dict) and value.get("status") == IDLE else {"value": value}

    def _end(self, shared: SharedOracle, tuner: _Tuner, request: dict[str, Any]) -> dict[str, Any]:
        trial, rank, [state] = request["trial"], request["rank"], request["arguments"]
        if trial in tuner.ended:
            return tuner.ended[trial]
        said = tuner.endings.setdefault(trial, {})
        said[rank] = state
        failed = [one for _, one in sorted(said.items()) if one["status"] != COMPLETED]
        if failed:
            tuner.first_ending.setdefault(trial, time.monotonic())
        missing = self._member.processes - len(said)
        if missing and not (failed and time.monotonic() - tuner.first_ending[trial] > _PATIENCE):
            return _WAIT
        outcome = failed[0] if failed else said[0]
        answer = self._ask(shared, {**request, "arguments": [outcome]})
        if missing and "value" in answer:
            answer = {"again": "a process has failed in the trial, and others have not"}
        tuner.ended[trial] = answer
        return answer


def _create(shared: SharedOracle, request: dict[str, Any]) -> dict[str, Any]:
    return shared.create_trial(request["tuner"], request["attempt"]).get_state()


def _finish(shared: SharedOracle, request: dict[str, Any], state: dict[str, Any]) -> None:
    shared.end_trial(request["tuner"], state)


_CALLS: dict[str, Callable[..., Any]] = {
    "create_trial": _create,
    "end_trial": _finish,
    "update_trial": lambda shared, request, *arguments: shared.update_trial(*arguments).get_state(),
    "get_trial": lambda shared, request, trial_id: shared.get_trial(trial_id).get_state(),
    "get_best_trials": lambda shared, request, n: [trial.get_state() for trial in shared.get_best_trials(n)],
    "get_space": lambda shared, request: shared.get_space().get_config(),
    "update_space": lambda shared, request, space: shared.update_space(HyperParameters.from_config(space)),
    "remaining_trials": lambda shared, request: shared.remaining_trials(),
}
