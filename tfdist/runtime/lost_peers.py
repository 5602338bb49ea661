"""Which process of a job is gone, in one line after the traceback in which TensorFlow tells that some peer is."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import tensorflow as tf

from tfdist.cluster import sockets
from tfdist.cluster.barrier.messages import named
from tfdist.cluster.config import ClusterConfig
from tfdist.runtime.server_process import say

GONE, SILENT, THERE = "gone", "silent", "there"

_ERRORS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)
_ABOUT_PEERS = ("ollective", "remote target", "recvmsg", "Socket closed", "failed to connect", "oordination")
_CONNECT_SECONDS = 2.0
# The system closes the connections of a process that dies one after the other.
_DYING_SECONDS, _PAUSE = 2.0, 0.2
# The other survivors ask, too: who ends before they have is gone for them.
_HOLD_SECONDS = 2.0
_SHOWN = 8
# Set by `tfdist run`, which names the process that failed itself.
_LAUNCHED = "TFDIST_RUN_ID"
_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


def name_lost_peers(cluster: ClusterConfig, env: Mapping[str, str] | None = None) -> None:
    """From now on a program that ends by an exception about peers says which of them are gone, below the traceback.

    Nothing is done before that, and nothing at all under `tfdist run`.

    Args:
        cluster: the cluster of this process.
        env: the environment variables; those of this process by default.

    Example:
        >>> name_lost_peers(tfdist.discover())  # doctest: +SKIP
    """
    if _LAUNCHED not in (os.environ if env is None else env):
        sys.excepthook = functools.partial(_show, cluster, sys.excepthook)


def is_about_peers(error: BaseException | None) -> bool:
    """Whether an exception, or one that has led to it, may come from the loss of another process.

    Example:
        >>> is_about_peers(tf.errors.AbortedError(None, None, "Collective ops is aborted by: ..."))
        True
        >>> is_about_peers(ValueError("Collective"))
        False
    """
    for _ in range(_SHOWN):
        if error is None:
            return False
        if isinstance(error, _ERRORS) and any(word in str(error) for word in _ABOUT_PEERS):
            return True
        error = error.__cause__ or error.__context__
    return False


def state_of(place: str, within: float) -> str:
    """Whether a process listens at an address.

    Args:
        place: `host:port`.
        within: for how many seconds to wait for an answer.

    Returns:
        `GONE` if the host says that nobody does, `SILENT` if it says nothing, `THERE` if somebody does, be it one that
        hangs.

    Example:
        >>> state_of("127.0.0.1:1", within=1.0)
        'gone'
    """
    try:
        connection = sockets.connect(sockets.split_address(place), within)
    except (ConnectionRefusedError, ConnectionResetError):
        return GONE
    except OSError:
        return SILENT
    sockets.close_without_trace(connection)
    return THERE


def lost(states: Mapping[str, str]) -> str:
    """What is said about those that are not there; empty if all are.

    Args:
        states: `GONE`, `SILENT` or `THERE` by name.

    Example:
        >>> lost({"worker 1 (b:1)": GONE, "worker 2 (c:1)": THERE})[:32]
        'worker 1 (b:1) is gone; what it '
    """
    gone = [name for name, state in states.items() if state == GONE]
    silent = [name for name, state in states.items() if state == SILENT]
    parts = [f"{_listed(gone)} {'is' if len(gone) == 1 else 'are'} gone"] if gone else []
    if silent:
        do = "does" if len(silent) == 1 else "do"
        parts.append(f"{_listed(silent)} {do} not answer: a host that is down, hangs or is cut off")
    if not parts:
        return ""
    # Some processes notice a loss only when another one, which has noticed it, ends.
    several = len(gone) + len(silent) > 1
    theirs = "the first of them to end is the cause; what they have printed" if several else "what it has printed"
    return (
        f"{', and '.join(parts)}; {theirs}, and the log of the system that has started the job, may tell why "
        "(killed for memory, a time limit, a preemption). Start the job again, all of its tasks: with "
        "tfdist.callbacks.BackupAndRestore it goes on from its last backup"
    )


def _show(
    cluster: ClusterConfig, before: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """In place of `sys.excepthook`."""
    text = _ask(cluster) if is_about_peers(error) else ""
    before(kind, error, trace)
    if text:
        sys.stderr.flush()
        say(text)
        time.sleep(_HOLD_SECONDS)


def _ask(cluster: ClusterConfig) -> str:
    own = (cluster.task_type, cluster.task_index)
    others = [task for task in cluster.compute_tasks if task != own]
    places = [cluster.jobs[job][index] for job, index in others]
    deadline = time.monotonic() + _DYING_SECONDS
    with ThreadPoolExecutor(max_workers=64) as pool:
        while True:
            found = pool.map(functools.partial(state_of, within=_CONNECT_SECONDS), places)
            text = lost(dict(zip(named(cluster, others), found, strict=True)))
            if text or time.monotonic() > deadline:
                return text
            time.sleep(_PAUSE)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
