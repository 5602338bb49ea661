"""Tells Kubeflow Trainer how far a training is: it shows that as `status.trainerStatus` of the TrainJob.

The controller sets three variables in each pod, if its feature gate TrainJobStatus is on: where to POST, and the files
with its certificate authority and with a token of the pod, which is renewed before it expires.

References:
    https://github.com/kubeflow/trainer/tree/master/proposals/2779-trainjob-progress
    pkg/statusserver and pkg/runtime/framework/plugins/trainjobstatus of kubeflow/trainer, version 2.3
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import math
import os
import re
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from tfdist.cluster.foreign_text import cleaned

URL, CA_CERT, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{part}" for part in ("URL", "CA_CERT", "TOKEN"))

_log = logging.getLogger("tfdist")

# Seconds between two reports, of which the controller asks for at most one in five; for each answer of the network; and
# for which the end of the program waits for the last report.
_INTERVAL, _TIMEOUT, _LAST_TIMEOUT = 10.0, 5.0, 5.0
# What the custom resource allows.
_MOST_METRICS, _LONGEST_TEXT, _LARGEST = 256, 64, 2**31 - 1
# RFC 6750: what may be in a header. An error message of http.client would show all else.
_BEARER = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


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
        status["progressPercentage"] = 100 if fraction >= 1 else int(fraction * 100)
    if seconds_left is not None and math.isfinite(seconds_left):
        status["estimatedRemainingSeconds"] = int(min(max(seconds_left, 0), _LARGEST))
    return {"trainerStatus": status}


class TrainJobStatus:
    """Sends the newest report every ten seconds, in a thread of its own: no server holds the training up, or ends it.

    A report that fails is dropped, and the first failure is logged.

    Args:
        url: where to POST.
        ca_cert: file with the certificate authority by which the server is known. Others do not count.
        token: file with the token of the pod. It is renewed there, and read again for each report.

    Example:
        >>> TrainJobStatus.from_environment() is None  # outside of a TrainJob
        True
    """

    def __init__(self, url: str, ca_cert: str, token: str) -> None:
        self._target = url, ca_cert, Path(token)
        self._changed = threading.Condition()
        self._pending: dict | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    @classmethod
    def from_environment(cls) -> TrainJobStatus | None:
        """The sender of this process; None if its pod is of no TrainJob, or the controller does not want to know."""
        values = [os.environ.get(name, "") for name in (URL, CA_CERT, TOKEN)]
        return _made(*values) if all(values) else None

    def report(self, status: dict) -> None:
        """Has a report from `status_of` sent; one that is not sent yet is replaced."""
        with self._changed:
            self._pending = status
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tfdist-trainjob-status", daemon=True)
                self._thread.start()
                atexit.register(self._finish)
            self._changed.notify_all()

    def _finish(self) -> None:
        """At the end of the program: what is not sent is sent, if that does not take long."""
        if self._thread.is_alive():  # a forked process has none
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
            self._thread.join(_LAST_TIMEOUT)

    def _run(self) -> None:
        has_complained = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None or self._is_closing)
                status, self._pending = self._pending, None
            if status is None:
                return
            try:
                _post(*self._target, json.dumps(status).encode())
            except Exception as error:  # nothing that goes wrong here may end the thread
                if not has_complained:
                    has_complained = True
                    what = cleaned(f"{type(error).__name__}: {error}", 400)
                    _log.warning("Kubeflow does not hear how far the training is, which goes on: %s", what)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, _INTERVAL)


class _NoRedirections(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follows none: it could lead the token elsewhere."""


_made = functools.cache(TrainJobStatus)


def _post(url: str, ca_cert: str, token: Path, body: bytes) -> None:
    """Sends one report. Proxies and redirections could lead the token elsewhere: not used."""
    if not url.startswith("https://"):
        raise ValueError(f"received {URL}={url}; expected an address that begins with https://")
    # For each report: token and certificate authority may be renewed.
    if not _BEARER.fullmatch(text := token.read_text().strip()):
        raise ValueError(f"what is in {TOKEN}={token} is no token")
    context = ssl.create_default_context(cafile=ca_cert)
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context), _NoRedirections)
    headers = {"Authorization": f"Bearer {text}", "Content-Type": "application/json"}
    opener.open(Request(url, body, headers), timeout=_TIMEOUT).close()
