"""Runs a training with a fault, and tells how it recovered."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.checkpointing.recovery import recovery
from benchmarks.checkpointing.step_log import stop_after
from benchmarks.faults import SAVE_EVERY
from benchmarks.faults.jobs import Job, Plain, UnderRun
from benchmarks.faults.rows import PLAIN, RUN, Row
from tests.small_disks import small_disk
from tests.system.hosts import Hosts
from tfdist.launcher.drill.comparison import compare
from tfdist.launcher.drill.faults import TrialError
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import SignalInbox
from tfdist.supervision.exit_codes import REFUSED

_STEPS = 16 * SAVE_EVERY
# Two backups, and half of the steps to the next one.
_STRIKE_AT = 3 * SAVE_EVERY + SAVE_EVERY // 2
_TICK = 0.02
_END = 120.0
NEVER = "not within {:.0f} s"
REFUSAL = f"refused (exit code {REFUSED})"


class Machine:
    """Measures on this machine, in a folder of its own that goes away.

    Args:
        guardian: ends what runs if this process is killed.
        inbox: the signals to this process.
        deadline: seconds that a fault is given.
    """

    def __init__(self, guardian: Guardian, inbox: SignalInbox, deadline: float) -> None:
        self._guardian, self._inbox, self._deadline = guardian, inbox, deadline
        self._references: dict[tuple[str, ...], Path] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Machine:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-faults-")))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def measure(self, row: Row, under: str, times: int) -> dict:
        """The record of a row: seconds until it was detected and until training went on, steps redone, the result.

        Args:
            row: the fault.
            under: who starts the processes.
            times: how often it strikes the training.
        """
        record = {"name": row.name, "under": under, "detected": [], "again": [], "redone": []}
        try:
            with self._job(row, under) as job:
                self._disturb(row, job, record, times)
                self._until(lambda: job.code() is not None, _END, job)
                if job.code():
                    record["result"] = f"exit code {job.code()}"
                    return record
                reference = self._reference(row)
                different = compare(reference, job.folder / "backups", _END, values=row.same_workers)
        except (TrialError, TimeoutError, subprocess.CalledProcessError) as error:
            record["result"] = str(error)
            return record
        same = "identical" if row.same_workers else "complete"
        record["result"] = "other: " + "; ".join(different[:3]) if different else same
        return record

    def _disturb(self, row: Row, job: Job, record: dict, times: int) -> None:
        if not row.at_start:
            job.start()
        strike_at = _STRIKE_AT
        for _ in range(times):
            if not row.at_start:
                self._until(lambda at=strike_at: job.log.last >= at, _END, job)

            def wait(condition: Callable[[], object]) -> None:
                self._until(condition, self._deadline, job)

            struck = row.strike(job, wait)
            found = []

            def again(struck: float = struck, found: list = found) -> bool:
                found.append(recovery(job.log.read(), struck, job.ranks))
                return found[-1] is not None or job.refuses()

            try:
                self._until(again, self._deadline, job)
            finally:
                detected = job.detected(struck)
                record["detected"].append(None if detected is None else round(detected - struck, 2))
            if found[-1] is None:
                raise TrialError(REFUSAL)
            record["again"].append(round(found[-1].seconds, 2))
            record["redone"].append(found[-1].redone)
            strike_at = job.log.last // SAVE_EVERY * SAVE_EVERY + 2 * SAVE_EVERY + SAVE_EVERY // 2

    @contextmanager
    def _job(self, row: Row, under: str) -> Iterator[Job]:
        folder = Path(tempfile.mkdtemp(prefix=f"{row.name}-", dir=self._folder))
        stop_after(folder, _STEPS)
        with ExitStack() as stack:
            if row.name == "disk-full":
                stack.enter_context(small_disk(folder / "backups", "16m"))
            if under == RUN:
                job = UnderRun(folder, self._guardian, self._inbox, row.options, row.ranks)
            elif row.name in ("cut", "cut-start"):
                hosts = stack.enter_context(Hosts(folder))
                two = [hosts["n9"], hosts["n10"]]
                addresses = [f"{host.address}:{5000 + rank}" for rank, host in enumerate(two)]
                job = Plain(folder, self._guardian, addresses, [host.command() for host in two])
                job.hosts = hosts
            else:
                assert under == PLAIN
                job = Plain(folder, self._guardian)
            try:
                yield job
            finally:
                job.close()

    def _reference(self, row: Row) -> Path:
        """The backups of a training that nobody disturbed."""
        if row.options not in self._references:
            folder = self._folder / f"reference-{len(self._references)}"
            folder.mkdir()
            stop_after(folder, _STEPS)
            job = UnderRun(folder, self._guardian, self._inbox, row.options, row.ranks)
            job.start()
            try:
                self._until(lambda: job.code() is not None, _END)
            finally:
                job.close()
            self._references[row.options] = folder / "backups"
        return self._references[row.options]

    def _until(self, condition: Callable[[], object], seconds: float, job: Job | None = None) -> None:
        end = time.monotonic() + seconds
        while not condition():
            self._inbox.check()
            if time.monotonic() > end:
                raise TimeoutError(NEVER.format(seconds))
            if job is not None:
                job.tend()
            time.sleep(_TICK)
