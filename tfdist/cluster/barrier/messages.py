"""What the tasks send each other at the barrier, as JSON, and how tasks are named in messages.

task                                       chief
                                      <--  {"roll_call": 1}
hello                                 -->
                                      <--  {"waiting": ["worker 2 (c:1)"]}  whenever somebody comes or leaves
                                      <--  {"go": {"0": {...}, "1": {...}}} when all are there: the info of each
                                      <--  {"error": [...]}                 if they do not fit together
                                      <--  {"timeout": [...]}               if somebody has not come in time
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Iterable

from tfdist.cluster.config import ClusterConfig, Task
from tfdist.cluster.errors import ClusterError

VERSION = 1
MAX_BYTES = 64 * 1024
HELLO_SECONDS = 5.0  # how long a new connection may send nothing while it introduces itself; then it is closed
WAIT_NOTE_SECONDS = 10.0
WAIT_AGAIN_SECONDS = 60.0
_SHOWN = 2000


class BarrierTimeoutError(ClusterError):
    """Not every task has come to the barrier in time."""


class JobUnderWayError(ClusterError):
    """The chief's TensorFlow server runs already: its job has begun without this task, or before it was replaced."""


def members(config: ClusterConfig, servers: bool) -> tuple[Task, ...]:
    """Who comes to the barrier, by rank: the compute tasks and, where asked for, the parameter servers after them.

    Example:
        >>> members(ClusterConfig({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, "chief"), servers=True)
        (('chief', 0), ('worker', 0), ('ps', 0))
    """
    return (*config.compute_tasks, *(("ps", index) for index in config.jobs.get("ps", ()) if servers))


def banner() -> dict:
    """What the chief sends first, by which a task knows that it has reached a waiting chief."""
    return {"roll_call": VERSION}


def hello(config: ClusterConfig, info: dict, rank: int) -> dict:
    """What a task tells about itself.

    Args:
        config: The cluster as this task sees it.
        info: What the others have to know; JSON values.
        rank: Its position among the `members`.

    Raises:
        TypeError: If `info` contains anything else than JSON values.
        ValueError: If `info` is too large.
    """
    size = len(json.dumps(info))
    if size > MAX_BYTES - 2 * _SHOWN:
        raise ValueError(f"info takes {size} bytes; keep it below {MAX_BYTES - 2 * _SHOWN}")
    jobs = json.dumps(config.to_tf_config()["cluster"])
    return {
        "rank": rank,
        "task": f"{config.task_type} {config.task_index}",
        "fingerprint": config.fingerprint(),
        "jobs": jobs if len(jobs) <= _SHOWN else f"{jobs[:_SHOWN]}...",
        "version": VERSION,
        "process": f"process {os.getpid()} on {socket.gethostname()}",
        "token": uuid.uuid4().hex,
        "info": info,
    }


_TEXTS = ("task", "fingerprint", "jobs", "process", "token")
_HELLO_TYPES = {"rank": int, "version": int, "info": dict, **dict.fromkeys(_TEXTS, str)}


def is_hello(message: dict) -> bool:
    """Whether a message has all fields of a hello; otherwise something else than a task has sent it.

    Example:
        >>> is_hello({"rank": 1})
        False
    """
    return all(isinstance(message.get(key), kind) for key, kind in _HELLO_TYPES.items())


def is_a_servers(first: bytes) -> bool:
    """Whether a connection begins as that to a TensorFlow server does: with an HTTP/2 frame of settings.

    Example:
        >>> is_a_servers(b"\\0\\0\\x12\\4"), is_a_servers(b"\\0\\0\\0\\x10")
        (True, False)
    """
    return first[:1] == b"\0" and first[3:4] == b"\4"  # after the length, three bytes, which is below 64 KiB


def named(config: ClusterConfig, tasks: Iterable[Task]) -> list[str]:
    """Tasks with their addresses, for messages.

    Example:
        >>> named(ClusterConfig({"worker": ["a:1", "b:1"]}), [("worker", 1)])
        ['worker 1 (b:1)']
    """
    return [f"{job} {index} ({config.jobs[job][index]})" for job, index in tasks]


def waiting(names: list[str], timeout: float) -> str:
    """The warning while tasks are missing.

    Example:
        >>> waiting(["worker 1 (b:1)"], 300.0)
        'tfdist: waiting for worker 1 (b:1) (start_timeout 300 s)'
    """
    return f"tfdist: waiting for {', '.join(names)} (start_timeout {timeout:g} s)"


def missing(names: list[str], timeout: float) -> str:
    """The error if tasks have not come."""
    return (
        f"not all tasks came within start_timeout={timeout:g} s; missing: {', '.join(names)}; "
        "start them, and look into their output for why they did not start"
    )


def disagreements(own: dict, other: dict) -> list[str]:
    """Why two tasks, by their hellos, cannot train together; the rank is checked elsewhere.

    Example:
        >>> a = {"task": "worker 0", "version": 1, "fingerprint": "x", "jobs": "", "info": {"same.keras": "3.1"}}
        >>> disagreements(a, {**a, "task": "worker 1", "info": {"same.keras": "3.2"}})
        ['keras is 3.1 on worker 0 but 3.2 on worker 1; make it the same on every task']
    """
    if own["version"] != other["version"]:
        return [
            f"{own['task']} and {other['task']} use different versions of tfdist "
            f"(version {own['version']} and {other['version']} of the barrier); install the same one on every machine"
        ]
    if own["fingerprint"] != other["fingerprint"]:
        return [
            f"{own['task']} and {other['task']} have different cluster descriptions; "
            f'give every task the same "cluster". {own["task"]} ({own["fingerprint"]}): {own["jobs"]}; '
            f"{other['task']} ({other['fingerprint']}): {other['jobs']}"
        ]
    keys = sorted(key for key in own["info"].keys() | other["info"].keys() if key.startswith("same."))
    return [
        f"{key.removeprefix('same.')} is {own['info'].get(key)} on {own['task']} but {other['info'].get(key)} on "
        f"{other['task']}; make it the same on every task"
        for key in keys
        if own["info"].get(key) != other["info"].get(key)
    ]
