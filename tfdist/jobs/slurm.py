"""Slurm: sbatch, scontrol, sacct and scancel, what they say about a job, and its batch script.

References:
    https://slurm.schedmd.com/job_reason_codes.html
"""

from __future__ import annotations

import getpass
import itertools
import os
import re
import secrets
import shlex
import signal
import subprocess
import unicodedata
from datetime import datetime
from pathlib import Path

from tfdist.atomic_files import write_atomically
from tfdist.cluster.foreign_text import cleaned
from tfdist.jobs.engine import Engine, answer
from tfdist.jobs.record import Record
from tfdist.jobs.request import Request, SubmitError, UnansweredError
from tfdist.jobs.status import CANCELLED, FAILED, LOST, QUEUED, RUNNING, SUCCEEDED, Status, exit_in_words
from tfdist.supervision.events import FILE_NAME
from tfdist.supervision.events import VARIABLE as EVENT_LOG
from tfdist.supervision.exit_codes import PREEMPTED, REFUSED

_STATES = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"), QUEUED),
    **dict.fromkeys(("CONFIGURING", "RUNNING", "COMPLETING", "RESIZING"), RUNNING),
    **dict.fromkeys(("SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"), RUNNING),
    "COMPLETED": SUCCEEDED,
    "CANCELLED": CANCELLED,
    "REVOKED": CANCELLED,
}
_QUIET = ("None", "RUNNING", "PENDING", "COMPLETED", "CANCELLED", "")
_NEVER = "it will not start as it is: cancel it, and submit it with other options"
_REASONS = {
    "BadConstraints": f"no node has what it asks for; {_NEVER}",
    "Dependency": "another job has to end first",
    "DependencyNeverSatisfied": f"the job that it waits for has failed; {_NEVER}",
    "JobArrayTaskLimit": "as many tasks of its array run as may",
    "JobHeldAdmin": "an administrator holds it back",
    "JobHeldUser": "held back by its user: `scontrol release` lets it go",
    "Licenses": "waits for a licence",
    "NodeDown": "a node that it needs is down",
    "PartitionConfig": (
        "it asks for more cores, memory, GPUs or nodes than its partition has or allows (`scontrol show partition`, "
        f"`sinfo -N -l`); {_NEVER}"
    ),
    "PartitionDown": "its partition starts no jobs at present",
    "PartitionInactive": "its partition starts no jobs at present",
    "PartitionNodeLimit": f"it asks for more nodes than a job may have in its partition; {_NEVER}",
    "PartitionTimeLimit": f"it asks for more time than a job may have in its partition (--time); {_NEVER}",
    "Priority": "jobs that are more urgent, or waited longer, come first",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved: `sinfo -R` shows why",
    "Reservation": "waits for its reservation to begin",
    "Resources": "waits until enough nodes are free",
    "SchedDefer": "waits for Slurm's next look at the queue",
}
_FAMILIES = (
    ("Invalid", f"Slurm does not know it, or does not allow it; {_NEVER}"),
    ("Account", f"the account may not use this partition; {_NEVER}"),
    ("QOS", "a limit of its quality of service is reached: `sacctmgr show qos`; it waits for other jobs of it to end"),
    ("Max", "a limit of its account or user is reached: `sacctmgr show assoc`; it waits for other jobs of it to end"),
    ("Assoc", "a limit of its account or user is reached: `sacctmgr show assoc`; it waits for other jobs of it to end"),
)
# The script writes its exit code to this file: Slurm without accounting forgets it after some minutes.
EXIT_CODE = "exit-code"
# And the number that Slurm has given it, in case that nobody was there any more to hear it from sbatch.
JOB_ID = "job-id"
# `tfdist cancel` sends this signal to the script. After SIGTERM, which Slurm itself sends, the job is run again.
CANCEL_SIGNAL = "USR1"

_BODY = r"""
echo "$SLURM_JOB_ID" > "$folder/{job_id}"
job=$SLURM_JOB_ID step="" signalled="" stopping="" cancelled="" in_vain="" restarts=0

# The signal is for the tasks: srun itself would kill them at once. While srun still starts them it would be lost.
stop_step() {{
    while kill -0 "$step" 2>/dev/null; do
        case $((SECONDS - begun >= 3)).$(squeue --noheader --steps --jobs="$job" --format=%i) in
            1.*"$job".[0-9]*) scancel --signal=TERM "$job"; return ;;
        esac
        sleep 1
    done
}}

# SIGTERM comes before the time limit and at a preemption, {cancel} from `tfdist cancel`: the training saves its state.
stop() {{
    signalled=1 stopping=1
    if [ -n "$step" ]; then stop_step; fi
}}
trap stop TERM
trap 'cancelled=$SECONDS; stop' {cancel}

finish() {{
    echo "$1" > "$folder/{exit_code}"
    exit "$1"
}}

# Asked to stop: the job waits for its next run, unless a user has cancelled it, here or by scancel.
leave() {{
    if [ -n "$cancelled" ]; then
        scancel "$job"
        finish "$1"
    fi
    case $(scontrol --oneliner show job "$job") in
        *" JobState=RUNNING "*)
            if [ "$(events unsaved)" != "$unsaved" ]; then
                echo "tfdist: stopped, and could not save: it will go on from its last backup"
            fi
            echo "tfdist: stopped with exit code $1; the job goes back into the queue"
            scontrol requeue "$job" && exit 0
            ;;
    esac
    finish "$1"
}}

# When some tasks end with {preempted}, srun ends the others, and says {terminated}; so it does after a failure.
# What is started again is decided as `tfdist run` does: by what the training has written about itself.
events() {{
    cat "$TFDIST_EVENT_LOG" 2>/dev/null | grep --count "\"event\": \"$1\""
}}

give_up() {{
    echo "tfdist: not restarted: $2"
    finish "$1"
}}

while true; do
    begun=$SECONDS preempted=$(events preempted) refused=$(events refused) unsaved=$(events unsaved)
    trained=$(events progress)
    {srun} &
    step=$!
    if [ -n "$stopping" ]; then stop_step; fi
    while true; do
        signalled=""
        wait "$step"
        code=$?
        # A signal has ended the waiting, not the step.
        if [ -z "$signalled" ]; then break; fi
        while [ -n "$cancelled" ] && kill -0 "$step" 2>/dev/null; do
            if [ $((SECONDS - cancelled)) -ge {grace} ]; then scancel "$job"; fi
            sleep 1
        done
    done
    step=""
    if [ "$code" -eq 0 ]; then finish 0; fi
    if [ "$code" -eq {refused} ] || [ "$(events refused)" != "$refused" ]; then
        give_up {refused} "exit code {refused} says that it would fail again"
    fi
    if [ -n "$stopping" ] || [ "$code" -eq {preempted} ] || [ "$(events preempted)" != "$preempted" ]; then
        leave "$code"
    fi
    if [ "$restarts" -ge {max_restarts} ]; then finish "$code"; fi
    if [ "$(events progress)" -eq 0 ]; then give_up "$code" "it failed before its first training step"; fi
    if [ "$(events progress)" -ne "$trained" ]; then
        in_vain=""
    elif [ -n "$in_vain" ]; then
        give_up "$code" "it failed before its first step for the second time in a row"
    else
        in_vain=1
    fi
    restarts=$((restarts + 1))
    echo "tfdist: the step ended with exit code $code; restart $restarts of {max_restarts}"
    sleep "$restarts"
    if [ -n "$stopping" ]; then leave "$code"; fi
done
"""


class SlurmEngine(Engine):
    """Hands jobs to sbatch."""

    # Each look asks Slurm's controller, which all users share.
    looks_every = 3.0

    def dry_run(self, request: Request) -> str:
        """The batch script, with a word in place of the secret."""
        return batch_script(request, self.records.folder / "FOLDER", os.getcwd(), "SECRET")

    def submit(self, request: Request) -> Record:
        """Writes the script and hands it to sbatch. The record gets Slurm's number of the job afterwards."""
        with self._recorded(request, job=None, cluster=None, grace=request.grace) as record:
            path = Path(record.folder, "job.sh")
            script = batch_script(request, path.parent, os.getcwd(), secrets.token_hex(32))
            write_atomically(path, script, mode=0o600)
            said = run("sbatch", "--parsable", *arguments_of(script), str(path))
            job, _, cluster = said.strip().partition(";")
        return self.records.update(record.id, job=job, cluster=cluster)

    def _ask(self, record: Record) -> Status:
        """The state by scontrol; of a job that ended long ago by sacct, or the file that the script has written."""
        job = record.details["job"]
        if job is None:
            # sbatch has not said it, or nobody was there any more to hear it.
            number = Path(record.folder, JOB_ID)
            job = number.read_text().strip() if number.exists() else ""
            if not job:
                look = f"squeue --user={getpass.getuser()} --name={record.name}"
                return Status(
                    LOST, f"sbatch has not answered, and no such job has started: `{look}` shows one that waits"
                )
            record = self.records.update(record.id, job=job, cluster="")
        # It knows a job for some minutes after its end, too.
        now = attempt("scontrol", *_cluster(record), "--oneliner", "show", "job", job)
        if now.returncode == 0:
            return from_scontrol(now.stdout)
        if "nvalid job id" not in now.stderr:
            raise SubmitError(f"Received: from scontrol: {now.stderr.strip()}. Expected: that `scontrol ping` works")
        fields = ("--noheader", "--parsable2", "--allocations", "--format=State,ExitCode,Start,End", f"--jobs={job}")
        past = attempt("sacct", *_cluster(record), *fields)
        return (from_sacct(past.stdout) if past.returncode == 0 else None) or _from_script(record)

    def _end(self, record: Record, now: Status, again: bool) -> str:
        """Ends a waiting job; tells the script of a running job to stop it."""
        job = [*_cluster(record), record.details["job"]]
        if now.state != QUEUED and not again:
            run("scancel", "--batch", f"--signal={CANCEL_SIGNAL}", *job)
            return f"gets SIGTERM, and has {record.details['grace']} s to save its state"
        run("scancel", *job)
        return "cancelled"


def _cluster(record: Record) -> list[str]:
    return [f"--clusters={record.details['cluster']}"] if record.details["cluster"] else []


def _from_script(record: Record) -> Status:
    path = Path(record.folder, EXIT_CODE)
    try:
        code, ended = int(path.read_text()), path.stat().st_mtime
    except (OSError, ValueError):
        return Status(LOST, f"Slurm does not know job {record.details['job']}, and its script has not ended")
    return Status(SUCCEEDED, ended=ended) if code == 0 else Status(FAILED, exit_in_words(code), ended=ended)


def run(*words: str) -> str:
    """Runs a command, and returns its output.

    Raises:
        SubmitError: the command is not installed, fails, or does not answer.
    """
    done = attempt(*words)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        # This is sbatch's own timeout: the controller may have taken the job.
        kind = UnansweredError if "timed out" in said else SubmitError
        raise kind(f"Received: from {' '.join(words[:2])}: {said}. Expected: that Slurm accepts it")
    return done.stdout


def attempt(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that may fail. Names and texts of others that it prints come without control characters."""
    done = answer(list(words))
    texts = ("\n".join(map(cleaned, text.split("\n"))) for text in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(words, done.returncode, *texts)


def from_scontrol(text: str) -> Status:
    """Reads `scontrol --oneliner show job`.

    Example:
        >>> str(from_scontrol("JobId=7 JobState=PENDING Reason=Resources ExitCode=0:0 StartTime=Unknown"))
        'queued: Resources (waits until enough nodes are free)'
    """
    fields = {"Reason": "", "StartTime": "", "EndTime": "", "ExitCode": "", **dict(re.findall(r"(\w+)=(\S*)", text))}
    return _status(fields["JobState"], fields["ExitCode"], fields["StartTime"], fields["EndTime"], fields["Reason"])


def from_sacct(text: str) -> Status | None:
    """Reads `sacct --parsable2 --format=State,ExitCode,Start,End`; None if the job is not there.

    Example:
        >>> from_sacct("FAILED|3:0|2026-11-22T10:00:00|2026-11-22T10:01:00").detail
        'exit code 3'
    """
    if not text.strip():
        return None
    # A requeued job has a line for each run.
    state, code, start, end = text.strip().splitlines()[-1].split("|")
    return _status(state.partition(" ")[0], code, start, end)


def _status(state: str, code: str, start: str, end: str, reason: str = "") -> Status:
    """The state of a job that Slurm calls so; what it says of the reason counts until the job is over."""
    own = _STATES.get(state, FAILED)
    if own in (QUEUED, RUNNING):
        end, detail = "", reason_in_words(reason, start) if own == QUEUED else reason
    else:
        detail = "" if own in (SUCCEEDED, CANCELLED) else _exit(code)
    words = [] if state in (*_QUIET, "FAILED") else [state.lower().replace("_", " ")]
    words += [] if detail in _QUIET else [detail]
    return Status(own, ", ".join(words), None if own == QUEUED else _time(start), _time(end))


def _exit(text: str) -> str:
    """Slurm's exit code and signal, in words."""
    code, _, signal = text.partition(":")
    if signal not in ("", "0"):
        return f"signal {signal}"
    return exit_in_words(int(code)) if code not in ("", "0") else ""


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def reason_in_words(reason: str, start: str) -> str:
    """Why a job waits, with an explanation if the reason is a known one.

    Args:
        reason: as squeue prints it.
        start: when the job may or will start, as squeue prints it.

    Example:
        >>> reason_in_words("Resources", "N/A")
        'Resources (waits until enough nodes are free)'
        >>> reason_in_words("BeginTime", "2026-11-22T12:33:25")
        'BeginTime (not before 2026-11-22 12:33:25)'
    """
    name = re.split(r"[^A-Za-z]", reason, maxsplit=1)[0]
    words = _REASONS.get(name) or next((text for family, text in _FAMILIES if name.startswith(family)), "")
    if name == "BeginTime":
        words = f"not before {start.replace('T', ' ')}" if start[:1].isdigit() else "not before its time of begin"
    return f"{reason} ({words})" if words else reason


def batch_script(request: Request, folder: Path, cwd: str, token: str) -> str:
    """The script for sbatch.

    Args:
        request: what was asked for.
        folder: of the job; all nodes have to see it.
        cwd: the current folder, in which the program runs.
        token: the secret of this job's processes.

    Raises:
        SubmitError: there is no such program; or a folder's name has a line break, which would end a line for Slurm.

    Example:
        >>> from tfdist.launcher.arguments import Target
        >>> request = Request("slurm", Target("module", ("package.train",)))
        >>> text = batch_script(request, Path("/jobs/1"), "/home", "secret")
        >>> text.splitlines()[:3]
        ['#!/bin/bash', '#SBATCH --job-name=train', '#SBATCH --ntasks=2']
    """
    for what, path in (("the current folder", cwd), ("the folder of the job", str(folder))):
        _check_line(what, path)
    each = _asked_for({"cpus-per-task": request.cpus_per_worker, "gpus-per-task": request.gpus_per_worker})
    # In minutes and seconds.
    limit = "{}:{:02}".format(*divmod(request.time_limit, 60)) if request.time_limit else None
    # Slurm takes the smallest number of the range that will do.
    few = ("--nodes=1-" + str(request.tasks), "--use-min-nodes") if request.pack else ()
    options = [
        *(
            f"--job-name={request.name}",
            f"--ntasks={request.tasks}",
            *each,
            *_asked_for({"time": limit}),
            *few,
        ),
        *("--requeue", "--open-mode=append", f"--signal=B:TERM@{request.grace}", f"--chdir={shlex.quote(cwd)}"),
        # Slurm reads these lines as a shell does, and expands percent signs in file names.
        f"--output={shlex.quote(str(folder / 'output.log').replace('%', '%%'))}",
    ]
    own = {"TFDIST_TOKEN": token, EVENT_LOG: str(folder / "logs" / FILE_NAME)}
    variables = {**request.env, **own, **request.of_all}
    # srun does not inherit the number of cores from sbatch.
    step = ["srun", "--kill-on-bad-exit=1", "--label", f"--ntasks={request.tasks}", *each, *request.command()]
    body = _BODY.format(
        cancel=CANCEL_SIGNAL,
        exit_code=EXIT_CODE,
        job_id=JOB_ID,
        srun=shlex.join(step),
        grace=request.grace,
        preempted=PREEMPTED,
        refused=REFUSED,
        terminated=128 + signal.SIGTERM,
        max_restarts=request.max_restarts,
    )
    lines = [
        *("#!/bin/bash", *(f"#SBATCH {option}" for option in options), ""),
        # SBATCH_EXPORT=NONE, as some sites set it, would keep what follows from the processes.
        "export SLURM_EXPORT_ENV=ALL",
        *(f"export {name}=${{{name}:-{value}}}" for name, value in request.runtime_defaults.items()),
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        f"folder={shlex.quote(str(folder))}",
    ]
    return "\n".join(lines) + body


def _asked_for(options: dict[str, object]) -> list[str]:
    """The options that have a value."""
    return [f"--{name}={value}" for name, value in options.items() if value]


def _check_line(what: str, path: str) -> None:
    """Raises SubmitError for a path that cannot stand in a line of options: what follows a line break would be run."""
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in path):
        raise SubmitError(
            f"Received: {path!r} as {what}, which has a line break or another control character. Expected: a path "
            "that fits into one line of a batch script; rename the folder, or submit from another one"
        )


def arguments_of(script: str) -> list[str]:
    """The options in the lines of a script. To sbatch, a variable such as SBATCH_TIMELIMIT counts more than the lines.

    Example:
        >>> arguments_of("#!/bin/bash\\n#SBATCH --time=90:00\\n#SBATCH --chdir='/some where'\\n\\n#SBATCH --no\\n")
        ['--time=90:00', '--chdir=/some where']
    """
    lines = itertools.takewhile(lambda line: line.startswith("#"), script.splitlines())
    return [word for line in lines for word in shlex.split(line)[1:]]
