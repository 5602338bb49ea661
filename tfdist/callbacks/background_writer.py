"""Writes checkpoints in a thread of its own, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """Runs one job at a time beside the training.

    An interpreter that exits (an exception elsewhere ended the training) lets the last job be finished.

    Args:
        asynchronous: whether jobs run in a thread; otherwise `submit` runs them.
        on_error: called with what a job raised, in the caller's thread: by `submit`, `is_busy` or `wait`.
    """

    def __init__(self, asynchronous: bool, on_error: Callable[[Exception], None]):
        # One thread for all jobs: starting one takes milliseconds while both cores compute.
        self._executor = ThreadPoolExecutor(1, "tfdist-backup") if asynchronous else None
        self._on_error = on_error
        self._job: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is still running."""
        if self._job is not None and self._job.done():
            self.wait()
        return self._job is not None

    def submit(self, job: Callable[[], None]) -> None:
        """Runs a job; waits for the one before, if that has not ended."""
        self.wait()
        if self._executor is not None:
            self._job = self._executor.submit(job)
            return
        self._job = Future()
        try:
            self._job.set_result(job())
        except Exception as error:
            self._job.set_exception(error)
        self.wait()

    def wait(self) -> None:
        """Waits until the job has ended."""
        job, self._job = self._job, None
        error = job.exception() if job is not None else None
        if error is not None:
            self._on_error(error)

    def close(self) -> None:
        """Waits, and ends the thread."""
        self.wait()
        if self._executor is not None:
            self._executor.shutdown()
