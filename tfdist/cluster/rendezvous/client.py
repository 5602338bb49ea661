"""How every rank but the first comes to the rendezvous, as often as it takes until rank 0 is there, and has met all."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import time
from collections.abc import Sequence

from tfdist.cluster.authentication import ENDS, authenticate, leave_without_trace
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.rendezvous.addresses import plain
from tfdist.cluster.rendezvous.entry import Entry

_log = logging.getLogger("tfdist")
# A host that is cut off answers nothing at all: the others are tried after so long.
_CONNECT_SECONDS = 3.0
_PAUSES = (0.05, 0.1, 0.2, 0.5)
# How long after its own deadline a process waits for what rank 0 has to say at its.
_LAST_WORD_SECONDS = 5.0
_WARN_SECONDS = 5.0
_STRANGER = "somebody there does not know the secret of this job"


class _TryAgain(Exception):
    """What has kept this process from meeting the others, for now."""


def attend(entry: Entry, places: Sequence[tuple[str, int]], secret: bytes, timeout: float, job: str = "") -> dict:
    """Meets the others.

    Args:
        entry: this process; its address is filled in.
        places: host and port where rank 0 may be.
        secret: what the processes know.
        timeout: how long to try, in seconds.
        job: what tells the job from others, for messages.

    Returns:
        As `MeetingServer.meet`; "over" in it if the others have met before, and this process is to take the place
        that it had.

    Raises:
        ClusterError: if rank 0 is not found, or says that the processes do not fit together.
    """
    deadline = time.monotonic() + timeout
    problems: dict[str, str] = {}
    waiting: list[int] = []
    attempt, warned = 0, False
    while True:
        for host, port in places:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                return _attend_at(host, port, entry, secret, deadline, waiting)
            except _TryAgain as problem:
                problems[f"{host}:{port}"] = str(problem)
        if time.monotonic() >= deadline:
            raise ClusterError(_not_met(entry, problems, waiting, timeout, job))
        if not warned and time.monotonic() > deadline - timeout + _WARN_SECONDS:
            warned = True
            _log.warning(
                "rank %d has not reached rank 0 yet, and goes on trying: %s", entry.rank, _by_problem(problems)
            )
        time.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
        attempt += 1


def _attend_at(host: str, port: int, entry: Entry, secret: bytes, deadline: float, waiting: list[int]) -> dict:
    left = max(0.1, min(_CONNECT_SECONDS, deadline - time.monotonic()))
    try:
        connected = socket.create_connection((host, port), timeout=left)
    except OSError as error:
        raise _TryAgain(getattr(error, "strerror", None) or str(error) or "no answer") from None
    entry = dataclasses.replace(entry, address=plain(connected.getsockname()[0]))
    try:
        connection = authenticate(connected, secret, first=False)
    except ENDS as error:
        raise _TryAgain(f"{_STRANGER} ({error or 'hung up'})") from None
    try:
        connection.send_bytes(entry.to_json())
        while connection.poll(max(0.0, deadline + _LAST_WORD_SECONDS - time.monotonic())):
            message = json.loads(connection.recv_bytes())
            if "error" in message:
                raise ClusterError(message["error"])
            if "addresses" in message:
                return message
            if "under way" in message:
                raise _TryAgain("the others have met already; as soon as they are started again, all meet anew")
            waiting[:] = message["waiting for"]
            _log.info("rank 0 is there; it waits for ranks %s", ", ".join(map(str, waiting[:20])))
        raise _TryAgain("it is there, but the others have not come")
    except (OSError, EOFError):
        raise _TryAgain("it was there, and is gone") from None
    finally:
        # The port of rank 0 would be taken for a minute if it is started again.
        leave_without_trace(connection)


def _not_met(entry: Entry, problems: dict[str, str], waiting: list[int], timeout: float, job: str) -> str:
    seen = _by_problem(problems)
    if any(problem.startswith(_STRANGER) for problem in problems.values()):
        own = f"is {job!r}" if job else "has no name"
        seen += f"; for this process the job {own}: TFDIST_JOB and TFDIST_TOKEN have to be the same on all"
    missing = f"; rank 0 was waiting for ranks {', '.join(map(str, waiting[:20]))}" if waiting else ""
    return (
        f"Received: no meeting of all {entry.size} processes within {timeout:.3g} s, as rank {entry.rank} on "
        f"{entry.name} saw it: {seen or 'nobody has told where rank 0 is'}{missing}. "
        "Expected: rank 0 at one of these places. See what rank 0 has printed, and whether this host reaches its (a "
        "firewall? TFDIST_PORTS sets the ports, TFDIST_MEETING the host of rank 0, TFDIST_INTERFACE the network); set "
        "TFDIST_TOKEN to the same text on all processes if their home folders differ"
    )


def _by_problem(problems: dict[str, str]) -> str:
    """What was seen at each place, in few words."""
    places: dict[str, list[str]] = {}
    for place, problem in problems.items():
        places.setdefault(problem, []).append(place)
    return "; ".join(f"{', '.join(where)}: {problem}" for problem, where in places.items())
