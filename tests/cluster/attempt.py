"""Many checks in few processes: what fails is kept until the test that asks for it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any


class Failure(str):
    """A traceback in place of a result."""


def attempt(name: str, function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """Returns what a function returns, or a `Failure`; on a process of `run_local`."""
    print("check:", name, flush=True)
    try:
        return function(*arguments, **more)
    except Exception:
        return Failure(traceback.format_exc())


def error_of(function: Callable[..., Any], *arguments: Any, **more: Any) -> tuple[str, str]:
    """Returns type and message of the exception that a function raises."""
    try:
        result = function(*arguments, **more)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", repr(result)


def logged(function: Callable[..., Any], *arguments: Any, **more: Any) -> list[str]:
    """Returns the warnings that tfdist logs in a call, but those of who is waited for: a busy machine makes them."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    handler.addFilter(lambda record: " is waiting for " not in record.getMessage())
    log = logging.getLogger("tfdist")
    log.addHandler(handler)
    try:
        function(*arguments, **more)
    finally:
        log.removeHandler(handler)
    return said


def found_on(results: list[dict[str, Any]], rank: int, name: str) -> Any:
    """What one check found on one rank; fails with its traceback if it found nothing."""
    found = results[rank][name]
    assert not isinstance(found, Failure), f"rank {rank}: {found}"
    return found
