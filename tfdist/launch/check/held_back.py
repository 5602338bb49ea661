"""What libraries write to standard error, kept until it is known whether somebody wants to read it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

_STANDARD_ERROR = 2


@contextlib.contextmanager
def held_back() -> Iterator[BinaryIO]:
    """Sends standard error, that of libraries of C++ as well, to a file that has no name.

    Yields:
        The file.

    Example:
        >>> with held_back() as file:
        ...     os.write(2, b"noise")
        5
    """
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        kept = os.dup(_STANDARD_ERROR)
        os.dup2(file.fileno(), _STANDARD_ERROR)
        try:
            yield file
        finally:
            sys.stderr.flush()
            os.dup2(kept, _STANDARD_ERROR)
            os.close(kept)
