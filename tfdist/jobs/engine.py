"""What the commands ask of each scheduler, and how a file of output is shown while it grows."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from tfdist.jobs.record import Record, Records
from tfdist.jobs.request import Request
from tfdist.jobs.status import Progress, Status

_CLASSES = {"local": "LocalEngine", "slurm": "SlurmEngine", "kubernetes": "KubernetesEngine"}
_INTERVAL = 0.25
_PIECE = 1 << 16


class Engine(Protocol):
    """Speaks to a scheduler. All methods raise SubmitError if the scheduler is not there or refuses.

    Example:
        >>> from tfdist.launcher.arguments import Target
        >>> request = Request("local", Target("module", ("train",)))
        >>> engine_of("local", Records(Path("/nowhere"))).dry_run(request)  # doctest: +ELLIPSIS
        '... -m tfdist run -n 2 ... -m train\\n'
    """

    def dry_run(self, request: Request) -> str:
        """What `submit` would hand to the scheduler, as text."""

    def submit(self, request: Request) -> Record:
        """Hands a job to the scheduler."""

    def status(self, record: Record) -> Status:
        """The state of a job."""

    def progress(self, record: Record) -> Progress | None:
        """How far the training of a job is, if that is known."""

    def logs(self, record: Record, to: BinaryIO, follow: bool) -> None:
        """Writes the output of a job; with `follow` until the job is over."""

    def cancel(self, record: Record) -> str:
        """Ends a job that is not over, and says what happens now."""


def engine_of(scheduler: str, records: Records) -> Engine:
    """The engine of one of `tfdist.jobs.SCHEDULERS`; only its modules are imported."""
    return getattr(importlib.import_module(f"tfdist.jobs.{scheduler}.engine"), _CLASSES[scheduler])(records)


def show_file(path: Path, to: BinaryIO, is_over: Callable[[], bool] | None, ask_every: float = _INTERVAL) -> None:
    """Writes the content of a file, and with `is_over` also what is added to it until its writer has ended.

    Args:
        path: the file, which may not exist yet.
        to: where to write.
        is_over: says whether the writer has ended; None to write only what is there now.
        ask_every: seconds between two calls of it.
    """
    file, ask_at, over = None, 0.0, False
    try:
        while True:
            # Asked before reading: so all that was written before the end is read.
            if time.monotonic() >= ask_at:
                over, ask_at = is_over is None or is_over(), time.monotonic() + ask_every
            if file is None and path.exists():
                file = open(path, "rb")  # noqa: SIM115
            while file is not None and (piece := file.read(_PIECE)):
                to.write(piece)
            to.flush()
            if over:
                return
            time.sleep(_INTERVAL)
    finally:
        if file is not None:
            file.close()
