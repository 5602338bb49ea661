"""Jobs of this machine: each is a `tfdist run` in the background, which starts at once and outlives the shell."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from tfdist.cluster.variables import AUTO
from tfdist.folders import current_folder
from tfdist.jobs.engine import Engine
from tfdist.jobs.record import Record
from tfdist.jobs.request import Request, SubmitError, outside_of_jobs
from tfdist.jobs.run_state import end_of
from tfdist.jobs.status import FAILED, LOST, RUNNING, SUCCEEDED, Status
from tfdist.supervision.events import VARIABLE as EVENT_LOG
from tfdist.supervision.events import last_events
from tfdist.supervision.identity import Identity, shown_host, this_host


class LocalEngine(Engine):
    """Starts jobs at once. What has become of one is in its event log, which its launcher ends."""

    def dry_run(self, request: Request) -> str:
        """The command that would be run."""
        return shlex.join(_command(request, Path("FOLDER"))) + "\n"

    def submit(self, request: Request) -> Record:
        """Starts a job."""
        working = current_folder()
        with self._recorded(request, host=this_host(), grace=request.grace, process=None) as record:
            command = _command(request, Path(record.folder))
            env = {**outside_of_jobs(os.environ), **request.env, EVENT_LOG: str(record.event_log)}
            with open(record.output, "ab") as output:
                streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
                started = subprocess.Popen(command, env=env, cwd=working, start_new_session=True, **streams)
            process = Identity.of(started.pid)
        return self.records.update(record.id, process=asdict(process) if process else None)

    def _ask(self, record: Record) -> Status:
        process, host = record.details["process"], record.details["host"]
        is_here = host == this_host()
        # Asked before reading: so all that was written before the end is read.
        lives = process is not None and is_here and Identity(**process).is_alive
        last = [event for event in last_events(record.event_log) if event["name"] == "launcher"][-1:]
        how = end_of(last[0]) if last else None
        if how is not None and not lives:
            state, detail = (SUCCEEDED, "") if how == "complete" else (FAILED, how.removeprefix("failed: "))
            return Status(state, detail, record.submitted, last[0]["time"])
        if not is_here:
            return Status(RUNNING, f"on {shown_host(host)}", record.submitted)
        if not lives:
            return Status(LOST, "its process vanished without a word: `tfdist logs` may show why", record.submitted)
        asked = f"asked to stop, has {record.details['grace']} s to save"
        return Status(RUNNING, asked if record.details.get("cancelled") else "", record.submitted)

    def _end(self, record: Record, now: Status, again: bool) -> str:
        """Sends SIGTERM to the launcher; SIGINT then ends the grace period."""
        if (host := record.details["host"]) != this_host():
            raise SubmitError(
                f"Received: {record.id}, a job of {shown_host(host)}. Expected: `tfdist cancel` on that host; if it is "
                f"gone for good, remove {record.folder}"
            )
        Identity(**record.details["process"]).signal(signal.SIGINT if again else signal.SIGTERM)
        return "is killed" if again else f"gets SIGTERM, and has {record.details['grace']} s to save its state"


def _command(request: Request, folder: Path) -> list[str]:
    """The command line of `tfdist run` for a job with this folder."""
    request.command()  # there has to be such a program
    if request.time_limit:
        raise SubmitError("Received: --time and --scheduler local. Expected: `timeout 2h tfdist run ...`")
    options = {
        **{"-n": request.workers, "--ps": request.ps, "--grace": request.grace},
        **({"--transport": request.transport} if request.transport != AUTO else {}),
        **{"--max-restarts": request.max_restarts, "--log-dir": folder / "logs"},
        "--cpus-per-worker": request.cpus_per_worker or "auto",
        "--gpus-per-worker": "auto" if request.gpus_per_worker is None else request.gpus_per_worker,
    }
    words = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-m", "tfdist", "run", *words, *request.target.typed]
