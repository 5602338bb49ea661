"""The end of a program that cannot train here: its exit code says that it is not to be started again."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType

from tfdist.strategies.server_process import end
from tfdist.supervision.events import EventLog
from tfdist.supervision.exit_codes import REFUSED

_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


def is_final(error: BaseException) -> BaseException:
    """Makes the program end with exit code 78 if it does not catch an exception.

    `tfdist run` and `tfdist submit` do not start it again then.

    Args:
        error: the exception, which is about to be raised.

    Example:
        >>> raise is_final(FolderInUse("backup"))
    """
    sys.excepthook = functools.partial(_show, error, sys.excepthook)
    return error


def _show(
    final: BaseException, before: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """In place of `sys.excepthook`."""
    before(kind, error, trace)
    if error is final:
        EventLog.from_environment().write("refused", reason=str(error), exit_code=REFUSED)
        end(REFUSED)
