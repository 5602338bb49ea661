"""The batch script of a job. Pure."""

from __future__ import annotations

import shlex
import signal
import unicodedata
from pathlib import Path

from tfdist.jobs.request import Request, SubmitError
from tfdist.supervision.events import FILE_NAME
from tfdist.supervision.events import VARIABLE as EVENT_LOG
from tfdist.supervision.exit_codes import PREEMPTED, REFUSED

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
    limit = for_slurm(request.time_limit) if request.time_limit else None
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
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), ""]
    # SBATCH_EXPORT=NONE, as some sites set it, would keep what follows from the processes.
    lines.append("export SLURM_EXPORT_ENV=ALL")
    lines += [f"export {name}=${{{name}:-{value}}}" for name, value in request.runtime_defaults.items()]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join([*lines, f"folder={shlex.quote(str(folder))}"]) + body


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


def for_slurm(seconds: int) -> str:
    """A time as days-hours:minutes:seconds.

    Example:
        >>> for_slurm(129600), for_slurm(90)
        ('1-12:00:00', '0-00:01:30')
    """
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    day, hour = divmod(hours, 24)
    return f"{day}-{hour:02}:{minute:02}:{second:02}"
