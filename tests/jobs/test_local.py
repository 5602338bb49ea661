"""Jobs on this machine: real ones, of programs without TensorFlow."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.jobs.conftest import OUTER, Tfdist
from tests.launcher.conftest import wait_until
from tfdist.jobs.local import LocalEngine
from tfdist.jobs.record import Record
from tfdist.jobs.request import Request, SubmitError
from tfdist.jobs.status import Status
from tfdist.launcher.arguments import Target
from tfdist.supervision.identity import Identity, shown_host, this_host

SECONDS = 120.0
# Waits for a file, and on SIGTERM, if it is told to, for another one.
PROGRAM = """\
    import json, os, signal, sys, time
    from pathlib import Path

    name, *rest = sys.argv[1:]

    def stop(number, frame):
        Path(name + ".stopped").touch()
        while not Path(name + ".saved").exists():
            time.sleep(0.02)
        sys.exit(77)

    if "saves" in rest:
        signal.signal(signal.SIGTERM, stop)
    print("running", name, os.environ.get("COLOUR"), flush=True)
    Path(name + ".env").write_text(json.dumps(dict(os.environ)))
    while not Path(name + ".go").exists():
        time.sleep(0.02)
    sys.exit(int(next((word for word in rest if word.isdigit()), 0)))
"""


@pytest.fixture
def work(run_tfdist: Tfdist, monkeypatch: pytest.MonkeyPatch) -> Path:
    (run_tfdist.folder / "job.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.chdir(run_tfdist.folder)
    for name in ("PYTHONPATH", "TFDIST_JOBS_DIR"):
        monkeypatch.setenv(name, run_tfdist.env[name])
    return run_tfdist.folder


@pytest.fixture
def engine(run_tfdist: Tfdist, work: Path) -> LocalEngine:
    return LocalEngine(run_tfdist.records)


def started(engine: LocalEngine, name: str, *words: str, **options: object) -> Record:
    """A job whose program runs."""
    request = Request("local", Target("script", ("job.py", name, *words)), **{"workers": 1, "grace": 300, **options})
    record = engine.submit(request)
    wait_until(Path(f"{name}.env").exists, SECONDS, f"the start of {name}")
    return record


def waited_for(engine: LocalEngine, record: Record, state: str) -> str:
    """How a job has ended."""

    def found() -> Status:
        return engine.status(engine.records.load(record.id))

    wait_until(lambda: found().state == state, SECONDS, f"{record.id} to be {state}")
    return found().detail


def test_jobs_start_at_once_and_outlive_the_shell(run_tfdist: Tfdist, work: Path) -> None:
    """With their own environment, and nothing of the run or job in which they are submitted."""
    submit = ["submit", "-n", "1", "--env", "SIZE=large", "job.py"]
    jobs = [run_tfdist(*submit, name, COLOUR="red", **OUTER) for name in "ab"]
    assert jobs == ["local-1", "local-2"]
    for name in "ab":
        wait_until((work / f"{name}.env").exists, SECONDS, f"the start of {name}")
    assert [line.split()[:3] for line in run_tfdist("status").splitlines()] == [[job, "job", "running"] for job in jobs]
    pid = run_tfdist.record(jobs[0]).details["process"]["pid"]
    assert os.getsid(pid) == pid != os.getsid(0)
    told, logs = json.loads((work / "a.env").read_text()), run_tfdist.record(jobs[0]).event_log.parent
    assert json.loads(told["TF_CONFIG"])["cluster"].keys() == {"worker"} and "outer" not in told["TF_CONFIG"]
    names = ("TFDIST_LOG_DIR", "TFDIST_EVENT_LOG", "TFDIST_TRANSPORT", "TFDIST_RESTART", "COLOUR", "SIZE")
    assert [told[name] for name in names] == [str(logs), str(logs / "events.jsonl"), "auto", "0", "red", "large"]
    assert {name for name, value in OUTER.items() if told.get(name) == value} == set()
    (work / "b.go").touch()
    assert "[worker 0] running b red" in run_tfdist("logs", "-f", "local-2").splitlines()
    facts = json.loads(run_tfdist("status", "--json", "local-2"))
    assert (facts["state"], facts["program"], facts["workers"]) == ("succeeded", ["job.py", "b"], 1)
    assert facts["submitted"] <= facts["started"] < facts["ended"] < time.time()
    assert run_tfdist("status", "local-1").splitlines()[0].startswith("local-1  job  running")


def test_a_failure_is_told(engine: LocalEngine) -> None:
    job = started(engine, "a", "3", max_restarts=0)
    Path("a.go").touch()
    assert waited_for(engine, job, "failed") == "exit code 3"
    assert "worker 0 failed with exit code 3" in job.output.read_text()


def test_a_run_that_cannot_begin_has_failed(engine: LocalEngine) -> None:
    job = engine.submit(Request("local", Target("script", ("job.py",)), gpus_per_worker=64))
    assert waited_for(engine, job, "failed").startswith("exit code 2, --gpus-per-worker 64: 2 processes need 128 GPUs")


def test_cancel_waits_for_the_backup(engine: LocalEngine) -> None:
    job = started(engine, "a", "saves")
    assert engine.cancel(job) == "local-1: gets SIGTERM, and has 300 s to save its state"
    wait_until(Path("a.stopped").exists, SECONDS, "SIGTERM")
    job = engine.records.load(job.id)
    assert "asked to stop, has 300 s to save" in str(engine.status(job))
    Path("a.saved").touch()
    waited_for(engine, job, "cancelled")
    assert engine.cancel(engine.records.load(job.id)).startswith("local-1: is over already, cancelled after ")
    assert json.loads(job.event_log.read_text().splitlines()[-1])["event"] == "preempted"


def test_a_second_cancel_kills(engine: LocalEngine) -> None:
    job = started(engine, "a", "saves")
    engine.cancel(job)
    wait_until(Path("a.stopped").exists, SECONDS, "SIGTERM")
    # Two signals within a moment count as one.
    time.sleep(0.5)
    assert engine.cancel(engine.records.load(job.id)) == "local-1: is killed"
    waited_for(engine, job, "cancelled")


def test_a_job_that_is_killed_leaves_nothing_and_is_lost(engine: LocalEngine, run_tfdist: Tfdist) -> None:
    job = started(engine, "a")
    os.kill(job.details["process"]["pid"], signal.SIGKILL)
    wait_until(lambda: not run_tfdist.processes(), SECONDS, "the end of all")
    assert waited_for(engine, job, "lost").startswith("its process vanished without a word")


def test_jobs_of_another_host_are_left_to_it(engine: LocalEngine) -> None:
    """It shares the folder, in a home folder say: from here, its processes look as if they had vanished."""
    process = {"pid": os.getpid(), "start": 5, "boot": "another"}
    request = Request("local", Target("script", ("job.py",)))
    job = engine.records.add(request, host="node-7#1a2b3c4d", grace=60, process=process)
    assert engine.status(job).detail == "on node-7"
    with pytest.raises(SubmitError, match=r"a job of node-7\. Expected: `tfdist cancel` on that host"):
        engine.cancel(job)
    job.event_log.write_text('{"time": 9e9, "name": "launcher", "event": "complete"}\n')
    assert engine.status(job).state == "succeeded"


def test_a_dry_run_shows_the_command_and_what_cannot_be_run_is_refused(engine: LocalEngine) -> None:
    target = Target("script", ("job.py", "--text", "a b"))
    request = Request("local", target, workers=3, ps=1, cpus_per_worker=2, gpus_per_worker=0, max_restarts=0, grace=9)
    words = shlex.split(engine.dry_run(request))
    assert words[1:] == [
        *["-m", "tfdist", "run", "-n", "3", "--ps", "1", "--grace", "9", "--max-restarts", "0", "--log-dir"],
        *["FOLDER/logs", "--cpus-per-worker", "2", "--gpus-per-worker", "0", "job.py", "--text", "a b"],
    ]
    with pytest.raises(SubmitError, match=r"nowhere\.py: no such script"):
        engine.submit(Request("local", Target("script", ("nowhere.py",))))
    with pytest.raises(SubmitError, match="--time and --scheduler local"):
        engine.submit(Request("local", target, time_limit=60))
    assert [*engine.records.folder.iterdir()] == []


# --- Which process a number means ------------------------------------------------------------------------------------


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        yield started
        started.kill()


def test_a_process_is_known_until_it_ends(process: subprocess.Popen) -> None:
    identity = Identity.of(process.pid)
    assert identity is not None and identity.is_alive and identity.signal(signal.SIGTERM)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    # Its number is still taken by what is left of it, the exit code.
    assert not identity.is_alive and Identity.of(process.pid) is None
    assert process.wait(SECONDS) == -signal.SIGTERM
    assert not identity.is_alive and not identity.signal(signal.SIGTERM)


@pytest.mark.parametrize("other", [{"start": 5}, {"boot": "another"}])
def test_a_stranger_with_the_number_gets_no_signal(process: subprocess.Popen, other: dict) -> None:
    stranger = dataclasses.replace(Identity.of(process.pid), **other)
    assert not stranger.is_alive and not stranger.signal(signal.SIGKILL)
    time.sleep(0.1)
    assert process.poll() is None


def test_the_names_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    host = this_host()
    monkeypatch.setattr("socket.gethostname", lambda: "node-7.of/here")
    assert host == this_host(), "a machine may be renamed while a process runs"
    assert shown_host(this_host.__wrapped__()) == "node-7.of/here"


def test_a_job_that_is_cancelled_while_its_output_is_followed_stays_cancelled(engine: LocalEngine) -> None:
    job = started(engine, "a")

    class Cancels(io.BytesIO):
        """Another terminal cancels the job as soon as its output is shown in this one."""

        def flush(self) -> None:
            if not (found := engine.records.load(job.id)).details.get("cancelled"):
                engine.cancel(found)
                engine.cancel(engine.records.load(job.id))  # at once

    engine.logs(job, Cancels(), follow=True)
    assert engine.status(engine.records.load(job.id)).state == "cancelled"
