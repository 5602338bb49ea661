"""A small process that kills what is left of a run when the launcher itself was killed and could not do so.

The launcher is the only one that can write to the guardian's pipe. When the pipe ends although process groups are
still registered, the launcher is gone, and the guardian kills them, and then all processes with the run's id in their
environment: helpers that have left the groups (setsid). Of those, two kinds remain: with another environment or another
user; and, after a quick restart, copies of a worker (fork) that run no program of their own.

This file is also what the guardian runs, without tfdist's other modules.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

_END_DEADLINE = 2.0
_RUN = "TFDIST_RUN_ID"
# A helper may just be starting another one.
_SWEEPS, _PAUSE = 40, 0.05


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
                # It does not belong to the run, and has not to be swept away with it.
                env={name: value for name, value in os.environ.items() if name != _RUN},
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            os.close(self._write_end)
            raise
        finally:
            os.close(read_end)
        return self

    def add(self, group: int, run: str = "") -> None:
        """Registers a process group that must not outlive the launcher, and the id of the run that it belongs to."""
        self._tell(f"+{group} {run}\n")

    def remove(self, group: int) -> None:
        """Says that a group has ended: its number may from now on belong to somebody else."""
        self._tell(f"-{group}\n")

    def _tell(self, message: str) -> None:
        # Without a guardian the run still works, and each process still dies with the launcher (see process.py).
        with contextlib.suppress(BrokenPipeError):
            os.write(self._write_end, message.encode())

    def __exit__(self, *error: object) -> None:
        from tfdist.launcher.operating_system import end_within

        os.close(self._write_end)
        end_within(_END_DEADLINE, self._process)


def remaining_groups(messages: Iterable[str]) -> dict[int, str]:
    """The groups that are registered after all messages, with the run of each; "" where it has no id.

    Example:
        >>> remaining_groups(["+7 run", "+8 run", "-7"])
        {8: 'run'}
    """
    groups: dict[int, str] = {}
    for message in messages:
        group, _, run = message[1:].strip().partition(" ")
        if message[0] == "+":
            groups[int(group)] = run
        else:
            groups.pop(int(group), None)
    return groups


def kill_run(run: str) -> None:
    """Kills all processes that have this id of a run in their environment, until there are none."""
    for _ in range(_SWEEPS):
        found = False
        for name in filter(str.isdigit, os.listdir("/proc")):
            # Not ours, or ended meanwhile.
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/environ", "rb") as file:
                    if f"{_RUN}={run}".encode() not in file.read().split(b"\0"):
                        continue
                os.kill(int(name), signal.SIGKILL)
                found = True
        if not found:
            return
        time.sleep(_PAUSE)


def main() -> None:
    """The guardian: reads until the launcher closes the pipe or dies, then kills the groups that are left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = remaining_groups(sys.stdin)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for run in filter(None, set(groups.values())):
        kill_run(run)


if __name__ == "__main__":
    main()
