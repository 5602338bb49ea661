"""Processes that stay and answer requests (see `answering`), so that several can take turns."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from benchmarks.data_parallel.processes import Command, Running, TrialError, running

_TICK = 0.2


@dataclass
class Answering:
    """Processes that have started, and a connection to the one that answers.

    Attributes:
        deadline: seconds that an answer may take.
    """

    processes: Running
    connection: Connection
    deadline: float

    def ask(self, name: str, **arguments: Any) -> Any:
        """The result of a method of the object that `answer_all` was given there.

        Raises:
            TrialError: if it fails, a process ends, or there is no answer in time.
        """
        self.begin(name, **arguments)
        return self.result()

    def begin(self, name: str, **arguments: Any) -> None:
        """Asks; `result` is the answer."""
        # One that has ended is told from what it does not answer.
        with contextlib.suppress(OSError):
            self.connection.send((name, arguments))

    def result(self) -> Any:
        """The answer to what was asked last; raises what `ask` does."""
        end = time.monotonic() + self.deadline
        try:
            while not self.connection.poll(_TICK):
                self.processes.check()
                if time.monotonic() > end:
                    raise self.processes.error(f"no answer after {self.deadline:g} s; give more time by --deadline.")
            result, error = self.connection.recv()
        except (EOFError, OSError):
            raise self.processes.error("the process that trains has ended; expected an answer. See its log:") from None
        if error:
            raise TrialError(error)
        return result


@contextlib.contextmanager
def answering(commands: Callable[[str], Sequence[Command]], deadline: float) -> Iterator[Answering]:
    """Starts processes, and ends them at the end of the `with` block.

    Args:
        commands: returns the processes, given the address that one of them gives to `answer_all`.
        deadline: seconds until that one is there, and until each of its answers.

    Raises:
        TrialError: if they do not start.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-bench-")))
        address = str(folder / "requests")
        listener = stack.enter_context(Listener(address, "AF_UNIX"))
        processes = stack.enter_context(running(commands(address), folder))
        yield Answering(processes, stack.enter_context(_accept(listener, processes, deadline)), deadline)


def _accept(listener: Listener, processes: Running, deadline: float) -> Connection:
    end = time.monotonic() + deadline
    # The listener has no time limit of its own; its socket has.
    listener._listener._socket.settimeout(_TICK)
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            return listener.accept()
        processes.check()
    raise processes.error(f"not ready after {deadline:g} s; give more time by --deadline.")
