"""The batch script, run by bash with commands that stand in for Slurm's; and what is made of Slurm's answers."""

from __future__ import annotations

import contextlib
import errno
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

from tests.jobs.conftest import OUTER
from tests.launcher.conftest import wait_until
from tfdist.jobs.record import Records
from tfdist.jobs.request import Request, SubmitError
from tfdist.jobs.slurm import SlurmEngine, batch_script, from_sacct, from_scontrol
from tfdist.launcher.arguments import Target

PROGRAM = Target("command", ("/bin/sh", "-c", "exit 0"))


def script(folder: Path, target: Target = PROGRAM, **options) -> str:
    return batch_script(Request("slurm", target, **options), folder, "/some where", "s3cret")


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_what_sbatch_is_told() -> None:
    options = {"workers": 4, "ps": 1, "cpus_per_worker": 2, "gpus_per_worker": 1, "time_limit": 7200, "grace": 90}
    text = script(Path("/jobs/50%"), pack=True, name="mine", env={"A": "it's $HOME"}, **options)
    assert directives(text) == [
        *["--job-name=mine", "--ntasks=6", "--cpus-per-task=2", "--gpus-per-task=1"],
        *[
            "--time=120:00",
            "--nodes=1-6",
            "--use-min-nodes",
            "--requeue",
            "--open-mode=append",
            "--signal=B:TERM@90",
        ],
        *["--chdir='/some where'", "--output=/jobs/50%%/output.log"],
    ]
    exports = dict(line[7:].split("=", 1) for line in text.splitlines() if line.startswith("export "))
    assert exports["SLURM_EXPORT_ENV"] == "ALL"  # also where the site has SBATCH_EXPORT=NONE
    assert {name: exports[name] for name in ("A", "TFDIST_TOKEN", "TFDIST_EVENT_LOG", "TFDIST_PS")} == {
        **{"A": shlex.quote("it's $HOME"), "TFDIST_TOKEN": "s3cret", "TFDIST_PS": "1"},
        "TFDIST_EVENT_LOG": "/jobs/50%/logs/events.jsonl",
    }
    assert exports["TF_NUM_INTRAOP_THREADS"] == "${TF_NUM_INTRAOP_THREADS:-2}"
    (step,) = (line.split() for line in text.splitlines() if line.strip().startswith("srun"))
    assert step[:6] == [
        *["srun", "--kill-on-bad-exit=1", "--label", "--ntasks=6", "--cpus-per-task=2", "--gpus-per-task=1"]
    ]


@pytest.mark.parametrize(("seconds", "written"), [(7200, "120:00"), (129600, "2160:00"), (61, "1:01")])
def test_times_as_they_are_written(seconds: int, written: str) -> None:
    assert f"--time={written}" in directives(script(Path("/jobs/1"), time_limit=seconds))


@pytest.mark.parametrize("character", ["\n", "\r", "\x0b", "\x1b", "\x85", "\u2028"])
def test_a_folder_whose_name_would_be_run_is_refused(character: str, tmp_path: Path) -> None:
    named = f"/a{character}touch here"
    for cwd, folder in ((named, "/jobs/1"), ("/home", named)):
        with pytest.raises(SubmitError, match="line break or another control character"):
            batch_script(Request("slurm", PROGRAM), Path(folder), cwd, "s3cret")


def test_what_is_not_asked_for_is_not_told() -> None:
    assert directives(script(Path("/jobs/1"), workers=3)) == [
        *["--job-name=sh", "--ntasks=3", "--requeue", "--open-mode=append", "--signal=B:TERM@60"],
        *["--chdir='/some where'", "--output=/jobs/1/output.log"],
    ]
    assert "TFDIST_PS" not in script(Path("/jobs/1"))


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
        text = script(folder, target, **options)
        for waits, quick in (('sleep "$restarts"', "sleep 0.05"), ("sleep 1\n", "sleep 0.05\n"), (">= 3))", ">= 0))")):
            assert waits in text
            text = text.replace(waits, quick)
        (folder / "job.sh").write_text(text)
        env = {"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        with open(folder / "output.log", "w") as output:
            more = {"stdout": output, "stderr": output, "start_new_session": True}
            self.process = subprocess.Popen(["/bin/bash", "job.sh"], cwd=folder, env=env, **more)

    def end(self) -> int:
        return self.process.wait(120)

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def wait_until_ready(self) -> None:
        wait_until(lambda: (self.folder / "ready").exists() and self.text("task").endswith("\n"), 120, "the program")


@pytest.fixture
def batch(tmp_path: Path):
    started = []

    def start(program: str, **options) -> Batch:
        started.append(Batch(tmp_path, "open('runs', 'a').write('x')\n" + program, **options))
        return started[-1]

    yield start
    for job in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait(60)


# It makes a file when it is ready for a signal.
READY, WAITS = "import signal, sys, time; signal.signal(signal.SIGTERM, ", "; open('ready', 'w'); time.sleep(600)"
SAVES = f"{READY}lambda *_: sys.exit(77)){WAITS}"


def test_line_breaks_in_values_and_words_are_not_run(batch) -> None:
    value = "1\ntouch value\n#SBATCH --hold"
    job = batch("import os; open('value-is', 'w').write(os.environ['A'])\n#\ntouch = 'word'", env={"A": value})
    assert (job.end(), job.text("value-is")) == (0, value)
    assert not (job.folder / "value").exists() and not (job.folder / "word").exists()


# Events of the program: a step of the training, and others.
STEP, REFUSED, PREEMPTED, UNSAVED = (
    f"""print('{{"time": 1, "name": "chief", "event": "{kind}"}}', file=open('logs/events.jsonl', 'a'), flush=True); """
    for kind in ("progress", "refused", "preempted", "unsaved")
)
REQUEUED = ["scontrol --oneliner show job 7", "scontrol requeue 7"]
STOPPED = "scancel --signal=TERM 7"
AGAIN = "not restarted: exit code 78 says that it would fail again"
# The program, options, the signal to the script and the job's state then; exit code, the file of it, Slurm's commands
# that were called, the number of runs, and what the script says.
RUNS: dict[str, tuple[str, dict, tuple[int, str] | None, int, str, list[str], int, str]] = {
    "it succeeds": ("", {}, None, 0, "0\n", [], 1, ""),
    "a failure": (
        f"{STEP} raise SystemExit(3)",
        {"max_restarts": 2},
        None,
        3,
        "3\n",
        [],
        3,
        "tfdist: the step ended with exit code 3; restart 2 of 2",
    ),
    "no restart is allowed": (f"{STEP} raise SystemExit(3)", {"max_restarts": 0}, None, 3, "3\n", [], 1, ""),
    "a failure before the first step": (
        "raise SystemExit(5)",
        {},
        None,
        5,
        "5\n",
        [],
        1,
        "tfdist: not restarted: it failed before its first training step",
    ),
    # Its first, its third and its fourth run do a step.
    "two failures without a step": (
        f"runs = len(open('runs').read())\nif runs in (1, 3, 4):\n    {STEP}\nraise SystemExit(3)",
        {"max_restarts": 9},
        None,
        3,
        "3\n",
        [],
        6,
        "it failed before its first step for the second time in a row",
    ),
    "refused, by its exit code": (f"{STEP} raise SystemExit(78)", {}, None, 78, "78\n", [], 1, AGAIN),
    # Where srun has ended the others.
    "refused, by its event": (f"{STEP} {REFUSED} raise SystemExit(143)", {}, None, 78, "78\n", [], 1, AGAIN),
    # It is not over: nothing says how it has ended.
    "the time limit is near": (SAVES, {}, (signal.SIGTERM, "RUNNING"), 0, "", [STOPPED, *REQUEUED], 1, ""),
    "it could not save": (
        SAVES.replace("77", f"exec({UNSAVED!r}) or 74"),
        {},
        (signal.SIGTERM, "RUNNING"),
        0,
        "",
        [STOPPED, *REQUEUED],
        1,
        "tfdist: stopped, and could not save: it will go on from its last backup",
    ),
    "preempted, by its exit code": ("raise SystemExit(77)", {}, None, 0, "", REQUEUED, 1, ""),
    "preempted, by its event": (f"{PREEMPTED} raise SystemExit(143)", {}, None, 0, "", REQUEUED, 1, ""),
    "cancelled by its user": (SAVES, {}, (signal.SIGUSR1, "RUNNING"), 77, "77\n", [STOPPED, "scancel 7"], 1, ""),
    "cancelled by scancel": (SAVES, {}, (signal.SIGTERM, "CANCELLED"), 77, "77\n", [STOPPED, REQUEUED[0]], 1, ""),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_becomes_of_a_run(batch, name: str) -> None:
    program, options, interruption, code, file, calls, runs, says = RUNS[name]
    # An earlier run was preempted.
    job = batch(program, **{"max_restarts": 3, "events": '{"time": 1, "event": "preempted"}\n', **options})
    if interruption is not None:
        job.wait_until_ready()
        (job.folder / "state").write_text(interruption[1])
        job.process.send_signal(interruption[0])
    found = (job.end(), job.text("exit-code"), job.text("calls").splitlines(), job.text("runs"))
    assert found == (code, file, calls, "x" * runs)
    output = job.text("output.log")
    assert says in output and ("not restarted" in output) == ("failed before" in says or says == AGAIN)


def test_a_program_that_does_not_stop_has_the_grace(batch) -> None:
    job = batch(f"{READY}signal.SIG_IGN){WAITS}", grace=2)
    job.wait_until_ready()
    began = time.monotonic()
    job.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: "scancel 7" in job.text("calls").splitlines(), 120, "the end of the grace")
    assert time.monotonic() - began > 1


# --- Slurm's answers ------------------------------------------------------------------------------------------------


ANSWERED = {"scontrol": from_scontrol, "sacct": from_sacct}
ANSWERS = [line.split("\t") for line in Path(__file__).with_name("slurm_answers.tsv").read_text().splitlines()]


@pytest.mark.parametrize(("command", "answer", "expected"), ANSWERS)
def test_what_is_made_of_slurms_answers(command: str, answer: str, expected: str) -> None:
    """The file has answers of Slurm, a line each, with what `tfdist status` says then; "..." stands for more."""
    found = str(ANSWERED[command](answer.replace("; ", "\n")))
    begin, _, end = expected.partition("...")
    assert found == expected if "..." not in expected else found.startswith(begin) and found.endswith(end)


def test_a_job_that_runs_says_since_when() -> None:
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - 300))
    assert str(from_scontrol(f"JobState=RUNNING Reason=None StartTime={since}\n")) == "running for 5 min"


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


FORGOTTEN = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"


def recorded(folder: Path) -> list[str]:
    """The jobs that are known, if nothing else is left."""
    found = [record.id for record in Records(folder / "jobs").all()[0]]
    assert len([*(folder / "jobs").iterdir()]) == len(found)
    return found


def test_a_job_has_its_record_before_slurm_has_it_and_knows_nothing_of_an_outer_run(
    slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch gives it the environment that it has itself: with TF_CONFIG, its tasks would look for that cluster."""
    for name, value in {**OUTER, "COLOUR": "red"}.items():
        monkeypatch.setenv(name, value)
    engine = slurm(sbatch=f"cat {tmp_path}/jobs/*/job.json > {tmp_path}/before; env > {tmp_path}/env; echo '17;blue'")
    record = engine.submit(JOB)
    assert (record.id, record.details["job"], record.details["cluster"]) == ("slurm-1", "17", "blue")
    before = json.loads((tmp_path / "before").read_text())
    assert (before["id"], before["details"]["job"]) == (record.id, None)
    assert recorded(tmp_path) == ["slurm-1"]
    variables = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert variables["COLOUR"] == "red" and not variables.keys() & OUTER.keys()


def test_a_job_knows_nothing_of_the_job_in_whose_shell_it_was_submitted(
    slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun --pty bash` sets SLURM_CPU_BIND, say, by which srun would bind the tasks to cores that they do not have."""
    of_job = {"SLURM_JOB_ID": "9", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_MEM_PER_NODE": "4096"}
    for name, value in {**of_job, "SLURM_CONF": "/etc/slurm/slurm.conf"}.items():
        monkeypatch.setenv(name, value)
    slurm(sbatch=f"env > {tmp_path}/env; echo 17").submit(JOB)
    variables = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert {name for name in variables if name.startswith("SLURM_")} == {"SLURM_CONF"}
    monkeypatch.delenv("SLURM_JOB_ID")  # a user's own choice
    slurm(sbatch=f"env > {tmp_path}/env; echo 18").submit(JOB)
    assert "SLURM_CPU_BIND" in (tmp_path / "env").read_text()


def test_what_is_asked_for_counts_more_than_variables_of_the_site(slurm, tmp_path: Path) -> None:
    """SBATCH_TIMELIMIT and SBATCH_SIGNAL count more than the lines of a script, and less than arguments."""
    engine = slurm(sbatch=f"printf '%s\\n' \"$@\" > {tmp_path}/words; echo 17")
    record = engine.submit(Request("slurm", PROGRAM, time_limit=7200, grace=90, name="mine"))
    _, *options, path = (tmp_path / "words").read_text().splitlines()
    assert {"--time=120:00", "--signal=B:TERM@90", "--requeue", f"--chdir={Path.cwd()}"} < {*options}
    assert options == [word for line in directives(Path(path).read_text()) for word in shlex.split(line)]
    assert Path(path).parent == Path(record.folder)


SILENT = "exec sleep 600"


@pytest.mark.parametrize(
    ("sbatch", "said", "is_kept"),
    [
        (
            "echo sbatch: error: no such partition >&2; exit 1",
            "from sbatch .*: sbatch: error: no such partition",
            False,
        ),
        (SILENT, "no answer from sbatch .*the job runs is not known: `tfdist status slurm-1` shows it", True),
        ("echo Socket timed out on send/recv >&2; exit 1", "timed out .*the job runs is not known", True),
        (None, "no command sbatch on the PATH", False),
    ],
)
def test_a_job_that_slurm_does_not_take(
    slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str | None, said: str, is_kept: bool
) -> None:
    monkeypatch.setattr("tfdist.jobs.engine.SECONDS", 0.5 if sbatch == SILENT else 60.0)
    engine = slurm(**({"sbatch": sbatch} if sbatch else {}))
    if sbatch is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmitError, match=f"(?s){said}"):
        engine.submit(JOB)
    assert recorded(tmp_path) == ["slurm-1"] * is_kept


def test_a_job_whose_number_is_not_known_is_found_once_it_starts(slurm, tmp_path: Path, monkeypatch) -> None:
    """As if the submission was killed then: its script writes it down."""

    def no_space(*arguments, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = slurm(sbatch="echo 17")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(engine.records, "update", no_space)
        engine.submit(JOB)
    ((record,), _) = engine.records.all()
    look = f"`squeue --user={getpass.getuser()} --name=mine` shows one that waits"
    assert engine.status(record).state == "lost" and engine.status(record).detail.endswith(look)
    Path(record.folder, "job-id").write_text("")  # it is about to
    assert engine.status(record).state == "lost"
    Path(record.folder, "job-id").write_text("17\n")
    # That it is asked to end is noted before: who looks in between notes no failure.
    is_noted = f"grep -q '\"cancelled\": true' {record.folder}/job.json"
    slurm(scontrol="echo JobState=PENDING Reason=Priority", scancel="exit 1")
    with pytest.raises(SubmitError, match="from scancel 17"):
        engine.cancel(record)
    assert not engine.records.load(record.id).details["cancelled"]
    slurm(scontrol="echo JobState=PENDING Reason=Priority", scancel=is_noted)
    assert engine.status(record).state == "queued"
    assert engine.cancel(record) == "slurm-1: cancelled"
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "scancel 17"
    # Without a record, Slurm is not asked at all.
    monkeypatch.setattr("tfdist.jobs.record.write_atomically", no_space)
    with pytest.raises(OSError, match="No space left"):
        slurm(sbatch=f"touch {tmp_path}/asked").submit(JOB)
    assert not (tmp_path / "asked").exists() and recorded(tmp_path) == ["slurm-1"]


def test_what_became_of_a_job_without_accounting(slurm) -> None:
    """It is what its script has written; a script that was killed with the job has written nothing."""
    engine = slurm(sbatch="echo 17", scontrol=FORGOTTEN, sacct="exit 1")
    record = engine.submit(JOB)
    assert str(engine.status(record)) == "lost: Slurm does not know job 17, and its script has not ended"
    Path(record.folder, "exit-code").write_text("3\n")
    assert str(engine.status(record)) == "failed: exit code 3"


def test_what_slurm_says_moves_no_cursor(slurm, tmp_path: Path) -> None:
    escapes = r"\033]0;title\007\377"
    engine = slurm(sbatch="echo 17", scontrol=f"printf 'JobState=PENDING Reason=Held{escapes}\\n'")
    record = engine.submit(JOB)
    assert str(engine.status(record)) == r"queued: Held\x1b]0;title\x07\udcff"
    slurm(scontrol=f"printf 'first{escapes}\\nsecond\\n' >&2; exit 1")
    with pytest.raises(SubmitError, match=r"Received: from scontrol: first.*\nsecond. Expected") as failed:
        engine.status(record)
    slurm(scontrol=FORGOTTEN, sacct=f"printf 'NODE{escapes}|0:0|Unknown|Unknown\\n'")
    for text in (*str(failed.value).split("\n"), str(engine.status(record))):
        assert text.isprintable()
