"""Writes checkpoints in a thread of its own, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs one job at a time beside the training.

    Args:
        asynchronous: whether jobs run in a thread; otherwise `submit` runs them.
        on_error: called with what a job raised, in the caller's thread: by `submit`, `is_busy` or `wait`.
    """

    def __init__(self, asynchronous: bool, on_error: Callable[[Exception], None]):
        self._asynchronous = asynchronous
        self._on_error = on_error
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is still running."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        return self._thread is not None

    def submit(self, job: Callable[[], None]) -> None:
        """Runs a job; waits for the one before, if that has not ended."""
        self.wait()
        if not self._asynchronous:
            self._run(job)
            self.wait()
            return
        # Not a daemon: an interpreter that exits (an exception elsewhere) lets a checkpoint be finished.
        self._thread = threading.Thread(target=self._run, args=(job,), name="tfdist-backup")
        self._thread.start()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # told to the caller's thread, which decides
            self._error = error

    def wait(self) -> None:
        """Waits until the job has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            self._on_error(error)
