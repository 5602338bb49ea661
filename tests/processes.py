"""Python processes that import TensorFlow: forked from one that has, which is as good, and seconds sooner.

`forked` is for tests that start processes by themselves; `run_local` forks by itself, and so does the fixture
`warm_launch` of tests/launcher.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.launcher.local import fork_server
from tfdist.launcher.local.fork_server import ForkedProcess
from tfdist.testing import preload

# Everything that a server has forked has the server's environment in /proc, and so this; TFDIST_... it would not have.
MARK = "LAUNCHER_TEST_MARK"
_mark = uuid.uuid4().hex


class ForkedPopen:
    """The part of `subprocess.Popen` that the tests use, for a process that a server has forked."""

    stdout = stderr = None

    def __init__(self, process: ForkedProcess) -> None:
        self.pid = process.pid
        self.poll = process.poll

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def preloaded() -> None:
    """Lets servers import TensorFlow now, in the background, unless they have."""
    os.environ[MARK] = _mark
    # Minutes on a busy machine: `forked` is to wait for that, and not to start a process afresh.
    fork_server._PATIENCE = 250.0
    try:
        preload()
    finally:
        del os.environ[MARK]


def forked(
    words: Sequence[str], output: Path, folder: Path, env: Mapping[str, str], rank: int = 0
) -> ForkedPopen | subprocess.Popen[bytes]:
    """Starts `python -u WORDS` as the leader of a session; afresh if `env` asks for what a server cannot give.

    Args:
        words: a script or -m and a module, and its arguments.
        output: file to which it appends all that it prints.
        folder: where it works.
        env: its whole environment.
        rank: processes of different parity do not share the seed of Python's string hashes.
    """
    preloaded()
    with open(output, "ab") as file:
        process = fork_server.fork(rank, words, env, file.fileno(), str(folder))
        if process is not None:
            return ForkedPopen(process)
        return subprocess.Popen(
            [sys.executable, "-u", *words],
            cwd=folder,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def marked(name: str, value: str) -> list[int]:
    """The living processes that have a variable in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{name}={value}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def living() -> list[int]:
    """All that this test process' servers have forked and that has not ended."""
    servers = {server.process.pid for server in fork_server._servers}
    return [pid for pid in marked(MARK, _mark) if pid not in servers]
