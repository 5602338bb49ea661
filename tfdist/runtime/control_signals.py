"""Requests that all workers obey after the same step, carried by the all-reduce of that step's gradients.

worker 0  request (0, 0, 0) --+                       +--> agreed (w, 0, 0)
worker 1  request (1, 0, 0) --+-- sum, with gradients -+--> agreed (w, 0, 0)     both save and leave after this step

No message of its own, no race: whoever has finished a step has received what every worker requested before it. The sum
is weighted as the gradients are, with w > 0. A worker that has no row of a last batch has weight 0: what it requests is
agreed on one step later, and never if that was the last step of the fit.
"""

from __future__ import annotations

import enum
import signal
import threading
import weakref
from typing import Any

import numpy as np
import tensorflow as tf


class Request(enum.IntEnum):
    """What a worker may request."""

    PREEMPT = 0
    SAVE = 1
    STOP = 2


class Agreement:
    """This worker's requests, and what the workers have agreed on. To be made outside of the strategy's scope."""

    def __init__(self) -> None:
        # Whose steps carry requests. Weak: no model has to live longer for it.
        self.models: weakref.WeakSet = weakref.WeakSet()
        with tf.init_scope(), tf.device("CPU:0"):
            self._requested = tf.Variable(tf.zeros([len(Request)]), trainable=False)
            self._agreed = tf.Variable(tf.zeros([len(Request)]), trainable=False)

    def begin(self, model: Any) -> None:
        """At the beginning of a fit, on all processes: requests travel with its gradients, and there are none yet."""
        for variable in (self._requested, self._agreed):
            variable.assign(tf.zeros_like(variable))
        if model not in self.models:
            self.models.add(model)
            model.make_train_function(force=True)

    def request(self, what: Request) -> None:
        """Requests something, from the next step on until it is agreed."""
        values = self._requested.numpy()
        if not values[what]:
            values[what] = 1
            self._requested.assign(values)

    def take(self, *wanted: Request) -> set[Request]:
        """What of the wanted has been agreed since it was taken last; the same on all workers after the same step."""
        agreed = self._agreed.numpy()
        taken = {what for what in wanted if agreed[what] > 0}
        if taken:
            kept = np.isin(np.arange(len(Request)), list(taken), invert=True)
            self._requested.assign(self._requested.numpy() * kept)
            self._agreed.assign(agreed * kept)
        return taken

    # In the traced step

    def read(self) -> tf.Tensor:
        """What this worker requests, float32: part of the all-reduce."""
        return self._requested.read_value()

    def note(self, total: tf.Tensor) -> None:
        """Keeps the weighted sum over all workers; with several steps in an execution, the largest."""
        self._agreed.assign(tf.maximum(self._agreed.read_value(), total))


# SIGTERM means what Python's program says, not TensorFlow's coordination service.


def heed_sigterm() -> None:
    """Puts Python's handler of SIGTERM back.

    TensorFlow's preemption notifier, which comes with a multi-worker strategy, swallows the signal: a job could only be
    killed. It begins in a thread of its own, at some time after the strategy was made, so this is called again later.
    """
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
