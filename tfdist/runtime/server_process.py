"""How a process that serves ends: not before its chief, and then whatever its threads still do."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

import tensorflow as tf

from tfdist.cluster import sockets
from tfdist.cluster.barrier.messages import is_a_servers
from tfdist.cluster.connections import UnreachedError, keep_trying
from tfdist.compat.upstream import config_pb2

# For what the program has registered to be done at its exit: a server must not outlive its job because of it.
_EXIT_SECONDS = 1.5


def say(text: str) -> None:
    """Writes a line to standard error, past Python's own buffers; nothing happens when nobody reads it.

    Example:
        >>> say("worker 1 serves worker 0")
    """
    with contextlib.suppress(OSError):
        os.write(2, f"tfdist: {text}\n".encode())


def ignore_signals(reason: str) -> None:
    """Answers signals that ask for an end with a line on standard error only.

    Args:
        reason: why, for that line.

    Example:
        >>> ignore_signals("worker 1 serves until worker 0 has ended")  # doctest: +SKIP
    """
    if threading.current_thread() is not threading.main_thread():
        return  # Python lets no other thread change that

    def refuse(number: int, frame: FrameType | None) -> None:
        say(f"{signal.Signals(number).name} received: {reason}")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # Schedulers announce a preemption by the latter ones; what the program does with them is its own affair.
        if number in (signal.SIGTERM, signal.SIGINT) or signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, refuse)


def heed_signals() -> None:
    """Obeys the signals that ask for an end again.

    Example:
        >>> heed_signals()  # doctest: +SKIP
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end(code: int = 0) -> NoReturn:
    """Ends the process as if the program had come to its end; the threads of TensorFlow's server do not count.

    Args:
        code: its exit code.

    Example:
        >>> end()  # doctest: +SKIP
    """
    guard = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
    guard.daemon = True
    guard.start()
    atexit._run_exitfuncs()  # ends processes of multiprocessing, too
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


# How many threads a TensorFlow server needs in a cluster with parameter servers.

# A step holds a thread until it is done, and what it waits for needs others: with a single one it waits for ever.
LEAST = 4
_BESIDE_STEPS = LEAST - 1
_VARIABLE = "TF_NUM_INTEROP_THREADS"


def given_threads() -> int | None:
    """The number of inter-op threads that the program or its environment asks for; `None` if neither does.

    Example:
        >>> given_threads() != 0
        True
    """
    configured = tf.config.threading.get_inter_op_parallelism_threads()
    variable = os.environ.get(_VARIABLE, "")
    return configured or (int(variable) if variable.isdigit() else 0) or None


def server_config(given: int | None, steps: int) -> config_pb2.ConfigProto:
    """A server's configuration with as many inter-op threads as were given, or as it needs.

    Args:
        given: what `given_threads` says; one a core otherwise.
        steps: how many steps there are at a time that use the server.

    Example:
        >>> server_config(2, 1).inter_op_parallelism_threads, server_config(2, 10).inter_op_parallelism_threads
        (4, 13)
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = given or cores
    return config_pb2.ConfigProto(inter_op_parallelism_threads=max(threads, _BESIDE_STEPS + steps))


# Whether the process behind a TensorFlow server's address still exists, known at once and without any protocol.

_PAUSE = 0.5
_CONNECT_SECONDS = 5.0
# Refused: nobody listens there any more. Anything else may be the network's fault for a while.
_UNREACHABLE_SECONDS = 10.0
# A machine that has lost its power closes no connection: it is asked after 10 s, and given up 15 s later.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class ServerWatch:
    """Holds a connection to a TensorFlow server. The kernel closes it when the process ends, however it ends.

    gRPC hangs up on a connection that says nothing (after a minute); then another one is made, which only works as long
    as the process is there. A stopped process (SIGSTOP) still exists.

    Args:
        place: `host:port` of the server.

    Example:
        >>> watch = ServerWatch("127.0.0.1:3000")  # doctest: +SKIP
        >>> if watch.reach(within=60.0):  # doctest: +SKIP
        ...     watch.wait()  # returns once the process is gone
    """

    def __init__(self, place: str) -> None:
        self._place = sockets.split_address(place)
        self._connection: socket.socket | None = None

    def reach(self, within: float) -> bool:
        """Waits until the server listens; returns whether it does.

        Args:
            within: for how many seconds to try.
        """
        try:
            self._connection = keep_trying({"": lambda _: self._connect()}, time.monotonic() + within, {})
        except UnreachedError:
            return False
        return True

    def wait(self) -> None:
        """Returns when the process that was reached is gone."""
        while self._connection is not None:
            was_a_server = self._listen(self._connection)
            sockets.close_without_trace(self._connection)
            self._connection = self._reconnect() if was_a_server else None

    def _listen(self, connection: socket.socket) -> bool:
        """Reads until the connection ends; returns whether a TensorFlow server was at its other end."""
        first = True
        with contextlib.suppress(OSError):
            while data := connection.recv(4096):
                if first and not is_a_servers(data):
                    return False  # the next job's chief, at the same address
                first = False
        return True

    def _reconnect(self) -> socket.socket | None:
        deadline = time.monotonic() + _UNREACHABLE_SECONDS
        while True:
            try:
                return self._connect()
            except ConnectionRefusedError:
                return None
            except OSError:
                if time.monotonic() >= deadline:
                    return None
            time.sleep(_PAUSE * random.SystemRandom().uniform(0.5, 1.0))

    def _connect(self) -> socket.socket:
        connection = sockets.connect(self._place, _CONNECT_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.settimeout(None)
        return connection
