"""The process in the background that starts the jobs of the queue, one after the other. It ends when all are over.

    python -m tfdist.submit.local.runner JOBS LOCK

It is started by any `tfdist` command that finds jobs and no runner, and belongs to no shell. It holds the lock, a file
descriptor that it inherits, as long as it lives: there is one at most. Each job is a session of its own. A runner that
is killed leaves the jobs alone; the next one finds them by what they have written about themselves (`begin`).
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import tfdist
from tfdist.submit.local.attempt import BY_TIME, after_end, code_from_events
from tfdist.submit.local.begin import BEGUN_ALREADY, Beginning, beginning_of
from tfdist.submit.record import Record, Records
from tfdist.submit.status import FAILED, QUEUED, RUNNING

_TICK = 0.1
# How long it takes at most to notice the end of a job that another runner has started.
_LOOK = 1.0
_LOCK = ".runner.lock"
_LOG = "runner.log"


class Runner:
    """Works off a queue.

    Args:
        records: all jobs.
        lock: descriptor of the locked file; closed when there is nothing left to do.
    """

    def __init__(self, records: Records, lock: int) -> None:
        self._records = records
        self._lock = lock
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        """Returns when no job waits or runs."""
        while True:
            changed = self._stamp()
            if not self._step():
                return
            until = time.monotonic() + _LOOK
            while time.monotonic() < until and self._stamp() == changed and not self._has_ended():
                time.sleep(_TICK)

    def _stamp(self) -> int:
        """Changes when a record does: each is replaced as a whole."""
        return os.stat(self._records.folder).st_mtime_ns

    def _has_ended(self) -> bool:
        return any(child.poll() is not None for child in self._children.values())

    def _step(self) -> bool:
        with self._records.locked():
            for record in active(self._records):
                if record.details["state"] == RUNNING:
                    self._look_after(record)
            jobs = active(self._records)
            taken = {record.details["place"] for record in jobs if record.details["state"] == RUNNING}
            places = parallel_jobs(self._records)
            for record in jobs:
                free = [place for place in range(places) if place not in taken]
                if record.details["state"] == QUEUED and free and len(taken) < places:
                    if record.details.get("due", 0) > time.time():
                        break  # it keeps its turn
                    taken.add(free[0])
                    self._start(record, free[0], places)
            if not jobs:
                # Still nobody can add one: whoever does so next finds no runner, and starts one.
                os.close(self._lock)
            return bool(jobs)

    def _start(self, record: Record, place: int, places: int) -> None:
        record = record.with_details(state=RUNNING, started=time.time(), place=place, places=places, detail="")
        self._records.save(record)
        attempt = record.details["attempt"]
        words = [sys.executable, "-m", "tfdist.submit.local.begin", record.folder, str(attempt), str(place)]
        try:
            with open(record.output, "ab") as output:
                if attempt > 1:
                    output.write(f"--- started again: run {attempt} of {record.id} ---\n".encode())
                    output.flush()
                self._children[record.id] = subprocess.Popen(
                    [*words, str(places)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd="/",
                )
        except OSError as error:
            self._records.save(record.with_details(state=FAILED, detail=f"not started: {error}", ended=time.time()))

    def _look_after(self, record: Record) -> None:
        child = self._children.get(record.id)
        begun = beginning_of(Path(record.folder), record.details["attempt"])
        if child is not None and child.poll() is not None:
            del self._children[record.id]
            # The second of two starts; the first one's process is found by its beginning.
            if child.returncode != BEGUN_ALREADY or begun is None or begun.process.pid == child.pid:
                self._records.save(after_end(record, child.returncode))
        elif child is None and begun is None:
            # A runner was killed after it had said that the job runs, and before it did.
            self._start(record, record.details["place"], record.details["places"])
        elif child is None and begun is not None and not begun.process.is_alive:
            self._records.save(after_end(record, code_from_events(record.event_log, begun.time)))
        elif begun is not None:
            self._stop_in_time(record, begun)

    def _stop_in_time(self, record: Record, begun: Beginning) -> None:
        limit = record.details["time_limit"]
        if record.details.get("stop") is None and limit and time.time() > begun.time + limit:
            record = record.with_details(stop=BY_TIME)
        if record.details.get("stop") is not None and not record.details.get("stopped"):
            # While the grace lasts, the launcher takes a Ctrl-C for impatience, and kills.
            begun.process.signal(signal.SIGINT if record.details.get("hurry") else signal.SIGTERM)
            self._records.save(record.with_details(stopped=True))


def active(records: Records) -> list[Record]:
    """The jobs of the queue that wait or run, in the order in which they are taken."""
    jobs = (record for record in records.all() if record.backend == "local")
    return [record for record in jobs if record.details["state"] in (QUEUED, RUNNING)]


def parallel_jobs(records: Records) -> int:
    """How many may run at once: what was said when the last one was submitted."""
    limits = [record.details["parallel_jobs"] for record in records.all() if record.backend == "local"]
    return limits[-1] if limits else 1


def ensure_runner(records: Records) -> None:
    """Starts a runner if there are jobs to look after, and nobody does.

    Raises:
        OSError: it could not be started.
    """
    if not active(records):
        return
    with open(records.folder / _LOCK, "a") as lock, open(records.folder / _LOG, "a") as log:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        # Away from this folder it has to find the same tfdist, also one that was found by a relative path.
        paths = [str(Path(tfdist.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        subprocess.Popen(
            [sys.executable, "-m", "tfdist.submit.local.runner", str(records.folder), str(lock.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            # The lock belongs to the open file, which both now have: there is no moment without it.
            pass_fds=[lock.fileno()],
        )


def main() -> None:
    lock = int(sys.argv[2])
    os.set_inheritable(lock, False)
    Runner(Records(Path(sys.argv[1])), lock).run()


if __name__ == "__main__":
    main()
