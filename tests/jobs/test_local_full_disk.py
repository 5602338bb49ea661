"""The queue of this machine on a full disk: nothing is lost, started twice or given up, and it goes on with space."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import small_disks
from tests.jobs.conftest import Tfdist, wait_until
from tfdist.jobs.local.runner import Runner
from tfdist.jobs.record import Records
from tfdist.jobs.request import Request
from tfdist.launcher.arguments import Target
from tfdist.supervision.identity import Identity, this_host

# Waits for a file, and ends.
PROGRAM = """\
import sys, time
from pathlib import Path
with open("order", "a") as file:
    file.write(sys.argv[1])
while not Path(sys.argv[1] + ".go").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def small_jobs(tmp_path: Path) -> Iterator[Path]:
    """The folder of the jobs, on a disk with room for some of them."""
    folder = tmp_path / "jobs"
    with small_disks.small_disk(folder, "1m"):
        yield folder


@pytest.mark.mount
def test_jobs_that_end_while_the_disk_is_full(small_jobs: Path, run_tfdist: Tfdist) -> None:
    work = run_tfdist.folder
    (work / "job.py").write_text(PROGRAM)
    first, second = (run_tfdist("submit", "-n", "1", "job.py", name) for name in "ab")
    wait_until((work / "order").exists, 20, "the first job")
    runner = run_tfdist.runner()
    small_disks.fill(small_jobs / "filler")
    refused = run_tfdist.run("submit", "-n", "1", "job.py", "c")
    assert (refused.returncode, "No space left on device" in refused.stderr) == (1, True)
    assert sum(path.is_dir() for path in small_jobs.iterdir()) == 2
    begun = json.loads(Path(run_tfdist.record(first).folder, "process-1.json").read_text())["process"]
    (work / "a.go").touch()
    wait_until(lambda: not Identity(**begun).is_alive, 20, "the end of the first job")
    # Its end cannot be written down, nor the begin of the next one.
    lines = run_tfdist("status").splitlines()
    assert [line.split()[2].rstrip(":") for line in lines] == ["running", "queued"]
    assert run_tfdist.runner() == runner is not None
    (small_jobs / "filler").unlink()
    run_tfdist.wait_for(first, "succeeded")
    (work / "b.go").touch()
    run_tfdist.wait_for(second, "succeeded")
    assert (work / "order").read_text() == "ab"
    wait_until(lambda: not run_tfdist.processes(), 10, "the end of the runner")
    (log,) = small_jobs.glob("runner-*.log")
    assert log.read_text().count("No space left on device") <= 1


def test_a_job_whose_begin_cannot_be_written_down_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = Records(tmp_path / "jobs")
    details = {"state": "queued", "attempt": 1, "time_limit": None, "grace": 5, "parallel_jobs": 1}
    request = Request("local", Target("script", ("train.py",)))
    job = records.add(request, records.make_folder("mine"), host=this_host(), **details).id
    started: list[list[str]] = []

    def spawn(words: list[str], output: int, folder: str) -> subprocess.Popen[bytes]:
        started.append(words)
        return subprocess.Popen(["true"])

    def no_space(*arguments: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tfdist.jobs.local.runner.spawn", spawn)
    runner = Runner(records, lock=-1)
    with monkeypatch.context() as full:
        full.setattr("tfdist.jobs.record.write_atomically", no_space)
        assert runner._step() and runner._step()
    assert (records.load(job).details["state"], started) == ("queued", [])
    assert capsys.readouterr().out == f"{job}: [Errno 28] No space left on device; tried again\n"
    assert runner._step()
    assert (records.load(job).details["state"], len(started)) == ("running", 1)
    runner._children[job].wait(10)
