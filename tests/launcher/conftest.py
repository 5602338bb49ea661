"""Runs the launcher as users do, and makes sure that nothing of it outlives a test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import tfdist

SOURCE = Path(tfdist.__file__).parent.parent
MARK = "LAUNCHER_TEST_MARK"


@dataclass(frozen=True)
class Result:
    """How a launcher ended."""

    code: int
    out: str
    err: str


class Launch:
    """A running launcher; every process below it carries a mark in its environment, by which it can be found."""

    def __init__(self, folder: Path, command: Sequence[str], **more) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        env = {**os.environ, "PYTHONPATH": str(SOURCE), MARK: self.mark, **more.pop("env", {})}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        self.popen = subprocess.Popen(
            command, cwd=folder, env=env, start_new_session=True, preexec_fn=_heed_hangup, **streams
        )

    def finish(self, deadline: float = 20.0) -> Result:
        """Waits for the end and returns the result."""
        try:
            out, err = self.popen.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher did not end within {deadline} s")
        return Result(self.popen.returncode, (out or b"").decode(), (err or b"").decode())

    def wait_for_file(self, *names: str, deadline: float = 20.0) -> None:
        """Waits until the processes have made files of these names."""
        wait_until(lambda: all((self.folder / name).exists() for name in names), deadline, f"files {names}")

    def marked(self) -> list[int]:
        """All living processes of this launch, whatever group they are in."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def assert_nothing_is_left(self, within: float = 2.0) -> None:
        wait_until(lambda: not self.marked(), within, "the end of all processes")

    def log(self, name: str) -> str:
        """The text of one log."""
        (path,) = self.folder.glob(f"tfdist-logs/*/{name}.log")
        return path.read_bytes().decode()

    def clean_up(self) -> None:
        """Ends what is still there."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(3)
        for pid in self.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait(5)
        self.assert_nothing_is_left()
        for stream in (self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()


def _heed_hangup() -> None:
    """The tests may run below nohup; the launcher would then ignore SIGHUP, as it should."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def wait_until(condition: Callable[[], bool], deadline: float, what: str) -> None:
    end = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {deadline} s in vain for {what}")
        time.sleep(0.02)


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Launch]]:
    """`launch(script_text, *launcher_options, arguments=[...])` starts `tfdist run`; several may run at once."""
    launches: list[Launch] = []

    def start(script: str, *options: str, arguments: Sequence[str] = (), **more) -> Launch:
        (tmp_path / "script.py").write_text(textwrap.dedent(PREAMBLE) + textwrap.dedent(script))
        command = [sys.executable, "-m", "tfdist", "run", *options, "script.py", *arguments]
        launches.append(Launch(tmp_path, more.pop("command", command), **more))
        return launches[-1]

    yield start
    for started in launches:
        started.clean_up()
    if request.session.testsfailed:
        for path in sorted(tmp_path.glob("tfdist-logs/*/*.log")):
            print(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}")


PREAMBLE = """\
    import json, os, signal, subprocess, sys, time
    from pathlib import Path
    config = json.loads(os.environ["TF_CONFIG"])
    job, index = config["task"]["type"], config["task"]["index"]
    name = f"{job}-{index}"
"""
