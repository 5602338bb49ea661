"""What each engine does for the commands, and where it is found."""

from __future__ import annotations

import importlib
from typing import BinaryIO, Protocol

from tfdist.submit.progress import Progress
from tfdist.submit.record import Record, Records
from tfdist.submit.request import Request
from tfdist.submit.status import Status


class Engine(Protocol):
    """What runs jobs. All methods raise SubmitError if the engine is not there or refuses.

    Example:
        >>> engine_of("local", Records(Path("/nowhere"))).dry_run(request)
        '/usr/bin/python3 -m tfdist run ...'
    """

    def dry_run(self, request: Request) -> str:
        """What would be given to the engine, as text; nothing is done."""

    def submit(self, request: Request) -> Record:
        """Hands a job over."""

    def status(self, record: Record) -> Status:
        """What has become of a job."""

    def progress(self, record: Record) -> Progress | None:
        """How far its training is, if that is known."""

    def logs(self, record: Record, to: BinaryIO, follow: bool) -> None:
        """Writes its output; with `follow` until it is over."""

    def cancel(self, record: Record) -> str:
        """Ends a job that is not over, and says what happens now."""


def engine_of(backend: str, records: Records) -> Engine:
    """The engine of one of `tfdist.submit.BACKENDS`; only its modules are imported."""
    return importlib.import_module(f"tfdist.submit.{backend}.engine").make(records)
