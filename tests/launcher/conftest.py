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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import tfdist
from tests.processes import MARK, ForkedPopen, forked, living, marked

SOURCE = Path(tfdist.__file__).parent.parent
# For what happens in a second or two: nobody waits longer than the real end.
DEADLINE = 60.0
_WARM_LAUNCHER = str(SOURCE / "tests" / "warm_launcher.py")


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
        env = {**os.environ, MARK: self.mark, **more.pop("env", {})}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        self.popen = subprocess.Popen(
            command, cwd=folder, env=env, start_new_session=True, preexec_fn=_heed_hangup, **streams
        )

    def finish(self, deadline: float = DEADLINE) -> Result:
        """Waits for the end and returns the result."""
        try:
            out, err = self.popen.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher did not end within {deadline} s")
        return Result(self.popen.returncode, (out or b"").decode(), (err or b"").decode())

    def wait_for_file(self, *names: str, deadline: float = DEADLINE) -> None:
        """Waits until the processes have made files of these names."""
        wait_until(lambda: all((self.folder / name).exists() for name in names), deadline, f"files {names}")

    def marked(self) -> list[int]:
        """All living processes of this launch, whatever group they are in."""
        return marked(MARK, self.mark)

    def assert_nothing_is_left(self, within: float = DEADLINE) -> None:
        """Waits for the end of all processes: those of the tests would live much longer than that by themselves."""
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
                self.popen.wait(3)  # not for all: its processes may have a grace period
        for pid in self.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait(DEADLINE)
        self.assert_nothing_is_left()
        for stream in (self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()


class WarmLaunch(Launch):
    """A launcher that is forked, as its processes are, from one that has imported TensorFlow.

    What its processes print is read from files: it has no pipes and no terminal.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self.folder = folder
        self._streams = [folder / f"launcher-{len(list(folder.glob('launcher-*')))}-{name}" for name in ("out", "err")]
        words = [_WARM_LAUNCHER, *map(str, self._streams), *arguments]
        self.popen = forked(words, folder / "launcher-log", folder, {**os.environ, **env})
        assert isinstance(self.popen, ForkedPopen), "this test needs `launch`: a forked process would be another one"

    def finish(self, deadline: float = DEADLINE) -> Result:
        """Waits for the end and returns the result."""
        try:
            code = self.popen.wait(deadline)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher did not end within {deadline} s")
        out, err = (path.read_text() if path.exists() else "" for path in self._streams)
        return Result(code, out, err)

    def marked(self) -> list[int]:
        """All living processes that have been forked in this process' tests, launchers and workers alike."""
        return living()


def _heed_hangup() -> None:
    """The tests may run below nohup; the launcher would then ignore SIGHUP, as it should."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def wait_until(condition: Callable[[], bool], deadline: float, what: str) -> None:
    end = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {deadline} s in vain for {what}")
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests that name no number of workers expect two, as on a machine without GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


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
def warm_launch(launches: list[Launch], tmp_path: Path) -> Callable[..., WarmLaunch]:
    """`launch` for scripts that train: seconds sooner, since nobody has to import TensorFlow.

    `arguments` are those of the script, `command` is all that follows `tfdist`.
    """

    def start(
        script: str,
        *options: str,
        arguments: Sequence[str] = (),
        command: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> WarmLaunch:
        write_script(tmp_path, script)
        words = command or ["run", *options, "script.py", *arguments]
        launches.append(WarmLaunch(tmp_path, words, env or {}))
        return launches[-1]

    return start


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
