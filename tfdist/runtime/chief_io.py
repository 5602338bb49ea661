"""One file, one writer: the chief writes what every process of the job saves under the same path.

chief      announces a path, writes it, announces that it is done
the others do not write a path that the chief announces, and go on once it is written: whoever loads it next
           finds it complete. A path that the chief does not announce is this process' own (some scripts save under
           a name that contains the rank), and is written.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

from tfdist.compat.scopes import outside_of_scope
from tfdist.runtime.peers import Peers, PeerTimeoutError

_log = logging.getLogger("tfdist")

# How long the chief may stay silent before this process takes a path for its own: short if the chief has saved
# something else in the meantime (under its own name, it seems), long if it has saved nothing yet.
_SILENCE_AFTER_OTHER_PATH = 5.0
_SILENCE = 60.0


class ChiefIO:
    """The files that a multi-worker job saves.

    Args:
        peers: the processes of the job.
    """

    def __init__(self, peers: Peers):
        self._peers = peers
        self._saving = False
        self._heard = 0
        self._announced: list[str] = []

    def save(self, path: Any, write: Callable[[], Any]) -> Any:
        """Calls `write()` on the process that has to write `path`; returns its result there, `None` elsewhere."""
        if self._saving or not isinstance(path, (str, os.PathLike)):
            return write()
        with contextlib.ExitStack() as stack:
            self._saving = True
            stack.callback(setattr, self, "_saving", False)
            stack.enter_context(outside_of_scope())
            if self._peers.rank == 0:
                return self._announce(os.fspath(path), write)
            return None if self._written_by_chief(os.fspath(path)) else write()

    def catch_up(self, purpose: str) -> None:
        """Waits until all processes are here, and marks all that the chief has announced as heard.

        Callbacks of the chief announce files that the other processes never save. These announcements must not be
        taken for later ones.
        """
        announced = self._peers.gather("files", self._heard, purpose)[0]
        # After the fit the chief's program may end at once, and with it what keeps the messages.
        self._peers.acknowledge("files-heard", purpose)
        self._heard = announced
        self._announced.clear()

    @property
    def someone_may_ask(self) -> bool:
        """Whether this is the chief, and another process may still have to hear what it has announced."""
        return self._peers.rank == 0 and bool(self._announced)

    def _announce(self, path: str, write: Callable[[], Any]) -> Any:
        self._heard += 1
        self._announced.append(path)
        self._peers.tell(f"save/{self._heard}/path", path)
        try:
            return write()
        finally:
            self._peers.tell(f"save/{self._heard}/done", True)

    def _written_by_chief(self, path: str) -> bool:
        while path not in self._announced:
            silence = _SILENCE_AFTER_OTHER_PATH if self._announced else _SILENCE
            try:
                announced = self._peers.hear(f"save/{self._heard + 1}/path", 0, f"save {path}", within=silence)
            except PeerTimeoutError:
                if self._announced:
                    del self._announced[0]
                else:
                    _log.warning("The chief has not saved %s for %.0f s; this process saves it.", path, silence)
                return False
            self._heard += 1
            self._announced.append(announced)
            self._peers.hear(f"save/{self._heard}/done", 0, f"finish saving {announced}")
        self._announced.remove(path)
        return True
