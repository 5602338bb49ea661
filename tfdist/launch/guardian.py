"""A small process that kills what is left of a run when the launcher itself was killed and could not do so.

The launcher is the only one that can write to the guardian's pipe. When the pipe ends although process groups are
still registered, the launcher is gone, and the guardian kills them. This file is also what the guardian runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable

_END_DEADLINE = 2.0


class Guardian:
    """The launcher's side: starts the guardian and tells it which process groups exist.

    Example:
        >>> with Guardian() as guardian:
        ...     guardian.add(4711)
        ...     guardian.remove(4711)
    """

    def __enter__(self) -> Guardian:
        read_end, self._write_end = os.pipe()
        try:
            # Isolated and without site: it starts in a few milliseconds and nothing of the user's gets into it. Away
            # from our terminal no Ctrl-C reaches it; without our output streams it keeps no pipe of our caller open.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(__file__)],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            os.close(self._write_end)
            raise
        finally:
            os.close(read_end)
        return self

    def add(self, group: int) -> None:
        """Registers a process group that must not outlive the launcher."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Says that a group has ended: its number may from now on belong to somebody else."""
        self._tell(f"-{group}\n")

    def _tell(self, message: str) -> None:
        # Without a guardian the run still works, and each process still dies with the launcher (see process.py).
        with contextlib.suppress(BrokenPipeError):
            os.write(self._write_end, message.encode())

    def __exit__(self, *error: object) -> None:
        os.close(self._write_end)
        try:
            self._process.wait(_END_DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def remaining_groups(messages: Iterable[str]) -> set[int]:
    """The groups that are registered after all messages.

    Example:
        >>> remaining_groups(["+7", "+8", "-7"])
        {8}
    """
    groups: set[int] = set()
    for message in messages:
        group = int(message[1:])
        if message[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    return groups


def main() -> None:
    """The guardian: reads until the launcher closes the pipe or dies, then kills the groups that are left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in remaining_groups(sys.stdin):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
