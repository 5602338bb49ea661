"""Tells Kubeflow Trainer how far a training is: it shows that as `status.trainerStatus` of the TrainJob.

The controller sets three variables in each pod, if its feature gate TrainJobStatus is on: where to POST, and the files
with its certificate authority and with a token of the pod, which is renewed before it expires.

References:
    https://github.com/kubeflow/trainer/tree/master/proposals/2779-trainjob-progress
    pkg/statusserver and pkg/runtime/framework/plugins/trainjobstatus of kubeflow/trainer, version 2.3
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import json
import logging
import math
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tfdist.cluster.foreign_text import cleaned

URL, CA_CERT, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{part}" for part in ("URL", "CA_CERT", "TOKEN"))

_log = logging.getLogger("tfdist")

# Seconds. The controller asks for at most one report in five seconds.
_INTERVAL, _LONGEST_INTERVAL = 10.0, 300.0
# For each answer of the network, for a whole report, and for the last one, for which the end of the program waits.
_TIMEOUT, _WHOLE_TIMEOUT, _LAST_TIMEOUT = 5.0, 15.0, 5.0
# What the custom resource allows.
_MOST_METRICS, _LONGEST_TEXT, _LARGEST = 256, 64, 2**31 - 1
_MOST_BYTES, _LONGEST_TOKEN = 64 * 1024, 16 * 1024
# RFC 6750: what may be in a header. An error message of http.client would show all else.
_BEARER = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


class _NotSent(Exception):
    """Why a report has not arrived; for people."""


def status_of(fraction: float | None, seconds_left: float | None, metrics: Mapping[str, Any], now: float) -> dict:
    """What is sent: numbers that the custom resource would refuse are left out.

    Args:
        fraction: how much is done; 1 only if all is.
        seconds_left: to the end of the training; None if unknown.
        metrics: by their names; what is no number is left out.
        now: in seconds since 1970.

    Example:
        >>> status_of(0.456, 12.3, {"loss": 0.123456789}, now=0.0)["trainerStatus"]["metrics"]
        [{'name': 'loss', 'value': '0.123457'}]
    """
    numbers = [(name, value) for name, value in metrics.items() if name and type(value) in (int, float)]
    status: dict[str, Any] = {
        "metrics": [
            {"name": cleaned(name)[:_LONGEST_TEXT], "value": f"{value:.6g}" if isinstance(value, float) else str(value)}
            for name, value in numbers[:_MOST_METRICS]
            if isinstance(value, float) or abs(value) <= _LARGEST
        ],
        "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
    }
    if fraction is not None:
        status["progressPercentage"] = 100 if fraction >= 1 else min(int(fraction * 100), 99)
    if seconds_left is not None and math.isfinite(seconds_left):
        status["estimatedRemainingSeconds"] = int(min(max(seconds_left, 0), _LARGEST))
    return {"trainerStatus": status}


class TrainJobStatus:
    """Sends reports in a thread of its own: nothing that a server does holds the training up, or ends it.

    Only the newest report is sent, every ten seconds at most, and less often to a server that does not take it. What
    goes wrong is logged once.

    Args:
        url: where to POST.
        ca_cert: file with the certificate authority by which the server is known. Others do not count.
        token: file with the token of the pod. It is renewed there, and read again for each report.

    Example:
        >>> TrainJobStatus.from_environment() is None  # outside of a TrainJob
        True
    """

    def __init__(self, url: str, ca_cert: str, token: str) -> None:
        self._url, self._ca_cert, self._token = url, Path(ca_cert), Path(token)
        self._changed = threading.Condition()
        self._pending: dict | None = None
        self._is_last = self._is_sending = self._is_closing = self._has_complained = False
        # When the next report may be sent, and the next last one of a fit.
        self._due = {False: 0.0, True: 0.0}
        self._interval = _INTERVAL
        self._process = 0

    @classmethod
    def from_environment(cls) -> TrainJobStatus | None:
        """That of this process; None if its pod is of no TrainJob, or the controller does not want to know."""
        values = [os.environ.get(name, "") for name in (URL, CA_CERT, TOKEN)]
        return _made(*values) if all(values) else None

    def report(self, status: dict, is_last: bool = False) -> None:
        """Has a report sent; one that is not sent yet is replaced.

        Args:
            status: from `status_of`.
            is_last: whether the fit is over. Such a report does not wait for those before.
        """
        with self._changed:
            self._pending, self._is_last = status, is_last
            if self._process != os.getpid():
                self._process = os.getpid()
                threading.Thread(target=self._run, name="tfdist-trainjob-status", daemon=True).start()
                atexit.register(self._finish)
            self._changed.notify_all()

    def _finish(self) -> None:
        """At the end of the program: what is not sent is sent, if that does not take long."""
        # In a forked process the lock may be held by a thread that does not exist there.
        if self._process != os.getpid():
            return
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._pending is None and not self._is_sending, _LAST_TIMEOUT)

    def _run(self) -> None:
        while True:
            status = self._next()
            problem = None
            try:
                _post(self._url, self._ca_cert, self._token, json.dumps(status).encode())
            except _NotSent as error:
                problem = cleaned(error, 800)
            except Exception as error:  # there is nobody else to hear of it
                problem = cleaned(f"{type(error).__name__}: {error}", 400)
            with self._changed:
                self._is_sending = False
                self._interval = _INTERVAL if problem is None else min(2 * self._interval, _LONGEST_INTERVAL)
                self._due[False] = time.monotonic() + self._interval
                if problem is not None and self._pending is None and not self._is_closing:
                    # A server may be away for a moment, and no other report may follow.
                    self._pending, self._due[True] = status, self._due[False]
                complains, self._has_complained = problem and not self._has_complained, self._has_complained or problem
                self._changed.notify_all()
            if complains:
                _log.warning(
                    "Kubeflow does not hear how far the training is, which goes on: %s. This is said once.", problem
                )

    def _next(self) -> dict:
        """Waits for a report, and until it is due."""
        with self._changed:
            while True:
                now = time.monotonic()
                wait = None if self._pending is None else self._due[self._is_last] - now
                if wait is not None and (wait <= 0 or self._is_closing):
                    status, self._pending, self._is_sending = self._pending, None, True
                    if self._is_last:
                        self._due[True] = now + _INTERVAL
                    return status
                self._changed.wait(wait)


@functools.cache
def _made(url: str, ca_cert: str, token: str) -> TrainJobStatus:
    return TrainJobStatus(url, ca_cert, token)


def _post(url: str, ca_cert: Path, token: Path, body: bytes) -> None:
    """Sends one report. No proxy is asked, and no redirection followed: either could lead the token elsewhere.

    Raises:
        _NotSent: it has not arrived.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _NotSent(f"received {URL} that is no address; expected one that begins with https://") from None
    if parts.scheme != "https" or not host:
        # Without what may be a name and a password.
        received = f"{parts.scheme}://{host or ''}"
        raise _NotSent(f"received {URL}={cleaned(received, 200)}...; expected an address that begins with https://")
    headers = {"Authorization": f"Bearer {_read_token(token)}", "Content-Type": "application/json"}
    try:
        # Made anew each time: the certificate authority may be renewed, too.
        context = ssl.create_default_context(cafile=str(ca_cert))
    except OSError as error:
        raise _NotSent(f"{CA_CERT}={ca_cert} cannot be used: {error}") from None
    connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT, context=context)
    limit = threading.Timer(_WHOLE_TIMEOUT, _hang_up, [connection])
    limit.daemon = True
    limit.start()
    try:
        connection.request("POST", f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}", body, headers)
        answer = connection.getresponse()
        said = answer.read(_MOST_BYTES)
    except (OSError, ValueError, http.client.HTTPException) as error:
        what = cleaned(f"{type(error).__name__}: {error}", 300)[:400]
        raise _NotSent(f"{parts.netloc.rpartition('@')[2]} cannot be reached: {what}") from None
    finally:
        limit.cancel()
        connection.close()
    if not 200 <= answer.status < 300:
        where = ", and redirections are not followed" if 300 <= answer.status < 400 else ""
        raise _NotSent(f"{host} answered {answer.status}{where}{_message(said)}")


def _hang_up(connection: http.client.HTTPSConnection) -> None:
    """Ends a connection over which a server says a little now and then."""
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)


def _read_token(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST_TOKEN + 1).decode("ascii", "replace").strip()
    except OSError as error:
        raise _NotSent(f"{TOKEN}={path} cannot be read: {error}") from None
    if len(text) > _LONGEST_TOKEN or not _BEARER.fullmatch(text):
        raise _NotSent(f"what is in {TOKEN}={path} is no token")
    return text


def _message(said: bytes) -> str:
    """What a server has answered, in a few words; it may be anything."""
    text = said.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(text)
        if isinstance(answer, dict) and isinstance(answer.get("message"), str):
            text = answer["message"]
    return f": {cleaned(text, 200)[:300]}" if text.strip() else ""
