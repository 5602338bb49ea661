"""One run of a launcher during which one process after another fails."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from benchmarks.checkpointing.recovery import (
    RANKS,
    SAVE_EVERY,
    Failure,
    Recovery,
    failures_of_run,
    last_of,
    recovery,
    victim,
)
from benchmarks.checkpointing.step_log import Step, StepReader, stop_after
from benchmarks.children import Children, make_environ
from benchmarks.data_parallel.peers import installed
from benchmarks.data_parallel.processes import Command, TrialError, run_together, say

_TICK = 0.01
# Enough for every rank to learn of it before the training is there.
_STEPS_UNTIL_STOP = 3 * SAVE_EVERY

Found = TypeVar("Found")
HANG_TIMEOUT = 2
# More than there are failures: should one of them cause another, it is not the end.
_RESTARTS = 20
# Training is told to stop long before.
_MOST_STEPS = 100_000


class Schedule(NamedTuple):
    """When processes fail.

    Attributes:
        repeats: how often each kill happens in one run.
        settle: seconds of training before the first failure.
        between: seconds of training before each of the others.
    """

    repeats: int
    settle: float = 10.0
    between: float = 3.0


class Saboteur:
    """Makes processes of a run fail, in a thread of its own, then lets the training come to its end.

    Args:
        folder: of the run's log of steps.
        schedule: when they fail.

    Attributes:
        recoveries: one for each failure that the run has got over.
    """

    def __init__(self, folder: Path, schedule: Schedule) -> None:
        self._folder = folder
        self._schedule = schedule
        self._log = StepReader(folder)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.recoveries: list[tuple[Failure, Recovery]] = []

    def __enter__(self) -> Saboteur:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        began = self._wait(lambda steps: last_of(steps, 0))
        not_before = began.time + self._schedule.settle if began else 0.0
        for failure in failures_of_run(self._schedule.repeats):
            found = self._sabotage(failure, not_before)
            if found is None:
                return
            self.recoveries.append((failure, found))
            not_before = time.monotonic() + self._schedule.between
        stop_after(self._folder, max(step.step for step in self._log.steps) + _STEPS_UNTIL_STOP)

    def _sabotage(self, failure: Failure, not_before: float) -> Recovery | None:
        last = self._wait(lambda steps: victim(steps, failure.rank, not_before))
        if last is None:
            return None
        failed_at = time.monotonic()
        os.kill(last.pid, failure.number)
        return self._wait(lambda steps: recovery(steps, failed_at))

    def _wait(self, find: Callable[[Sequence[Step]], Found | None]) -> Found | None:
        """What `find` finds in the log, as soon as it finds something; None if the run is over before."""
        while not self._over.wait(_TICK):
            if (found := find(self._log.read())) is not None:
                return found
        return None


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each failure of each launcher that is installed; none of a launcher whose run has failed."""
    records = []
    for name, launcher in LAUNCHERS.items():
        if not installed(launcher.package):
            say(f"{launcher.title} is left out: install it by `pip install {launcher.package}`.")
            continue
        say(f"{launcher.title} ...")
        try:
            found = _run(children, launcher, Schedule(1, 2.0) if quick else Schedule(samples))
        except TrialError as error:
            say(f"failed: {error}")
            continue
        for failure, again in found:
            say(f"  {failure.title}: training again after {again.seconds:.2f} s, {again.redone} steps redone")
            records.append({"launcher": name, "failure": failure.title, **again._asdict()})
    return records


def _run(children: Children, launcher: Launcher, schedule: Schedule) -> list[tuple[Failure, Recovery]]:
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as path:
        folder = Path(path)
        command = Command(tuple(launcher.words(folder)), make_environ(os.environ, launcher.env), children.cores)
        with Saboteur(folder, schedule) as saboteur:
            run_together([command], folder, children.deadline)
        expected = len(failures_of_run(schedule.repeats))
        if len(saboteur.recoveries) != expected:
            raise TrialError(
                f"the run ended after it had got over {len(saboteur.recoveries)} of {expected} failures; expected all."
            )
        return saboteur.recoveries


@dataclass(frozen=True)
class Launcher:
    """A launcher and the program that it runs.

    Attributes:
        title: what the table calls it.
        package: what has to be installed for it.
        words: its arguments, given the folder of the run.
        env: variables that only it needs.
    """

    title: str
    package: str
    words: Callable[[Path], list[str]]
    env: Mapping[str, str] = field(default_factory=dict)


def _tfdist(folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "tfdist", "run", "-n", str(RANKS), "--cpus-per-worker", "1"),
        *("--max-restarts", str(_RESTARTS), "--hang-timeout", str(HANG_TIMEOUT), "--output", "all"),
        *("--log-dir", str(folder / "logs"), "-m", f"{__package__}.keras_worker"),
        *(str(folder), str(SAVE_EVERY), str(_MOST_STEPS)),
    ]


def _torchrun(folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *("--max-restarts", str(_RESTARTS), "--log-dir", str(folder / "logs"), "-m", f"{__package__}.torch_worker"),
        *(str(folder), str(SAVE_EVERY), str(_MOST_STEPS), str(HANG_TIMEOUT)),
    ]


_TORCH_ENV = {
    # Without it restarted ranks read the addresses of dead ones and fail (pytorch issue 135712).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # gloo otherwise asks for the address of the host's name, which may have none.
    "GLOO_SOCKET_IFNAME": "lo",
}

LAUNCHERS = {
    "tfdist": Launcher("tfdist run", "tfdist", _tfdist),
    "torchrun": Launcher("torchrun, PyTorch DDP (gloo)", "torch", _torchrun, _TORCH_ENV),
}
