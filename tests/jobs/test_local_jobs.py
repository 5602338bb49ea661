"""Real jobs of programs without TensorFlow, in the queue on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.jobs.conftest import OUTER, Tfdist, wait_until
from tfdist.supervision.identity import Identity, this_host

# Waits for a file, writes down when it ran, and saves on SIGTERM if it is told to.
PROGRAM = """\
    import os, signal, sys, time
    from pathlib import Path

    name, *rest = sys.argv[1:]

    def stop(number, frame):
        Path(name + ".stopped").touch()
        time.sleep(float(os.environ.get("SAVING", "0.2")))
        sys.exit(77)

    if "saves" in rest:
        signal.signal(signal.SIGTERM, stop)
    with open("order", "a") as file:
        file.write(f"begin {name}\\n")
    print("running", name, os.environ.get("COLOUR"), len(os.sched_getaffinity(0)), flush=True)
    Path(name + ".started").touch()
    while not Path(name + ".go").exists():
        time.sleep(0.02)
    with open("order", "a") as file:
        file.write(f"end {name}\\n")
    sys.exit(int(next((word for word in rest if word.isdigit()), 0)))
"""


@pytest.fixture
def work(run_tfdist: Tfdist) -> Path:
    (run_tfdist.folder / "job.py").write_text(textwrap.dedent(PROGRAM))
    return run_tfdist.folder


def submit(run_tfdist: Tfdist, name: str, *options: str, words: tuple[str, ...] = (), **env: str) -> str:
    return run_tfdist("submit", "-n", "1", "--grace", "5", *options, "job.py", name, *words, **env)


def started(work: Path, name: str, deadline: float = 20) -> None:
    wait_until((work / f"{name}.started").exists, deadline, f"the start of {name}")


def kill_runner(run_tfdist: Tfdist) -> int:
    pid = run_tfdist.runner()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: run_tfdist.runner() is None, 5, "the end of the runner")
    return pid


def test_one_after_the_other_in_order(run_tfdist: Tfdist, work: Path) -> None:
    jobs = [submit(run_tfdist, name, "--env", "COLOUR=red") for name in "abc"]
    assert jobs == ["local-1", "local-2", "local-3"]
    started(work, "a")
    time.sleep(0.5)
    assert not (work / "b.started").exists()
    lines = run_tfdist("status").splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["local-2", "job", "queued:"], ["local-3", "job", "queued:"]]
    assert lines[0].split()[:3] == ["local-1", "job", "running"]
    assert lines[1].endswith("queued: 1 before it") and lines[2].endswith("queued: 2 before it")
    runner = run_tfdist.runner()
    assert runner is not None and os.getsid(runner) == runner != os.getsid(0)
    (work / "b.go").touch()
    (work / "a.go").touch()
    started(work, "c")
    assert run_tfdist.runner() == runner
    (work / "c.go").touch()
    for job in jobs:
        run_tfdist.wait_for(job, "succeeded")
    assert (work / "order").read_text().split("\n")[:-1] == [
        f"{what} {name}" for name in "abc" for what in ("begin", "end")
    ]
    assert "running b red" in run_tfdist("logs", "local-2")
    facts = json.loads(run_tfdist("status", "--json", "local-3"))
    assert (facts["state"], facts["program"], facts["workers"]) == ("succeeded", ["job.py", "c"], 1)
    assert facts["submitted"] < facts["started"] < facts["ended"] < time.time()
    wait_until(lambda: not run_tfdist.processes(), 10, "the end of the runner, which has nothing left to do")


def test_a_job_knows_nothing_of_the_run_in_which_it_is_submitted(run_tfdist: Tfdist) -> None:
    """Its process is told what it is by its own launcher, and by nobody else."""
    program = "import json, os; json.dump(dict(os.environ), open('env.json', 'w'))"
    (run_tfdist.folder / "job.py").write_text(program)
    job = run_tfdist("submit", "-n", "1", "job.py", COLOUR="red", **OUTER)
    run_tfdist.wait_for(job, "succeeded")
    told, logs = json.loads((run_tfdist.folder / "env.json").read_text()), run_tfdist.record(job).event_log.parent
    assert json.loads(told["TF_CONFIG"])["cluster"].keys() == {"worker"} and "outer" not in told["TF_CONFIG"]
    names = ("TFDIST_LOG_DIR", "TFDIST_EVENT_LOG", "TFDIST_TRANSPORT", "TFDIST_RESTART", "TFDIST_REPLACEMENT", "COLOUR")
    assert [told[name] for name in names] == [str(logs), str(logs / "events.jsonl"), "auto", "0", "", "red"]
    assert {name for name, value in OUTER.items() if told.get(name) == value} == set()


@pytest.mark.exhaustive
def test_as_many_at_once_as_the_variable_says(run_tfdist: Tfdist, work: Path) -> None:
    for name in "abc":
        submit(run_tfdist, name, TFDIST_LOCAL_JOBS="2")
    started(work, "a")
    started(work, "b")
    time.sleep(0.5)
    assert not (work / "c.started").exists()
    (work / "b.go").touch()
    started(work, "c")
    assert not (work / "order").read_text().endswith("end a\n")
    for name in "ac":
        (work / f"{name}.go").touch()
    for job in ("local-1", "local-2", "local-3"):
        run_tfdist.wait_for(job, "succeeded")
    cores = len(os.sched_getaffinity(0))
    share = cores // 2 if cores >= 2 else 1
    printed = run_tfdist("logs", "local-1").splitlines()[-1]
    assert printed == f"[worker 0] running a None {share}"


def test_logs_are_followed_to_the_end_and_failures_are_told(run_tfdist: Tfdist, work: Path) -> None:
    job = submit(run_tfdist, "a", "--max-restarts", "0", words=("3",))
    command = [sys.executable, "-m", "tfdist", "logs", "-f", job]
    with subprocess.Popen(command, cwd=work, env=run_tfdist.env, stdout=subprocess.PIPE, text=True) as following:
        try:
            assert following.stdout is not None
            assert next(line for line in following.stdout if "running" in line).startswith("[worker 0] running a")
            assert following.poll() is None
            (work / "a.go").touch()
            rest = following.stdout.read()
            assert following.wait(20) == 0
        finally:
            following.kill()
    assert "worker 0 failed with exit code 3" in rest
    assert run_tfdist.wait_for(job, "failed").endswith(": exit code 3")


def test_cancel_waits_for_the_backup(run_tfdist: Tfdist, work: Path) -> None:
    job = submit(run_tfdist, "a", words=("saves",), SAVING="1.5")
    waiting = submit(run_tfdist, "b")
    started(work, "a")
    assert run_tfdist("cancel", waiting) == "local-2: cancelled"
    assert run_tfdist("cancel", job) == "local-1: gets SIGTERM, and has 5 s to save its state"
    wait_until((work / "a.stopped").exists, 10, "SIGTERM")
    assert "asked to stop (cancelled), has 5 s to save" in run_tfdist("status", job)
    run_tfdist.wait_for(job, "cancelled")
    assert run_tfdist("cancel", job) == "local-1: is over already, cancelled"
    assert (work / "order").read_text() == "begin a\n"
    events = [json.loads(line)["event"] for line in run_tfdist.record(job).event_log.read_text().splitlines()]
    assert events[-1] == "preempted"


def test_a_second_cancel_kills(run_tfdist: Tfdist, work: Path) -> None:
    job = submit(run_tfdist, "a", "--grace", "50", words=("saves",), SAVING="45")
    started(work, "a")
    run_tfdist("cancel", job)
    wait_until((work / "a.stopped").exists, 10, "SIGTERM")
    # Two signals within a moment count as one.
    time.sleep(0.5)
    assert run_tfdist("cancel", job) == "local-1: is killed"
    run_tfdist.wait_for(job, "cancelled", deadline=10)


@pytest.mark.exhaustive
def test_a_preempted_job_goes_on(run_tfdist: Tfdist, work: Path) -> None:
    job = submit(run_tfdist, "a", words=("saves",))
    waiting = submit(run_tfdist, "b")
    started(work, "a")
    (work / "a.started").unlink()
    begun = json.loads(Path(run_tfdist.record(job).folder, "process-1.json").read_text())
    os.kill(begun["process"]["pid"], signal.SIGTERM)
    # Before the one that was submitted later.
    started(work, "a")
    assert run_tfdist("status", job).splitlines()[0].split()[:3] == ["local-1", "job", "running"]
    assert run_tfdist.wait_for(waiting, "queued").endswith("1 before it")
    for name in "ab":
        (work / f"{name}.go").touch()
    run_tfdist.wait_for(job, "succeeded")
    run_tfdist.wait_for(waiting, "succeeded")
    assert (work / "order").read_text() == "begin a\nbegin a\nend a\nbegin b\nend b\n"
    assert "--- started again: run 2 of local-1 ---" in run_tfdist("logs", job)


@pytest.mark.exhaustive
def test_the_time_limit(run_tfdist: Tfdist, work: Path) -> None:
    job = submit(run_tfdist, "a", "--time", "10s", words=("saves",))
    started(work, "a")
    assert run_tfdist.wait_for(job, "failed").endswith(": time limit")
    assert (work / "a.stopped").exists()


def test_a_killed_runner_is_replaced_and_finds_what_runs(run_tfdist: Tfdist, work: Path) -> None:
    job, waiting = submit(run_tfdist, "a", words=("3",)), submit(run_tfdist, "b")
    started(work, "a")
    killed = kill_runner(run_tfdist)
    assert run_tfdist("status").splitlines()[0].split()[2] == "running"
    wait_until(lambda: run_tfdist.runner() not in (None, killed), 5, "another runner")
    time.sleep(1.5)
    assert (work / "order").read_text() == "begin a\n"
    for name in "ab":
        (work / f"{name}.go").touch()
    # The new one is not its parent: the exit code is in the launcher's last event.
    assert run_tfdist.wait_for(job, "failed").endswith(": exit code 3")
    run_tfdist.wait_for(waiting, "succeeded")


def test_what_ended_while_nobody_looked(run_tfdist: Tfdist, work: Path) -> None:
    submit(run_tfdist, "a", TFDIST_LOCAL_JOBS="2")
    other = submit(run_tfdist, "b", TFDIST_LOCAL_JOBS="2")
    started(work, "a")
    started(work, "b")
    kill_runner(run_tfdist)
    (work / "a.go").touch()
    begun = json.loads(Path(run_tfdist.record(other).folder, "process-1.json").read_text())
    os.kill(begun["process"]["pid"], signal.SIGKILL)
    wait_until(lambda: not run_tfdist.processes(), 10, "the end of both jobs")
    assert (
        run_tfdist("status", other)
        .splitlines()[0]
        .endswith("its process vanished without a word: killed, or the machine was switched off")
    )
    assert [line.split()[2] for line in run_tfdist("status").splitlines()] == ["succeeded", "lost"]


def test_jobs_of_another_host_are_left_to_it(run_tfdist: Tfdist, work: Path) -> None:
    """It shares the folder, in a home folder say: from here, its processes look as if they had vanished."""
    elsewhere, waiting = submit(run_tfdist, "a"), submit(run_tfdist, "b")
    started(work, "a")
    kill_runner(run_tfdist)
    for job in (elsewhere, waiting):
        run_tfdist.records.update(job, lambda now: now.with_details(host="node-7#1a2b3c4d"))
    process = Path(run_tfdist.record(elsewhere).folder, "process-1.json")
    content = json.loads(process.read_text())
    process.write_text(json.dumps({**content, "process": {**content["process"], "boot": "another", "pid": 2**22}}))
    before = run_tfdist.record(elsewhere)
    # The queue here is empty: its own job does not wait.
    own = submit(run_tfdist, "c")
    started(work, "c")
    lines = run_tfdist("status").splitlines()
    assert lines[0].startswith(f"{elsewhere}  job  running") and lines[0].endswith(": in the queue of node-7")
    assert lines[1].endswith("queued: 1 before it; in the queue of node-7")
    assert run_tfdist.record(elsewhere) == before and not (work / "b.started").exists()
    told = run_tfdist("cancel", elsewhere)
    assert "from the runner on node-7. If that host is gone for good, remove " in told
    assert run_tfdist("cancel", waiting) == f"{waiting}: cancelled"
    for name in "ac":
        (work / f"{name}.go").touch()
    run_tfdist.wait_for(own, "succeeded")
    wait_until(lambda: run_tfdist.runner() is None, 10, "the end of the runner")
    assert run_tfdist.record(elsewhere).details["state"] == "running"


def test_jobs_that_were_recorded_without_their_host(run_tfdist: Tfdist, work: Path) -> None:
    """By an older version: only a process that runs here shows that a job is this host's."""
    here, gone, elsewhere, waiting = (submit(run_tfdist, name, TFDIST_LOCAL_JOBS="3") for name in "abcd")
    for name in "abc":
        started(work, name)
    kill_runner(run_tfdist)
    (work / "b.go").touch()
    wait_until(lambda: (work / "order").read_text().endswith("end b\n"), 20, "the end of the second job")
    process = Path(run_tfdist.record(elsewhere).folder, "process-1.json")
    content = json.loads(process.read_text())
    wait_until(lambda: not Identity(**begun(run_tfdist, gone)).is_alive, 20, "the end of its launcher")
    process.write_text(json.dumps({**content, "process": {**content["process"], "boot": "another"}}))
    for job in (here, gone, elsewhere, waiting):
        record = run_tfdist.record(job)
        details = {name: value for name, value in record.details.items() if name != "host"}
        run_tfdist.records.save(dataclasses.replace(record, details=details))
    lines = run_tfdist("status").splitlines()
    assert [line.split()[2] for line in lines] == ["running", "running", "running", "queued:"]
    told = "in the queue of an unknown host, because an older tfdist has recorded it. If no runner of that version"
    assert [told in line for line in lines] == [False, True, True, True]
    assert run_tfdist.record(here).details["host"] == this_host()
    (work / "a.go").touch()
    run_tfdist.wait_for(here, "succeeded")
    assert "from the runner on an unknown host. If that host is gone for good, remove" in run_tfdist("cancel", gone)
    assert run_tfdist("cancel", waiting) == f"{waiting}: cancelled"
    (work / "c.go").touch()
    wait_until(lambda: not run_tfdist.processes(), 20, "the end of all")
    assert not (work / "d.started").exists()
    assert [run_tfdist.record(job).details["state"] for job in (gone, elsewhere)] == ["running", "running"]


def begun(run_tfdist: Tfdist, job: str) -> dict:
    return json.loads(Path(run_tfdist.record(job).folder, "process-1.json").read_text())["process"]


def test_after_a_power_failure_the_other_jobs_go_on(run_tfdist: Tfdist, work: Path) -> None:
    """Files whose content never reached the disk: of a record, and of an attempt."""
    lost, torn, whole = (submit(run_tfdist, name) for name in "abc")
    started(work, "a")
    kill_runner(run_tfdist)
    begun = Path(run_tfdist.record(lost).folder, "process-1.json")
    (work / "a.go").touch()
    wait_until(lambda: not run_tfdist.processes(), 10, "the end of the job")
    begun.write_bytes(b"")
    Path(run_tfdist.record(lost).event_log).unlink()
    (run_tfdist.records.folder / f"{torn}.json").write_bytes(b"")
    (work / "c.go").touch()
    run_tfdist.wait_for(whole, "succeeded")
    assert "its process vanished without a word" in run_tfdist.wait_for(lost, "lost")
    shown = run_tfdist.run("status")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == [lost, whole]
    assert f"{torn}.json is left alone: it is empty, as after a power failure" in shown.stderr
    assert run_tfdist.run("status", torn).returncode == 1


def test_an_error_with_one_job_is_told_once_and_the_others_go_on(run_tfdist: Tfdist, work: Path) -> None:
    first, second = (submit(run_tfdist, name, TFDIST_LOCAL_JOBS="2") for name in "ab")
    started(work, "a")
    started(work, "b")
    begun = Path(run_tfdist.record(first).folder, "process-1.json")
    kept = begun.read_text()
    begun.unlink()
    begun.mkdir()
    (work / "b.go").touch()
    wait_until(lambda: run_tfdist.record(second).details["state"] == "succeeded", 20, "the end of the second job")
    begun.rmdir()
    begun.write_text(kept)
    (work / "a.go").touch()
    run_tfdist.wait_for(first, "succeeded")
    (log,) = run_tfdist.records.folder.glob("runner-*.log")
    assert log.read_text().count(f"{first}: [Errno 21] Is a directory") == 1


@pytest.mark.exhaustive
def test_a_runner_killed_at_any_moment_starts_nothing_twice(run_tfdist: Tfdist, work: Path) -> None:
    for name in "abcde":
        (work / f"{name}.go").touch()
        submit(run_tfdist, name)
        for _ in range(4):
            time.sleep(0.07)
            pid = run_tfdist.runner()
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            run_tfdist("status")
    for number in range(1, 6):
        run_tfdist.wait_for(f"local-{number}", "succeeded")
    assert (work / "order").read_text().splitlines() == [
        f"{what} {name}" for name in "abcde" for what in ("begin", "end")
    ]


@pytest.mark.exhaustive
def test_commands_that_start_at_the_same_time_share_one_runner(run_tfdist: Tfdist, work: Path) -> None:
    command = [sys.executable, "-m", "tfdist", "submit", "-n", "1", "job.py"]
    several = [
        subprocess.Popen([*command, name], cwd=work, env=run_tfdist.env, stdout=subprocess.PIPE) for name in "abcd"
    ]
    ids = sorted(process.communicate(timeout=30)[0].decode().strip() for process in several)
    assert ids == ["local-1", "local-2", "local-3", "local-4"]
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in run_tfdist.processes()]
    runners = [words for words in commands if b"jobs.local.runner" in words]
    assert len(runners) == 1
    for name in "abcd":
        (work / f"{name}.go").touch()
    for job in ids:
        run_tfdist.wait_for(job, "succeeded")
    lines = (work / "order").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["begin", "end"] * 4


def test_a_folder_that_is_gone(run_tfdist: Tfdist, work: Path) -> None:
    gone = work / "gone"
    gone.mkdir()
    (gone / "job.py").write_text("")
    first = submit(run_tfdist, "a")
    started(work, "a")
    done = subprocess.run(
        [sys.executable, "-m", "tfdist", "submit", "job.py"], cwd=gone, env=run_tfdist.env, timeout=30, check=True
    )
    assert done.returncode == 0
    (gone / "job.py").unlink()
    gone.rmdir()
    (work / "a.go").touch()
    run_tfdist.wait_for(first, "succeeded")
    assert run_tfdist.wait_for("local-2", "failed").endswith(": exit code 1")
    assert f"It was submitted in {gone}" in run_tfdist("logs", "local-2")
