"""Jobs whose processes come and go, by Horovod's elastic driver: the others go on, with the state that they hold.

a process dies      the step of all others fails; they connect anew, and go on from the last state in memory
a process comes     the driver tells rank 0; all go on from the state that they have just kept, with the new one

References:
    Horovod's documentation, "Elastic Horovod". Its driver starts the processes and tells them their ranks; its own
    state of Keras models (`TensorFlowKerasState`) does not work with Keras 3.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

_log = logging.getLogger("tfdist")


class MembersChanged(Exception):
    """Processes have joined, or are to leave. Ends the fit, so that all connect anew; not an error."""


def is_elastic(env: Mapping[str, str]) -> bool:
    """Whether Horovod's elastic driver has started this process.

    Example:
        >>> is_elastic({"HOROVOD_ELASTIC": "1"}), is_elastic({})
        (True, False)
    """
    return env.get("HOROVOD_ELASTIC") == "1"


def is_lost_process(error: BaseException) -> bool:
    """Whether an exception of `fit` says that another process is gone.

    Horovod's own test knows the names of only some of its operations.
    """
    if isinstance(error, tf.errors.OpError):
        return "Horovod" in str(error)
    return isinstance(error, ConnectionError) or type(error).__name__ == "HorovodInternalError"


class Members:
    """Listens to Horovod's driver, which tells rank 0 of processes that come and go.

    Args:
        horovod: the module `horovod.tensorflow`, initialized.

    Attributes:
        fits: how many fits this process has finished.
    """

    def __init__(self, horovod: Any):
        from horovod.common.elastic import notification_manager

        self.fits = 0
        self._horovod = horovod
        self._told = self._heeded = 0.0
        notification_manager.init()
        notification_manager.register_listener(self)

    def on_hosts_updated(self, timestamp: float, result: Any) -> None:
        """Called by Horovod, in another thread."""
        self._told = max(self._told, timestamp)

    def check(self) -> None:
        """Called on all processes after the same step.

        Raises:
            MembersChanged: on all of them, if the driver has told rank 0 of a change since the last call.
        """
        heeded, told = self._horovod.broadcast_object((self._heeded, self._told))
        self._heeded = self._told = max(heeded, told)
        if told > heeded:
            raise MembersChanged


def report(error: BaseException, size: int) -> None:
    """Logs why the processes have to connect anew.

    Args:
        error: what has ended the fit.
        size: how many processes there were.
    """
    if isinstance(error, MembersChanged):
        _log.warning("tfdist: other processes are to take part; all go on from the state that they hold")
        return
    left = "the other goes" if size == 2 else f"the other {size - 1} go"
    _log.warning("tfdist: of %d processes one is lost; %s on from the last state in memory", size, left)
    _log.info("the failure of this process' step: %s", error)


def report_regrouped(size: int) -> None:
    """Logs, on the first process, with how many processes the training goes on."""
    _log.warning("tfdist: %d process%s go%s on", size, *(("", "es") if size == 1 else ("es", "")))
