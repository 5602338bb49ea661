"""What can be wrong with a job."""

from __future__ import annotations


class SubmitError(Exception):
    """A job that cannot be submitted, found or ended; the text says what was received, expected, and what to do.

    Example:
        >>> raise SubmitError("Received: ... Expected: ...")
        Traceback (most recent call last):
        tfdist.submit.errors.SubmitError: Received: ... Expected: ...
    """
