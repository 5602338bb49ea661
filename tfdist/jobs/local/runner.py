"""The background process that starts the jobs of this host's queue, one after the other. It ends when all are over.

    python -m tfdist.jobs.local.runner JOBS LOCK

Any `tfdist` command that finds jobs and no runner starts it, in a session of its own. It holds the lock, a file
descriptor that it inherits, as long as it lives: there is at most one runner. Each job runs in a session of its own, so
it survives when its runner is killed; the next runner finds it by what it has written down (see `attempt`).

Several hosts may share the folder of the records, in a home folder say. Each has a queue and a runner of its own: only
there can be seen which processes live, and a job needs the Python and the cores of the host where it was submitted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import tfdist
from tfdist.jobs.local.attempt import (
    BEGUN_ALREADY,
    BY_TIME,
    Beginning,
    after_end,
    beginning_of,
    code_from_events,
    is_due,
)
from tfdist.jobs.record import Record, Records
from tfdist.jobs.request import SubmitError
from tfdist.jobs.status import FAILED, QUEUED, RUNNING
from tfdist.launcher.guardian import outside_of_runs
from tfdist.launcher.operating_system import spawn
from tfdist.supervision.identity import host_in_file_name, this_host

# In the place of a host's name.
UNKNOWN_HOST = "an unknown host"
_TICK = 0.1
# At most so many seconds pass until it is noticed that a job of an earlier runner has ended.
_LOOK = 1.0


class Runner:
    """Runs the jobs of the queue.

    Args:
        records: all jobs.
        lock: descriptor of the locked file; closed when there is nothing left to do.
    """

    def __init__(self, records: Records, lock: int) -> None:
        self._records = records
        self._lock = lock
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._complaints: dict[str, str] = {}

    def run(self) -> None:
        """Returns when no job is waiting or running."""
        while True:
            changed = self._stamp()
            if not self._step():
                return
            until = time.monotonic() + _LOOK
            time.sleep(_TICK)  # in any case: what fails may change the folder as well
            while time.monotonic() < until and self._stamp() == changed and not self._has_ended():
                time.sleep(_TICK)

    def _stamp(self) -> int:
        """A number that changes with every record: to change one, its file is replaced in the folder."""
        return os.stat(self._records.folder).st_mtime_ns

    def _has_ended(self) -> bool:
        return any(child.poll() is not None for child in self._children.values())

    def _step(self) -> bool:
        with self._records.locked():
            for record in active(self._records):
                if record.details["state"] == RUNNING:
                    with self._alone(record):
                        self._look_after(record)
            jobs = active(self._records)
            taken = {record.details["place"] for record in jobs if record.details["state"] == RUNNING}
            places = parallel_jobs(self._records)
            for record in jobs:
                free = [place for place in range(places) if place not in taken]
                if record.details["state"] == QUEUED and free and len(taken) < places:
                    if not is_due(record):
                        break  # it must wait a moment, but keeps its place in the queue
                    taken.add(free[0])
                    with self._alone(record):
                        self._start(record, free[0], places)
            if not jobs:
                # The records are still locked: whoever adds the next job finds no runner, and starts one.
                os.close(self._lock)
            return bool(jobs)

    @contextlib.contextmanager
    def _alone(self, record: Record) -> Iterator[None]:
        """An error with one job, such as a file that cannot be read now, must not end those of the others."""
        try:
            yield
            self._complaints.pop(record.id, None)
        except (OSError, SubmitError) as error:
            if self._complaints.get(record.id) != str(error):
                with contextlib.suppress(OSError):  # the disk may be full
                    print(f"{record.id}: {error}; tried again", flush=True)
            self._complaints[record.id] = str(error)

    def _start(self, record: Record, place: int, places: int) -> None:
        record = record.with_details(state=RUNNING, started=time.time(), place=place, places=places, detail="")
        self._records.save(record)
        attempt = record.details["attempt"]
        words = [sys.executable, "-m", "tfdist.jobs.local.attempt", record.folder, str(attempt), str(place)]
        try:
            with open(record.output, "ab") as output:
                if attempt > 1:
                    output.write(f"--- started again: run {attempt} of {record.id} ---\n".encode())
                    output.flush()
                self._children[record.id] = spawn([*words, str(places)], output.fileno(), folder="/")
        except OSError as error:
            self._records.save(record.with_details(state=FAILED, detail=f"not started: {error}", ended=time.time()))

    def _look_after(self, record: Record) -> None:
        child = self._children.get(record.id)
        begun = beginning_of(Path(record.folder), record.details["attempt"])
        if child is not None and child.poll() is not None:
            # If our process was the second one of this attempt, the first one goes on.
            if child.returncode != BEGUN_ALREADY or begun is None or begun.process.pid == child.pid:
                self._save_end(record, child.returncode, begun)
            del self._children[record.id]
        elif child is None and begun is None:
            # An earlier runner was killed after it had recorded the start, and before it started the process.
            self._start(record, record.details["place"], record.details["places"])
        elif child is None and begun is not None and not begun.process.is_alive:
            self._save_end(record, code_from_events(record.event_log, begun.position), begun)
        elif begun is not None:
            self._stop_in_time(record, begun)

    def _save_end(self, record: Record, code: int | None, begun: Beginning | None) -> None:
        self._records.save(after_end(record, code, begun.process.age if begun else 0.0))

    def _stop_in_time(self, record: Record, begun: Beginning) -> None:
        limit = record.details["time_limit"]
        if record.details.get("stop") is None and limit and begun.process.age > limit:
            record = record.with_details(stop=BY_TIME)
        if record.details.get("stop") is not None and not record.details.get("stopped"):
            # During its grace period, the launcher kills its processes when it gets SIGINT.
            begun.process.signal(signal.SIGINT if record.details.get("hurry") else signal.SIGTERM)
            self._records.save(record.with_details(stopped=True))


def host_of(record: Record) -> str:
    """The host to whose queue a job belongs; UNKNOWN_HOST for a record of an older version, which does not say it."""
    return record.details.get("host", UNKNOWN_HOST)


def _adopt(records: Records) -> None:
    """Takes jobs that an older version has recorded without their host into this host's queue, if they run here.

    Of all others nobody knows whether another host that shares the folder runs them: each would start them.
    """
    for record in queue_of(records, UNKNOWN_HOST):
        if record.details["state"] == RUNNING:
            with contextlib.suppress(OSError, SubmitError):  # it may be removed meanwhile
                begun = beginning_of(Path(record.folder), record.details["attempt"])
                if begun is not None and begun.process.is_alive:
                    records.update(record.id, lambda now: now.with_details(host=this_host()))


def queue_of(records: Records, host: str) -> list[Record]:
    """All jobs of a host's queue, in the order in which they were submitted; the clock may have been set in between."""
    jobs = [record for record in records.all() if record.scheduler == "local" and host_of(record) == host]
    return sorted(jobs, key=lambda record: int(number) if (number := record.id.rpartition("-")[2]).isdecimal() else 0)


def active(records: Records, host: str | None = None) -> list[Record]:
    """The jobs that are waiting or running, in the order in which they are started.

    Args:
        records: all jobs.
        host: of whose queue; None for this one.
    """
    return [record for record in queue_of(records, host or this_host()) if record.details["state"] in (QUEUED, RUNNING)]


def parallel_jobs(records: Records) -> int:
    """How many jobs may run at once: the setting with which the last one was submitted."""
    limits = [record.details["parallel_jobs"] for record in queue_of(records, this_host())]
    return limits[-1] if limits else 1


def ensure_runner(records: Records) -> None:
    """Starts a runner if there are jobs and no runner.

    Raises:
        OSError: the runner could not be started.
    """
    _adopt(records)
    if not active(records):
        return
    name = f"runner-{host_in_file_name(this_host())}"
    with open(records.folder / f".{name}.lock", "a") as lock, open(records.folder / f"{name}.log", "a") as log:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        # The runner works in another folder; it has to find the same tfdist, even if that was on a relative path.
        paths = [str(Path(tfdist.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        spawn(
            [sys.executable, "-m", "tfdist.jobs.local.runner", str(records.folder), str(lock.fileno())],
            log.fileno(),
            {**outside_of_runs(), "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            folder="/",
            # The lock belongs to the open file, which both processes have: it is never released in between.
            pass_fds=[lock.fileno()],
        )


def main() -> None:
    """Runs the queue: arguments are the folder of the records, and the descriptor of the lock."""
    lock = int(sys.argv[2])
    # The jobs must not inherit the lock: it would outlive the runner.
    os.set_inheritable(lock, False)
    Runner(Records(Path(sys.argv[1])), lock).run()


if __name__ == "__main__":
    main()
