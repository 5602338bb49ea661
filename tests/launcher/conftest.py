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
from tfdist.launch.zygote import ForkedProcess
from tfdist.testing.fork_server import ForkServer

SOURCE = Path(tfdist.__file__).parent.parent
MARK = "LAUNCHER_TEST_MARK"
_WARM_LAUNCHER = str(Path(__file__).with_name("warm_launcher.py"))


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
        return marked(self.mark)

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


class WarmLaunch(Launch):
    """A launcher that is forked, as its processes are, from one that has imported TensorFlow.

    What its processes print is read from files: it has no pipes and no terminal.
    """

    def __init__(self, server: ForkServer, mark: str, folder: Path, arguments: Sequence[str]) -> None:
        self.folder = folder
        self.mark = mark
        self._server = server
        self._streams = [folder / f"launcher-{len(list(folder.glob('launcher-*')))}-{name}" for name in ("out", "err")]
        env = {**os.environ, "PYTHONPATH": str(SOURCE), MARK: mark}
        process = server.start([_WARM_LAUNCHER, *map(str, self._streams), *arguments], env, 2, str(folder))
        assert process is not None, "the fork server has ended, or the test changes what importing TensorFlow reads"
        self.popen = ForkedPopen(process)

    def finish(self, deadline: float = 20.0) -> Result:
        """Waits for the end and returns the result."""
        try:
            code = self.popen.wait(deadline)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher did not end within {deadline} s")
        out, err = (path.read_text() if path.exists() else "" for path in self._streams)
        return Result(code, out, err)

    def marked(self) -> list[int]:
        """All living processes of this launch and of others that the server has forked; the server not included."""
        return [pid for pid in super().marked() if pid != self._server.pid]


class ForkedPopen:
    """The part of `subprocess.Popen` that the tests use, for a process that somebody else has forked."""

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
                raise subprocess.TimeoutExpired("the launcher", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """All living processes that carry a mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


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
def launch(launches: list[Launch], tmp_path: Path) -> Callable[..., Launch]:
    """`launch(script_text, *launcher_options, arguments=[...])` starts `tfdist run`; several may run at once."""

    def start(script: str, *options: str, arguments: Sequence[str] = (), **more) -> Launch:
        write_script(tmp_path, script)
        command = [sys.executable, "-m", "tfdist", "run", *options, "script.py", *arguments]
        launches.append(Launch(tmp_path, more.pop("command", command), **more))
        return launches[-1]

    return start


@pytest.fixture
def warm_launch(
    warm_launcher: tuple[ForkServer, str], launches: list[Launch], tmp_path: Path
) -> Callable[..., WarmLaunch]:
    """`launch`, for scripts that train: seconds sooner, since nobody has to import TensorFlow."""

    def start(script: str, *options: str, arguments: Sequence[str] = (), command: str = "run") -> WarmLaunch:
        write_script(tmp_path, script)
        server, mark = warm_launcher
        launches.append(WarmLaunch(server, mark, tmp_path, [command, *options, "script.py", *arguments]))
        return launches[-1]

    return start


@pytest.fixture(scope="session")
def warm_launcher() -> Iterator[tuple[ForkServer, str]]:
    """What `warm_launch` forks, and the mark that all of it carries."""
    mark = uuid.uuid4().hex
    server = ForkServer({**os.environ, "PYTHONPATH": str(SOURCE), MARK: mark})
    yield server, mark
    server.close()


@pytest.fixture
def launches(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Launch]]:
    """All launches of a test, which are ended with it."""
    started: list[Launch] = []
    yield started
    for one in started:
        one.clean_up()
    if request.session.testsfailed:
        for path in sorted(tmp_path.glob("tfdist-logs/*/*.log")):
            print(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}")


def write_script(folder: Path, text: str) -> None:
    """Writes `script.py`: what processes of a run want to know, then the text."""
    (folder / "script.py").write_text(textwrap.dedent(PREAMBLE) + textwrap.dedent(text))


PREAMBLE = """\
    import json, os, signal, subprocess, sys, time
    from pathlib import Path
    config = json.loads(os.environ["TF_CONFIG"])
    job, index = config["task"]["type"], config["task"]["index"]
    name = f"{job}-{index}"
"""
