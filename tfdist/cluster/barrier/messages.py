"""What the tasks send each other at the barrier, as JSON, and how tasks are named in messages.

task                                       chief
                                      <--  {"roll_call": 2, "token": false}
(challenges, see connections/handshake.py, if they have a secret; then all that follows has codes)
hello                                 -->
                                      <--  {"waiting": ["worker 2 (c:1)"], "more": 3, "turned away": "..."}
                                           now and then: the first of those that are missing, and who was sent away
                                      <--  {"go": "..."}       when all are there: the info of each, compressed
                                      <--  {"error": [...]}    if they do not fit together
                                      <--  {"timeout": [...]}  if somebody has not come in time
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import uuid
from collections.abc import Iterable, Mapping

from tfdist.cluster.config import ClusterConfig, Task
from tfdist.cluster.connections.compressed import unpack
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import cleaned, listed
from tfdist.cluster.variables import TOKEN

VERSION = 2
MAX_BYTES = 64 * 1024
# How long both ends of a new connection may take to introduce themselves; then it is closed. Thousands that come at
# once need their time: with 5 s, 2000 on two cores hung up on each other for ever.
HELLO_SECONDS = 30.0
WAIT_NOTE_SECONDS = 10.0
WAIT_AGAIN_SECONDS = 60.0
NAMES = 20  # of the tasks that are missing
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


def banner(has_secret: bool) -> dict:
    """What the chief sends first, by which a task knows that it has reached a waiting chief."""
    return {"roll_call": VERSION, "token": has_secret}


def secret_of(env: Mapping[str, str], met: bytes | None = None) -> bytes | None:
    """The secret by which tasks know each other, if they have one.

    Args:
        env: The environment variables; their token comes first.
        met: The secret of the rendezvous.

    Example:
        >>> secret_of({}) is None, secret_of({"TFDIST_TOKEN": "a"}) == secret_of({"TFDIST_TOKEN": "b"})
        (True, False)
    """
    secret = env.get(TOKEN, "").encode() or met
    return hmac.digest(secret, b"tfdist barrier", "sha256") if secret else None


def infos_of(text: object, size: int) -> dict[int, dict]:
    """The infos of so many tasks, by rank.

    Raises:
        OSError: If it is something else; without errno.

    Example:
        >>> from tfdist.cluster.connections.compressed import pack
        >>> infos_of(pack({0: {"a": 1}, 1: {}}), 2)
        {0: {'a': 1}, 1: {}}
    """
    found = unpack(text, MAX_BYTES * size)
    if found.keys() != set(map(str, range(size))) or not all(isinstance(info, dict) for info in found.values()):
        raise OSError("it sends something else than what all tasks have told")
    return {int(rank): info for rank, info in found.items()}


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
_LONGEST = {"task": 100, "fingerprint": 100, "jobs": _SHOWN + 3, "process": 300, "token": 100}


def read_hello(message: dict) -> dict | None:
    """A hello with texts that are fit to be printed; `None` if something else than a task has sent it.

    Of another version only what tells it has to be there.

    Example:
        >>> read_hello({"rank": 1})
        >>> read_hello({"rank": 1, "task": "worker\\n1", "version": 1})["task"]
        'worker\\\\n1'
    """
    other = type(message.get("version")) is int and message["version"] != VERSION
    needed = dict.fromkeys(("rank", "version"), int) | {"task": str} if other else _HELLO_TYPES
    if not all(
        isinstance(message.get(key), kind) and not isinstance(message[key], bool) for key, kind in needed.items()
    ):
        return None
    if any(len(message.get(key, "")) > most for key, most in _LONGEST.items() if not other):
        return None
    return {**message, **{key: cleaned(message.get(key, ""), most) for key, most in _LONGEST.items()}}


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


def waiting(names: list[str], timeout: float, more: int = 0) -> str:
    """The warning while tasks are missing.

    Example:
        >>> waiting(["worker 1 (b:1)"], 300.0)
        'tfdist: waiting for worker 1 (b:1) (start_timeout 300 s)'
    """
    return f"tfdist: waiting for {listed(names, more, NAMES)} (start_timeout {timeout:g} s)"


def missing(names: list[str], timeout: float, more: int = 0) -> str:
    """The error if tasks have not come."""
    return (
        f"not all tasks came within start_timeout={timeout:g} s; missing: {listed(names, more, NAMES)}; "
        "start them, and look into their output for why they did not start"
    )


def other_version(own: str, other: str, expected: int, received: int) -> str:
    """The error if two tasks do not understand each other.

    Example:
        >>> other_version("worker 0", "worker 1", 2, 3).partition(";")[0]
        'worker 0 and worker 1 use different versions of tfdist (version 2 and 3 of the barrier)'
    """
    return (
        f"{own} and {other} use different versions of tfdist (version {expected} and {received} of the barrier); "
        "install the same one on every machine"
    )


def disagreements(own: dict, other: dict) -> list[str]:
    """Why two tasks, by their hellos, cannot train together; the rank is checked elsewhere.

    Example:
        >>> a = {"task": "worker 0", "version": 1, "fingerprint": "x", "jobs": "", "info": {"same.keras": "3.1"}}
        >>> disagreements(a, {**a, "task": "worker 1", "info": {"same.keras": "3.2"}})
        ['keras is 3.1 on worker 0 but 3.2 on worker 1; make it the same on every task']
    """
    if own["version"] != other["version"]:
        return [other_version(own["task"], other["task"], own["version"], other["version"])]
    if own["fingerprint"] != other["fingerprint"]:
        return [
            f"{own['task']} and {other['task']} have different cluster descriptions; "
            f'give every task the same "cluster". {own["task"]} ({own["fingerprint"]}): {own["jobs"]}; '
            f"{other['task']} ({other['fingerprint']}): {other['jobs']}"
        ]
    keys = sorted(key for key in own["info"].keys() | other["info"].keys() if key.startswith("same."))
    return [
        cleaned(
            f"{key.removeprefix('same.')} is {own['info'].get(key)} on {own['task']} but {other['info'].get(key)} on "
            f"{other['task']}; make it the same on every task"
        )
        for key in keys
        if own["info"].get(key) != other["info"].get(key)
    ]
