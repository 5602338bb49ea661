"""The batch script, run by bash with commands that stand in for Slurm's; and what is made of Slurm's answers."""

from __future__ import annotations

import dataclasses
import errno
import functools
import getpass
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.jobs.conftest import OUTER, Tfdist, wait_until
from tfdist.jobs.record import Records
from tfdist.jobs.request import Request, SubmitError
from tfdist.jobs.slurm.engine import SlurmEngine, fewest_nodes, run
from tfdist.jobs.slurm.script import batch_script
from tfdist.jobs.slurm.states import from_sacct, from_scontrol, from_squeue
from tfdist.launcher.arguments import Target

PROGRAM = Target("command", ("/bin/sh", "-c", "exit 0"))


def script(folder: Path, target: Target = PROGRAM, nodes: int | None = None, **options) -> str:
    return batch_script(Request("slurm", target, **options), folder, "/some where", "s3cret", nodes)


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_what_sbatch_is_told() -> None:
    options = {"workers": 4, "ps": 1, "cpus_per_worker": 2, "gpus_per_worker": 1, "time_limit": 7200, "grace": 90}
    text = script(Path("/jobs/50%"), nodes=3, name="mine", env={"A": "it's $HOME"}, **options)
    assert directives(text) == [
        *["--job-name=mine", "--ntasks=6", "--cpus-per-task=2", "--gpus-per-task=1", "--nodes=3"],
        *["--time=0-02:00:00", "--requeue", "--open-mode=append", "--signal=B:TERM@90"],
        *["--chdir='/some where'", "--output=/jobs/50%%/output.log"],
    ]
    exports = dict(line[7:].split("=", 1) for line in text.splitlines() if line.startswith("export "))
    assert {name: exports[name] for name in ("A", "TFDIST_TOKEN", "TFDIST_EVENT_LOG", "TFDIST_PS")} == {
        **{"A": shlex.quote("it's $HOME"), "TFDIST_TOKEN": "s3cret", "TFDIST_PS": "1"},
        "TFDIST_EVENT_LOG": "/jobs/50%/logs/events.jsonl",
    }
    assert exports["TF_NUM_INTRAOP_THREADS"] == "${TF_NUM_INTRAOP_THREADS:-2}"
    (step,) = (line.split() for line in text.splitlines() if line.strip().startswith("srun"))
    assert step[:6] == [
        *["srun", "--kill-on-bad-exit=1", "--label", "--ntasks=6", "--cpus-per-task=2", "--gpus-per-task=1"]
    ]


@pytest.mark.parametrize("character", ["\n", "\r", "\x0b", "\x1b", "\x85", "\u2028"])
def test_a_folder_whose_name_would_be_run_is_refused(character: str, tmp_path: Path) -> None:
    named = f"/a{character}touch here"
    for cwd, folder in ((named, "/jobs/1"), ("/home", named)):
        with pytest.raises(ValueError, match="line break or another control character"):
            batch_script(Request("slurm", PROGRAM), Path(folder), cwd, "s3cret")


def test_what_is_not_asked_for_is_not_told() -> None:
    assert directives(script(Path("/jobs/1"), workers=3)) == [
        *["--job-name=sh", "--ntasks=3", "--requeue", "--open-mode=append", "--signal=B:TERM@60"],
        *["--chdir='/some where'", "--output=/jobs/1/output.log"],
    ]
    assert "TFDIST_PS" not in script(Path("/jobs/1"))


@pytest.mark.parametrize(
    ("options", "listing", "nodes"),
    [
        ({"workers": 4}, "4|(null)\n4|(null)\n", 1),
        ({"workers": 5}, "4|(null)\n4|(null)\n", 2),
        ({"workers": 4, "cpus_per_worker": 3}, "8|(null)\n4|(null)\n", 2),
        ({"workers": 8, "gpus_per_worker": 1}, "64|gpu:a100:4(S:0-1)\n64|(null)\n", 2),
        ({"workers": 8, "gpus_per_worker": 1}, "64|gpu:2,nvme:1\n", 4),
        ({"workers": 8, "gpus_per_worker": 1}, "64|gpu:a:1,gpu:b:3\n", 2),
        # What fits nowhere is for sbatch to refuse.
        ({"workers": 2, "cpus_per_worker": 99}, "8|(null)\n", 1),
        ({"workers": 2}, "", 1),
    ],
)
def test_on_how_few_nodes_it_fits(options: dict, listing: str, nodes: int) -> None:
    assert fewest_nodes(Request("slurm", PROGRAM, **options), listing) == nodes


# --- The script -----------------------------------------------------------------------------------------------------

# Slurm's commands, as far as the script uses them. srun runs the program once, in place of all tasks.
COMMANDS = {
    "srun": 'shift 3; "$@" & echo $! > task; wait $!',
    "squeue": "echo 7.0; echo 7.batch",
    "scontrol": 'echo "scontrol $*" >> calls; [ "$1" != --oneliner ] || echo " JobState=$(cat state) "',
    "scancel": 'echo "scancel $*" >> calls; case $1 in --signal=*) kill -TERM $(cat task) ;; esac',
}


class Batch:
    """The script of a program of Python, run by bash."""

    def __init__(self, folder: Path, program: str, events: str = "", **options) -> None:
        self.folder = folder
        (folder / "logs").mkdir()
        (folder / "logs" / "events.jsonl").write_text(events)
        (folder / "state").write_text("RUNNING")
        commands = folder / "bin"
        commands.mkdir()
        for name, body in COMMANDS.items():
            (commands / name).write_text(f"#!/bin/bash\n{body}\n")
            (commands / name).chmod(0o755)
        target = Target("command", (sys.executable, "-c", program))
        (folder / "job.sh").write_text(script(folder, target, **options))
        env = {"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        with open(folder / "output.log", "w") as output:
            self.process = subprocess.Popen(["/bin/bash", "job.sh"], cwd=folder, env=env, stdout=output, stderr=output)

    def end(self) -> int:
        return self.process.wait(20)

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def started(self, times: int = 1) -> None:
        wait_until(lambda: self.text("runs") == "x" * times, 20, f"run {times}")


@pytest.fixture
def batch(tmp_path: Path):
    started = []

    def start(program: str, **options) -> Batch:
        started.append(Batch(tmp_path, "open('runs', 'a').write('x')\n" + program, **options))
        return started[-1]

    yield start
    for job in started:
        task = job.text("task").strip()
        for pid in (job.process.pid, int(task) if task else None):
            if pid is not None:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        job.process.wait(10)


SAVES = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(77)); time.sleep(60)"


def test_a_job_that_succeeds(batch) -> None:
    job = batch("")
    assert (job.end(), job.text("exit-code"), job.text("calls"), job.text("runs")) == (0, "0\n", "", "x")


def test_line_breaks_in_values_and_words_are_not_run(batch) -> None:
    value = "1\ntouch value\n#SBATCH --hold"
    job = batch("import os; open('value-is', 'w').write(os.environ['A'])\n#\ntouch = 'word'", env={"A": value})
    assert (job.end(), job.text("value-is")) == (0, value)
    assert not (job.folder / "value").exists() and not (job.folder / "word").exists()


# A step of the training, and another event of the program.
STEP, REFUSED = (
    f"""print('{{"time": 1, "name": "chief", "event": "{kind}"}}', file=open('logs/events.jsonl', 'a'), flush=True); """
    for kind in ("progress", "refused")
)


def test_a_failure_starts_the_step_again(batch) -> None:
    job = batch(f"{STEP} raise SystemExit(3)", max_restarts=2)
    assert (job.end(), job.text("exit-code"), job.text("runs"), job.text("calls")) == (3, "3\n", "xxx", "")
    assert "tfdist: the step ended with exit code 3; restart 2 of 2" in job.text("output.log")
    assert "not restarted" not in job.text("output.log")


def test_no_restart_where_none_is_allowed(batch) -> None:
    job = batch(f"{STEP} raise SystemExit(3)", max_restarts=0)
    assert (job.end(), job.text("runs")) == (3, "x")


def test_a_failure_before_the_first_step_is_final(batch) -> None:
    job = batch("raise SystemExit(5)", max_restarts=3)
    assert (job.end(), job.text("exit-code"), job.text("runs")) == (5, "5\n", "x")
    assert "tfdist: not restarted: it failed before its first training step" in job.text("output.log")


@pytest.mark.exhaustive
def test_of_failures_without_a_step_between_them_the_second_is_final(batch) -> None:
    # Its first, its third and its fourth run do a step.
    trains = f"runs = len(open('runs').read())\nif runs in (1, 3, 4):\n    {STEP}\nraise SystemExit(3)"
    job = batch(trains, max_restarts=9)
    assert (job.end(), job.text("runs")) == (3, "xxxxxx")
    assert "it failed before its first step for the second time in a row" in job.text("output.log")


@pytest.mark.parametrize("code", [78, 143], ids=["its exit code", "its event, where srun has ended the others"])
def test_what_would_fail_again_is_not_started_again(batch, code: int) -> None:
    job = batch(f"{STEP} {REFUSED if code != 78 else ''} raise SystemExit({code})", max_restarts=3)
    assert (job.end(), job.text("exit-code"), job.text("runs")) == (78, "78\n", "x")
    assert "tfdist: not restarted: exit code 78 says that it would fail again" in job.text("output.log")


def test_the_signal_before_the_time_limit_saves_and_requeues(batch) -> None:
    job = batch(SAVES)
    job.started()
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 0
    assert job.text("calls") == "scancel --signal=TERM 7\nscontrol --oneliner show job 7\nscontrol requeue 7\n"
    # It is not over: nothing says how it has ended.
    assert (job.text("exit-code"), job.text("runs")) == ("", "x")


def test_a_signal_after_which_nothing_could_be_saved_is_told(batch) -> None:
    event = '{"time": 1, "name": "chief", "event": "unsaved"}'
    job = batch(SAVES.replace("77", f"(print('{event}', file=open('logs/events.jsonl', 'a'), flush=True), 74)[1]"))
    job.started()
    job.process.send_signal(signal.SIGTERM)
    assert (job.end(), job.text("calls").splitlines()[-1]) == (0, "scontrol requeue 7")
    assert "tfdist: stopped, and could not save: it will go on from its last backup" in job.text("output.log")


def test_exit_code_77_requeues_without_a_signal_to_the_script(batch) -> None:
    job = batch("raise SystemExit(77)")
    assert (job.end(), job.text("calls").splitlines()[-1], job.text("runs")) == (0, "scontrol requeue 7", "x")


def test_a_preemption_that_srun_has_made_a_143_of(batch) -> None:
    event = '{"time": 1, "name": "chief", "event": "preempted"}'
    job = batch(f"print('{event}', file=open('logs/events.jsonl', 'a'), flush=True); raise SystemExit(143)")
    assert (job.end(), job.text("calls").splitlines()[-1], job.text("runs")) == (0, "scontrol requeue 7", "x")


def test_a_143_without_a_preemption_is_a_failure(batch) -> None:
    earlier = '{"time": 1, "name": "chief", "event": "preempted"}\n'
    job = batch(f"{STEP} raise SystemExit(143)", events=earlier, max_restarts=1)
    assert (job.end(), job.text("calls"), job.text("runs")) == (143, "", "xx")


def test_cancelled_by_its_user_it_is_not_requeued(batch) -> None:
    job = batch(SAVES)
    job.started()
    job.process.send_signal(signal.SIGUSR1)
    assert job.end() == 77
    assert (job.text("calls"), job.text("exit-code")) == ("scancel --signal=TERM 7\nscancel 7\n", "77\n")


def test_cancelled_by_scancel_it_does_not_come_back(batch, tmp_path: Path) -> None:
    job = batch(SAVES)
    job.started()
    (tmp_path / "state").write_text("CANCELLED")
    job.process.send_signal(signal.SIGTERM)
    assert (job.end(), job.text("exit-code")) == (77, "77\n")
    assert "requeue" not in job.text("calls")


def test_a_program_that_does_not_stop_has_the_grace(batch) -> None:
    job = batch("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", grace=2)
    job.started()
    began = time.monotonic()
    job.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: "scancel 7" in job.text("calls").splitlines(), 15, "the end of the grace")
    assert time.monotonic() - began > 2


# --- Slurm's answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PENDING|Resources|N/A\n", "queued: Resources (waits until enough nodes are free)"),
        ("PENDING|Resources|2026-11-22T12:33:25\n", "queued: Resources (waits until enough nodes are free)"),
        ("PENDING|BeginTime|2026-11-22T12:33:25\n", "queued: BeginTime (not before 2026-11-22 12:33:25)"),
        ("PENDING|SomethingNew|N/A\n", "queued: SomethingNew"),
        ("PENDING|None|N/A\n", "queued"),
        ("COMPLETING|None|N/A\n", "running: completing"),
        ("SUSPENDED|None|N/A\n", "running: suspended"),
        ("TIMEOUT|TimeLimit|N/A\n", "failed: timeout, TimeLimit"),
        ("NODE_FAIL|None|N/A\n", "failed: node fail"),
    ],
)
def test_squeue(text: str, expected: str) -> None:
    assert str(from_squeue(text)) == expected


@pytest.mark.parametrize(
    ("reason", "never", "words"),
    [
        ("PartitionConfig", True, "it asks for more cores, memory, GPUs or nodes than its partition has or allows"),
        ("PartitionTimeLimit", True, "more time than a job may have in its partition (--time)"),
        ("InvalidQOS", True, "Slurm does not know it"),
        ("Priority", False, "jobs that are more urgent"),
        ("ReqNodeNotAvail, UnavailableNodes:n9", False, "`sinfo -R` shows why"),
        ("QOSMaxGRESPerUser", False, "a limit of its quality of service is reached"),
        ("AssocGrpCPURunMinutesLimit", False, "a limit of its account or user is reached"),
    ],
)
def test_why_a_job_waits(reason: str, never: bool, words: str) -> None:
    text = str(from_squeue(f"PENDING|{reason}|N/A\n"))
    assert text.startswith(f"queued: {reason} (") and words in text
    assert ("it will not start as it is: cancel it" in text) == never


def test_a_job_that_runs_says_since_when() -> None:
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - 300))
    assert str(from_squeue(f"RUNNING|None|{since}\n")) == "running for 5 min"
    assert from_squeue("") is None
    assert (
        str(from_squeue("CLUSTER: lab\nPENDING|Resources|N/A\n"))
        == "queued: Resources (waits until enough nodes are free)"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("COMPLETED|0:0|2026-11-22T10:00:00|2026-11-22T10:05:00\n", "succeeded after 5 min"),
        ("FAILED|3:0|2026-11-22T10:00:00|2026-11-22T10:05:00\n", "failed after 5 min: exit code 3"),
        (
            "FAILED|78:0|Unknown|Unknown\n",
            "failed: exit code 78: not started again, it would fail again; `tfdist logs` shows why",
        ),
        ("CANCELLED by 1000|0:15|2026-11-22T10:00:00|2026-11-22T10:05:00\n", "cancelled after 5 min"),
        ("OUT_OF_MEMORY|0:125|Unknown|Unknown\n", "failed: out of memory, signal 125"),
        ("REQUEUED|0:0|Unknown|Unknown\nCOMPLETED|0:0|Unknown|Unknown\n", "succeeded"),
    ],
)
def test_sacct(text: str, expected: str) -> None:
    assert str(from_sacct(text)) == expected


def test_scontrol() -> None:
    text = "JobId=1 JobName=a b JobState={} Reason={} ExitCode={} "
    text += "StartTime=2026-11-22T10:00:00 EndTime=2026-11-22T10:05:00"
    assert str(from_scontrol(text.format("FAILED", "NonZeroExitCode", "3:0"))) == "failed after 5 min: exit code 3"
    assert str(from_scontrol(text.format("COMPLETED", "None", "0:0"))) == "succeeded after 5 min"
    assert (
        str(from_scontrol(text.format("PENDING", "BeginTime", "0:0")))
        == "queued: BeginTime (not before 2026-11-22 10:00:00)"
    )
    assert from_scontrol("slurm_load_jobs error: Invalid job id specified") is None
    assert from_sacct("") is None


def test_without_slurm_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmitError, match=r"Received: no command sbatch on the PATH. Expected: Slurm's commands"):
        run("sbatch", "job.sh")
    with pytest.raises(SubmitError, match="no command sbatch"):
        SlurmEngine(Records(tmp_path / "jobs")).submit(Request("slurm", Target("command", ("/bin/true",))))
    assert list((tmp_path / "jobs").glob("*")) == []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Slurm's commands, which do what a test says; and the engine with its records."""
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")

    def install(**bodies: str) -> SlurmEngine:
        for name, body in bodies.items():
            (commands / name).write_text(f"#!/bin/sh\necho {name} $* >> {tmp_path}/calls\n{body}\n")
            (commands / name).chmod(0o755)
        return SlurmEngine(Records(tmp_path / "jobs"))

    return install


JOB = Request("slurm", Target("command", ("/bin/true",)), name="mine")


def recorded(folder: Path) -> list[str]:
    return [record.id for record in Records(folder / "jobs").all()]


def test_a_job_has_its_record_before_slurm_has_it(slurm, tmp_path: Path) -> None:
    engine = slurm(sbatch=f"cat {tmp_path}/jobs/*.json > {tmp_path}/before; echo '17;blue'")
    record = engine.submit(JOB)
    assert (record.id, record.details["job"], record.details["cluster"]) == ("slurm-17", "17", "blue")
    before = json.loads((tmp_path / "before").read_text())
    assert (before["folder"], before["details"]["job"]) == (record.folder, None)
    assert recorded(tmp_path) == ["slurm-17"]


def test_a_job_knows_nothing_of_the_run_in_which_it_is_submitted(slurm, tmp_path: Path, monkeypatch) -> None:
    """sbatch gives it the environment that it has itself: with TF_CONFIG, its tasks would look for that cluster."""
    for name, value in OUTER.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLOUR", "red")
    slurm(sbatch=f"env > {tmp_path}/env; echo 17").submit(JOB)
    variables = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert variables["COLOUR"] == "red" and not variables.keys() & OUTER.keys()


def test_a_job_that_slurm_refuses_leaves_nothing(slurm, tmp_path: Path) -> None:
    with pytest.raises(SubmitError, match="no such partition"):
        slurm(sbatch="echo no such partition >&2; exit 1").submit(JOB)
    assert recorded(tmp_path) == [] and [path.name for path in (tmp_path / "jobs").iterdir()] == [".lock"]


@pytest.mark.parametrize("found", ["in the queue", "by its script", "nowhere"])
def test_a_submission_that_was_killed(slurm, tmp_path: Path, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = slurm(sbatch="echo 17", squeue="exit 0")

    def killed(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._records, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        engine.submit(JOB)
    (record,) = engine._records.all()
    assert record.id.startswith("slurm-unconfirmed-")
    assert str(engine.status(record)) == "queued: sbatch has not answered yet"
    record = engine._records.update(record.id, lambda now: dataclasses.replace(now, submitted=5.0))
    if found == "in the queue":
        line = f"17|{record.folder}/job.sh"
        slurm(squeue=f"case $* in *%o*) echo '4|/other'; echo '{line}' ;; *) echo 'PENDING|Priority|N/A' ;; esac")
    elif found == "by its script":
        Path(record.folder, "job-id").write_text("17\n")
        slurm(squeue="echo 'PENDING|Priority|N/A'")
    if found == "nowhere":
        now = engine.status(record)
        assert now.state == "unconfirmed"
        assert now.detail.startswith("sbatch has not answered, and Slurm has no job")
        assert f"`squeue --user={getpass.getuser()} --name=mine` shows it" in now.detail
        assert f"`rm -r {tmp_path}/jobs/{record.id}.json {record.folder}` forgets it" in now.detail
        with pytest.raises(SubmitError, match=rf"{record.id}, which cannot be ended now.*It is unconfirmed: sbatch"):
            engine.cancel(record)
        return
    assert engine.status(record).state == "queued"
    slurm(scancel="exit 0")
    assert engine.cancel(engine._records.load(record.id)) == f"{record.id}: cancelled"
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "scancel 17"


def test_a_record_that_cannot_be_completed_ends_the_job(slurm, tmp_path: Path, monkeypatch) -> None:
    engine = slurm(sbatch="echo 17", scancel="exit 0")

    def no_space(*arguments, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(engine._records, "rename", no_space)
    with pytest.raises(SubmitError, match=r"No space left on device. The job 17 was cancelled"):
        engine.submit(JOB)
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "scancel 17"


def test_no_record_no_job(slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*arguments, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tfdist.jobs.record.write_atomically", no_space)
    with pytest.raises(OSError, match="No space left"):
        slurm(sbatch="echo 17").submit(JOB)
    assert not (tmp_path / "calls").exists() and [path.name for path in (tmp_path / "jobs").iterdir()] == [".lock"]


def test_no_answer_from_sbatch(slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfdist.jobs.slurm.engine._SECONDS", 0.5)
    with pytest.raises(SubmitError, match="Whether the job runs is not known: it is kept as slurm-unconf"):
        slurm(sbatch="exec sleep 60").submit(JOB)
    assert len(recorded(tmp_path)) == 1


def test_ctrl_c_while_sbatch_is_asked_is_explained(slurm, run_tfdist: Tfdist, tmp_path: Path) -> None:
    slurm(sbatch=f"touch {tmp_path}/asked; exec sleep 30", squeue="exit 0")
    command = [sys.executable, "-m", "tfdist", "submit", "--scheduler", "slurm", "--name", "mine", "--", "/bin/true"]
    env = {**run_tfdist.env, "PATH": os.environ["PATH"]}
    # A shell lets what it starts in the background ignore it, as perhaps these tests.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    options = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": heed}
    with subprocess.Popen(command, cwd=tmp_path, env=env, **options) as submit:
        try:
            wait_until((tmp_path / "asked").exists, 30, "sbatch")
            submit.send_signal(signal.SIGINT)
            _, said = submit.communicate(timeout=20)
        finally:
            submit.kill()
    (job,) = recorded(tmp_path)
    assert (submit.returncode, said.count("\n")) == (1, 1)
    assert said.startswith(f"tfdist: interrupted. Whether the job runs is not known: it is kept as {job}; `tfdist")
    assert run_tfdist("status", PATH=env["PATH"]).startswith(f"{job}  mine  unconfirmed: sbatch has not answered, and")


def test_what_slurm_says_moves_no_cursor(slurm, tmp_path: Path) -> None:
    escapes = r"\033]0;title\007\377"
    engine = slurm(sbatch="echo 17", squeue=f"printf 'PENDING|Held{escapes}|N/A\\n'")
    record = engine.submit(JOB)
    assert str(engine.status(record)) == r"queued: Held\x1b]0;title\x07\udcff"
    slurm(squeue=f"printf 'first{escapes}\\nsecond\\n' >&2; exit 1")
    with pytest.raises(SubmitError, match=r"Received: from squeue: first.*\nsecond. Expected") as failed:
        engine.status(record)
    slurm(squeue="exit 0", sacct=f"printf 'NODE{escapes}|0:0|Unknown|Unknown\\n'")
    for text in (*str(failed.value).split("\n"), str(engine.status(record))):
        assert text.isprintable()


def test_what_slurm_refuses_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SubmitError, match="from sbatch --parsable: sbatch: error: invalid partition specified: x"):
        run("sbatch", "--parsable")
