"""What events say to people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def in_one_line(event: Mapping[str, Any]) -> str | None:
    """An event as a line; None for one that changes nothing that anybody would look for.

    Example:
        >>> in_one_line({"name": "launcher", "event": "restart", "restart": 1, "workers": 2, "delay": 0.0})
        'restart 1 with 2 workers'
    """
    name, get = event.get("name"), event.get
    kind = event.get("event")
    if name == "launcher":
        if kind == "failure":
            return f"{get('cause') or get('task')}{_after_step(event)}"
        if kind == "restart":
            workers = get("workers")
            return f"restart {get('restart')} with {workers} worker{'' if workers == 1 else 's'}"
        if kind == "training-again":
            return f"training again after {_seconds(get('seconds'))}, {get('steps_redone')} steps redone"
        if kind == "replacement":
            return f"{get('cause')}; started again alone"
        if kind == "loss":
            return f"{get('cause')}; not started again"
        return end_of(event)
    if kind == "resumed":
        return f"goes on after step {get('step')}, with backup {get('checkpoint')}"
    if kind == "not saved":
        return f"a backup could not be written: {get('error')}"
    return f"stopped after step {get('step')}, to be started again" if kind == "preempted" else None


def end_of(event: Mapping[str, Any]) -> str | None:
    """How the launcher says that a run has ended; None for all else.

    Example:
        >>> end_of({"event": "gave-up", "exit_code": 3, "reason": ""}), end_of({"event": "saved"})
        ('failed: exit code 3', None)
    """
    kind, code, reason = event.get("event"), event.get("exit_code"), event.get("reason")
    if kind == "complete":
        return "complete"
    if kind == "gave-up":
        return f"failed: exit code {code}{f', {reason}' if reason else ''}"
    if kind == "interrupted":
        return f"interrupted by {event['signal']}" if event.get("signal") else "interrupted"
    return "preempted: saved, to be started again" if kind == "preempted" else None


def ending_of_process(event: Mapping[str, Any]) -> str:
    """How a process has ended.

    Example:
        >>> ending_of_process({"kind": "exit", "exit_code": 3}), ending_of_process({"kind": "hang", "exit_code": 124})
        ('exit code 3', 'it stood still')
    """
    return "it stood still" if event.get("kind") == "hang" else f"exit code {event.get('exit_code')}"


def _after_step(event: Mapping[str, Any]) -> str:
    step = event.get("step")
    return f" at step {step}" if step and f"step {step}" not in str(event.get("cause")) else ""


def _seconds(value: Any) -> str:
    return f"{value:.1f} s" if isinstance(value, (int, float)) else "some time"
