"""`model.stop_training` on several processes: all leave the fit after the same step.

all set it after the same batch   each says so, hears the others, and all stop there, as one process does
only some do                      they take it back and request it with the next step's gradients; all stop after that
at the end of an epoch, or before its first batch
                                  all ask each other; one that has set it is enough
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.compat.upstream import is_default
from tfdist.runtime.control_signals import Agreement, Request
from tfdist.runtime.peers import Peers, PeerTimeoutError

# How long to wait for those that may set it after the same batch, and are still in a callback that comes before.
_PATIENCE_SECONDS = 10.0

_BATCH_HOOKS = ("on_batch_begin", "on_train_batch_begin", "on_batch_end", "on_train_batch_end")


class CommonStop(keras.callbacks.Callback):
    """Comes after the callbacks of the user, on every process of a job.

    Args:
        callback_list: Keras' list of callbacks.
        callbacks: those of the user on this process.
    """

    def __init__(self, callback_list: Any, callbacks: Sequence[keras.callbacks.Callback]):
        super().__init__()
        self._callback_list = callback_list
        self._may_stop = [may_stop_in(callbacks, _BATCH_HOOKS), may_stop_in(callbacks, ["on_epoch_begin"])]
        self._agreement: Agreement | None = None
        self._asks_in_batches = self._asks_at_beginning = False
        self._fit = self._epoch = 0
        self._all_stop = self._requested = False

    @property
    def _peers(self) -> Peers:
        return self.model.distribute_strategy._peers

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._fit = self._peers.count("fit")
        told = self._peers.gather("may stop", [*self._may_stop, bool(self.model.stop_training)], "begin to train")
        # Sums must be the same on all: one process with such a callback is enough.
        self._asks_in_batches, self._asks_at_beginning, stops = (any(of_all) for of_all in zip(*told, strict=True))
        self._note(stops)
        self._agreement = None
        if self._asks_in_batches:
            # Keras would not wait for this callback before it begins the next step.
            self._callback_list._async_train = False
            self._agreement = self.model.distribute_strategy._agreement
            self._agreement.begin(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch
        if self._asks_at_beginning:
            self._ask("begin an epoch")

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._all_stop or (self._agreement is not None and self._agreement.take(Request.STOP)):
            self._note(True)  # also if a callback has taken it back
        elif self.model.stop_training:
            # What sets it after every batch from now on has been heard already.
            if self._asks_in_batches and not self._requested:
                self._note(self._all_stop_after(batch))
            if not self._all_stop:
                self.model.stop_training = False
                self._request()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._ask("finish the epoch")

    def _ask(self, purpose: str) -> None:
        stops = bool(self.model.stop_training) or self._requested
        self._note(any(self._peers.gather("stop", stops, purpose)))

    def _note(self, all_stop: bool) -> None:
        self._all_stop = self.model.stop_training = all_stop
        self._requested = False

    def _request(self) -> None:
        self._requested = True
        if self._agreement is not None:
            self._agreement.request(Request.STOP)

    def _all_stop_after(self, batch: int) -> bool:
        """Whether all processes have set it after this batch: the same answer on all that ask."""
        peers, place = self._peers, f"stop/{self._fit}/{self._epoch}/{batch}"
        deadline = time.monotonic() + _PATIENCE_SECONDS
        peers.tell(f"{place}/{peers.rank}", True)
        try:
            for rank in range(len(peers.names)):
                if rank != peers.rank:
                    peers.hear(f"{place}/{rank}", rank, "stop, too", within=max(0.0, deadline - time.monotonic()))
        except PeerTimeoutError:
            # One may give up at the moment at which another has heard all: what the first of them says holds.
            return peers.decide(place, False)
        return peers.decide(place, True)


def may_stop_in(callbacks: Sequence[Any], hooks: Sequence[str]) -> bool:
    """Whether one of the callbacks may set `model.stop_training` there: Keras' own and tfdist's do not."""
    return any(not is_default(getattr(c, hook)) for c in filter(_is_users, callbacks) for hook in hooks)


def _is_users(callback: Any) -> bool:
    known = type(callback).__module__.partition(".")[0] in ("keras", "tfdist")
    return not known or isinstance(callback, keras.callbacks.LambdaCallback)
