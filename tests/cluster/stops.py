"""Callbacks that set `model.stop_training` on one or all of two processes, and where the fits end then."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

from tests.cluster.attempt import attempt
from tests.features.table import mlp, rows

# Steps an epoch: 4. name: (ranks that stop, hook, epoch, batch)
STOPS = {
    "all": ((0, 1), "on_train_batch_end", 1, 1),
    "chief": ((0,), "on_train_batch_end", 1, 1),
    "other": ((1,), "on_train_batch_end", 1, 1),
    "other, last batch of an epoch": ((1,), "on_train_batch_end", 1, 3),
    "other, end of an epoch": ((1,), "on_epoch_end", 1, None),
    "other, beginning of an epoch": ((1,), "on_epoch_begin", 1, None),
    "chief, beginning of the fit": ((0,), "on_train_begin", None, None),
    "nobody": ((), "on_train_batch_end", 1, 1),
}
PATIENCE = 1.0


class Stop(keras.callbacks.Callback):
    """Sets it in one place.

    Args:
        hook: the method.
        epoch: the epoch, from 0.
        batch: the batch, from 0.
        delay: how long to wait before that, in seconds.
    """

    def __init__(self, hook: str, epoch: int | None, batch: int | None, delay: float = 0.0):
        super().__init__()
        self._place, self._delay = (epoch, batch), delay
        setattr(self, hook, self._stop)

    def _stop(self, number: int | None = None, logs: dict | None = None) -> None:
        epoch, batch = self._place
        # Keras does not tell the epoch where a batch ends.
        steps = int(self.model.optimizer.iterations.numpy())
        here = ((steps - 1) // 4, number) if batch is not None else (number, None)
        if epoch is None or here == (epoch, batch):
            time.sleep(self._delay)
            self.model.stop_training = True


def fit(strategy: Any, callbacks: list[keras.callbacks.Callback]) -> dict[str, Any]:
    """Trains for three epochs of four steps, or less."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = mlp()()
    began = time.monotonic()
    history = model.fit(*rows(48), batch_size=12, epochs=3, shuffle=False, callbacks=callbacks, verbose=0)
    return {
        "seconds": time.monotonic() - began,
        "steps": int(model.optimizer.iterations.numpy()),
        "history": history.history,
        "weights": np.concatenate([np.ravel(weight) for weight in model.get_weights()]),
    }


def stops(kind: str) -> dict[str, Any]:
    """Runs every case on one of two processes."""
    import tfdist
    from tfdist.callbacks import common_stop

    common_stop._PATIENCE_SECONDS = PATIENCE
    strategy = getattr(tfdist, kind)(start_timeout=60, peer_timeout=60)
    rank = strategy.peers.rank
    results = {}
    for name, (ranks, *place) in STOPS.items():
        results[name] = attempt(name, fit, strategy, [Stop(*place)] if rank in ranks else [])
    late = [Stop("on_train_batch_end", 1, 1, delay=2 * PATIENCE * rank)]
    results["all, one of them late"] = attempt("late", fit, strategy, late)
    results["nobody, again"] = attempt("again", fit, strategy, [])
    return results
