"""A process that stays and answers requests: the other end of `asking`. It needs nothing but Python."""

from __future__ import annotations

import contextlib
import traceback
from multiprocessing.connection import Client
from typing import Any


def answer_all(address: str, methods: Any) -> None:
    """Answers requests by calling methods of an object, until the benchmark closes the connection."""
    with Client(address, "AF_UNIX") as connection, contextlib.suppress(EOFError):
        while True:
            name, arguments = connection.recv()
            try:
                connection.send((getattr(methods, name)(**arguments), None))
            except Exception:
                connection.send((None, traceback.format_exc()))
