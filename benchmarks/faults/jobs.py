"""A training of two workers, under `tfdist run` or as plain processes that somebody starts again where they end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpointing.step_log import StepReader
from tfdist.checkpoint.manifest import VARIABLE
from tfdist.cluster.ports import reserve
from tfdist.launcher.drill.faults import Trial
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import SignalInbox, spawn
from tfdist.launcher.policy import exit_code
from tfdist.supervision.events import of_kind
from tfdist.supervision.exit_codes import REFUSED

ROOT = Path(__file__).parents[2]
_PROGRAM = str(Path(__file__).with_name("training.py"))
# What whoever starts processes again waits before it does.
_PAUSE = 1.0
# Long enough for anything but a fault, on a machine that does other things as well.
START_TIMEOUT = 20.0
HANG_TIMEOUT = 8.0


class UnderRun:
    """`tfdist run`, which is started again where it was killed or has ended itself.

    Args:
        folder: of the training.
        guardian: ends it if this process is killed.
        inbox: the signals to this process.
        options: of `tfdist run`.
        ranks: how many processes note steps.

    Attributes:
        log: the steps that it has done.
    """

    def __init__(
        self, folder: Path, guardian: Guardian, inbox: SignalInbox, options: Sequence[str] = (), ranks: int = 2
    ) -> None:
        self.folder, self.log, self.ranks = folder, StepReader(folder), ranks
        self._guardian, self._inbox, self._options = guardian, inbox, options
        self._trials: list[Trial] = []
        self._ended: list[float] = []

    @property
    def trial(self) -> Trial:
        """The launcher that runs now."""
        return self._trials[-1]

    def start(self) -> None:
        """Starts it."""
        arguments = ["-n", "2", "--max-restarts", "20", "--hang-timeout", f"{HANG_TIMEOUT:g}"]
        words = [*self._options, _PROGRAM, str(self.folder), "--start-timeout", f"{START_TIMEOUT:g}"]
        logs = self.folder / f"logs-{len(self._trials)}"
        trial = Trial([*arguments, *words], logs, self.folder / "backups", math.inf, self._guardian, self._inbox)
        self._trials.append(trial.__enter__())

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a process."""
        self.trial.signal(self.trial.names[rank], number)

    def terminate(self) -> None:
        """Asks all of it to end, as a scheduler does that wants the machine back."""
        self.trial.terminate()

    def tend(self) -> None:
        """Starts again what has ended and should not have; to be called often."""
        if self.trial.code not in (None, 0, REFUSED):
            self._ended.append(time.monotonic())
            self.trial.__exit__()
            time.sleep(_PAUSE)
            self.start()

    def detected(self, struck: float) -> float | None:
        """When something was known about the fault, as `time.monotonic`; None: not yet."""
        # The events tell the time of day.
        offset = time.time() - time.monotonic()
        events = [event for trial in self._trials for event in trial.events]
        times = [event["time"] - offset for kind in ("failure", "preempted") for event in of_kind(events, kind)]
        return min((when for when in (*times, *self._ended) if when >= struck), default=None)

    def has_ended(self, rank: int, since: float) -> bool:
        """Whether a process has failed since then."""
        return self.detected(since) is not None

    def code(self) -> int | None:
        """The exit code once all has ended."""
        return self.trial.code

    def refuses(self) -> bool:
        """Whether it has said that it would fail again; then nobody starts it again."""
        return self.trial.code == REFUSED

    def close(self) -> None:
        """Ends all of it."""
        self.trial.__exit__()


class Plain:
    """Processes with TF_CONFIG, each of which is started again a second after it has failed. As `UnderRun`.

    Args:
        folder: of the training.
        guardian: ends it if this process is killed.
        addresses: of the two processes; None: ports of this machine.
        prefixes: what stands in front of each command.

    Attributes:
        addresses: of the processes.
        hosts: the hosts that they are on, if their network can be cut.
    """

    def __init__(
        self,
        folder: Path,
        guardian: Guardian,
        addresses: Sequence[str] | None = None,
        prefixes: Sequence[Sequence[str]] = ((), ()),
    ) -> None:
        self.folder, self.log, self.ranks = folder, StepReader(folder), 2
        self._ports = reserve(2)
        self.addresses = list(addresses or (f"127.0.0.1:{port}" for port in self._ports.ports))
        self.hosts: Any = None
        self._guardian, self._prefixes = guardian, prefixes
        self._processes: list[subprocess.Popen] = []
        # When which process ended, and those that faults have killed.
        self._ended: list[tuple[float, int, int]] = []
        self._killed: set[int] = set()
        self._due: dict[int, float] = {}

    def start(self) -> None:
        (self.folder / "backups").mkdir(exist_ok=True)
        self._processes = [self._start(rank) for rank in range(2)]

    def _start(self, rank: int) -> subprocess.Popen:
        task = {"cluster": {"worker": self.addresses}, "task": {"type": "worker", "index": rank}}
        own = {"TF_CONFIG": json.dumps(task), VARIABLE: str(self.folder / "backups")}
        words = [sys.executable, "-u", _PROGRAM, str(self.folder), "--start-timeout", f"{START_TIMEOUT:g}"]
        with (self.folder / f"worker-{rank}.log").open("ab") as log:
            process = spawn([*self._prefixes[rank], *words], log.fileno(), {**os.environ, **own})
        self._guardian.add(process.pid)
        return process

    def signal(self, rank: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._processes[rank].pid, number)
        if number in (signal.SIGKILL, signal.SIGSTOP):
            self._killed.add(self._processes[rank].pid)

    def terminate(self) -> None:
        for rank in range(2):
            self.signal(rank, signal.SIGTERM)

    def tend(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.poll() in (None, 0, REFUSED):
                continue
            if rank not in self._due:
                self._ended.append((time.monotonic(), process.pid, rank))
                self._due[rank] = time.monotonic() + _PAUSE
                self._guardian.remove(process.pid)
            elif time.monotonic() > self._due[rank]:
                del self._due[rank]
                self._processes[rank] = self._start(rank)

    def detected(self, struck: float) -> float | None:
        """When the first process ended that the fault had not killed; if there was none, the first of all."""
        ends = [(pid in self._killed, when) for when, pid, _ in self._ended if when >= struck]
        return min(ends)[1] if ends else None

    def has_ended(self, rank: int, since: float) -> bool:
        return any(when >= since and of == rank for when, _, of in self._ended)

    def free_ports(self) -> None:
        """Lets another program have the ports."""
        self._ports.close()

    def code(self) -> int | None:
        codes = [process.poll() for process in self._processes]
        return None if None in codes else exit_code(max(codes, key=abs))

    def refuses(self) -> bool:
        return any(process.poll() == REFUSED for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._guardian.remove(process.pid)
        self._ports.close()


# A training that faults strike.
Job = UnderRun | Plain
