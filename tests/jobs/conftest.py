"""A folder of jobs of its own for each test, and the `tfdist` command as users run it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfdist
from tests.processes import marked
from tfdist.jobs.record import VARIABLE, Record, Records

SOURCE = Path(tfdist.__file__).parents[1]
# What a process of a run, or of another job, is told; not to be taken for what a job that it submits is told.
OUTER = {
    **dict.fromkeys(("TF_CONFIG", "TFDIST_CLUSTER"), '{"cluster": {"worker": ["outer:1", "outer:2"]}}'),
    **dict.fromkeys(("TFDIST_RUN_ID", "TFDIST_LOG_DIR", "TFDIST_EVENT_LOG", "TFDIST_PROGRESS"), "/outer"),
    **dict.fromkeys(("TFDIST_RESTART", "TFDIST_REPLACEMENT", "TFDIST_STAGES", "TFDIST_REPLICAS", "TFDIST_PS"), "9"),
    **{"TFDIST_SIZE": "9", "TFDIST_RANK": "8", "TFDIST_TRANSPORT": "horovod"},
}


class Tfdist:
    """Runs `tfdist` in a folder, with jobs that nobody else sees."""

    def __init__(self, folder: Path, jobs: Path) -> None:
        self.folder = folder
        self.records = Records(jobs)
        self.env = {**os.environ, VARIABLE: str(jobs), "PYTHONPATH": str(SOURCE)}

    def run(self, *arguments: str, deadline: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        """A command to its end."""
        command = [sys.executable, "-m", "tfdist", *arguments]
        more = {"capture_output": True, "text": True, "timeout": deadline}
        return subprocess.run(command, cwd=self.folder, env={**self.env, **env}, check=False, **more)

    def __call__(self, *arguments: str, deadline: float = 120, **env: str) -> str:
        """The output of a command that succeeds, without the last end of a line."""
        done = self.run(*arguments, deadline=deadline, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.removesuffix("\n")

    def record(self, job: str) -> Record:
        return self.records.load(job)

    def wait_for(self, job: str, *states: str, deadline: float = 120) -> str:
        """Waits until a job is in one of these states, and returns the first line that `tfdist status` prints."""
        end = time.monotonic() + deadline
        while True:
            line = self("status", job).splitlines()[0]
            if line.split()[2].rstrip(":") in states:
                return line
            if time.monotonic() > end:
                pytest.fail(f"waited {deadline} s in vain for {job} to be {states}: {line}\n{self.logs()}")
            time.sleep(0.1)

    def processes(self) -> list[int]:
        """All processes that have the folder of these jobs in their environment: jobs, launchers, workers."""
        return marked(VARIABLE, f"{self.records.folder}\0")

    def logs(self) -> str:
        """All that was printed, for a test that fails."""
        paths = [*self.records.folder.glob("*.log"), *self.records.folder.glob("*/*.log")]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-4000:]}" for path in paths)


@pytest.fixture
def run_tfdist(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tfdist]:
    """`run_tfdist("submit", ...)` in an empty folder; whatever it has started in the background is ended."""
    work = tmp_path / "work"
    work.mkdir()
    tfdist = Tfdist(work, tmp_path / "jobs")
    yield tfdist
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 60.0)):
        for pid in tfdist.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        end = time.monotonic() + patience
        while tfdist.processes() and time.monotonic() < end:
            time.sleep(0.05)
    if request.session.testsfailed:
        print(tfdist.logs())
    assert tfdist.processes() == []
