"""How many rows of each batch a replica gets: `batch_shares`, in given proportions or by measured speed.

`ends_of_pieces` says where the pieces of a batch end, as parts of its rows. With `batch_shares="auto"` they are in
variables that each step reads (`AutomaticShares`): batches are read ahead, and a change has to be one for all processes
in the same step. `ShareBySpeed` measures, and changes them between epochs.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.runtime.peers import Peers
from tfdist.strategies.data_parallel.dataset import piece_bounds
from tfdist.supervision.events import EventLog

_log = logging.getLogger("tfdist")
# What is measured in fewer calls of the step is chance; the first ones trace it.
_FEWEST_CALLS = 5
# A share that would change by less stays: the times of equal workers differ, too.
_WORTH_A_CHANGE = 0.05
# Of an equal share, before all are made to add up to 1: nobody gets fewer rows, however slow.
_LEAST = 0.1


def ends_of_pieces(shares: Sequence[float] | None, workers: int, devices: int) -> tuple[float, ...] | None:
    """Where the pieces of a batch end, as parts of its rows; `None` where they are equal.

    Args:
        shares: for each worker, or for each device of a single one.
        workers: how many there are.
        devices: how many each has; they share its rows equally.

    Raises:
        ValueError: for another number of shares.

    Example:
        >>> ends_of_pieces([3, 1], 2, 1), ends_of_pieces([3, 1], 2, 2)
        ((0.75, 1.0), (0.375, 0.5, 0.875, 1.0))
    """
    if shares is None or workers * devices == 1:
        return None
    expected, whose = (workers, "processes") if workers > 1 else (devices, "devices")
    if len(shares) != expected:
        raise ValueError(
            f"Received: batch_shares={list(shares)} for {expected} {whose}. Expected: a number for each; None gives "
            "all equally many rows, however many there are."
        )
    # Local replica k of worker w has piece `k * workers + w`.
    sums = list(itertools.accumulate([*shares] * (workers * devices // expected)))
    return tuple(one / sums[-1] for one in sums)


def shares_by_speed(shares: Sequence[float], rows: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """The shares with which all workers would take as long, if the time goes by the number of rows.

    Args:
        shares: of the workers so far, which add up to 1.
        rows: that each has had in a step; shares are rounded to whole rows.
        seconds: how long each has computed for them.

    Returns:
        Shares that add up to 1; the old ones where hardly anything would change.

    Example:
        >>> shares_by_speed([0.5, 0.5], [8, 8], [2.0, 6.0]), shares_by_speed([0.5, 0.5], [8, 8], [2.0, 2.1])
        ([0.75, 0.25], [0.5, 0.5])
    """
    speeds = [count / max(taken, 1e-9) for count, taken in zip(rows, seconds, strict=True)]
    least = _LEAST / len(speeds)
    found = [max(speed / sum(speeds), least) for speed in speeds]
    found = [one / sum(found) for one in found]
    changes = [abs(new / old - 1) for new, old in zip(found, shares, strict=True)]
    return found if max(changes) > _WORTH_A_CHANGE else list(shares)


class AutomaticShares:
    """Shares that may change between two steps.

    Args:
        workers: how many there are; they begin with equal shares.
        devices: how many each has.

    Attributes:
        shares: of the workers, which add up to 1.
        cuts: whether data that Keras has asked for last are cut by them.
    """

    def __init__(self, workers: int, devices: int) -> None:
        self._workers, self._devices = workers, devices
        self.cuts = False
        self.shares = [1 / workers] * workers
        with tf.init_scope(), tf.device("CPU:0"):
            ends = ends_of_pieces(self.shares, workers, devices)
            self._ends = tf.Variable(ends, trainable=False, dtype=tf.float64, name="ends_of_pieces")
            self._most_rows = tf.Variable(0, trainable=False, dtype=tf.int32, name="rows_of_a_batch")

    def set(self, shares: Sequence[float]) -> None:
        """Changes them, from the next step on; each process has to do so after the same step."""
        self.shares = list(shares)
        self._ends.assign(ends_of_pieces(self.shares, self._workers, self._devices))

    def note_rows(self, rows: tf.Tensor) -> None:
        """Notes how many rows a global batch has; called in each step that is timed."""
        self._most_rows.assign(tf.maximum(self._most_rows, rows))

    def forget_rows(self) -> None:
        """Forgets the batches so far: those of another fit may have other numbers of rows."""
        self._most_rows.assign(0)

    def rows_of_workers(self) -> list[int]:
        """How many rows each worker has of the largest batch so far."""
        rows, ends = int(self._most_rows), ends_of_pieces(self.shares, self._workers, self._devices)
        sizes = [piece_bounds(rows, ends, piece)[1] for piece in range(len(ends))]
        return [sum(sizes[worker :: self._workers]) for worker in range(self._workers)]

    def ends(self) -> tuple[tf.Tensor, ...]:
        """Where the pieces of this step's batch end: float64 scalars."""
        return tuple(tf.unstack(self._ends.read_value()))


class ShareBySpeed(keras.callbacks.Callback):
    """Gives each worker as many rows of a batch as it computes in the time of the others.

    It measures what a worker computes in a call of the step: all of its time but that in which it exchanges values,
    which is waiting for others. So gradients are sent at once, when all are computed. The median of an epoch counts, so
    that a single slow step does not. Shares change between two epochs.

    Args:
        automatic: the shares.
        peers: the processes.
        waited: returns for how many seconds this process has waited for others, in all.
        callback_list: Keras' list of callbacks.
    """

    def __init__(
        self, automatic: AutomaticShares, peers: Peers, waited: Callable[[], float], callback_list: Any
    ) -> None:
        super().__init__()
        self._automatic, self._peers, self._waited, self._callback_list = automatic, peers, waited, callback_list
        self._computed: list[float] = []
        self._began, self._cuts = 0.0, False

    def on_train_begin(self, logs: dict | None = None) -> None:
        # Validation data may be others.
        self._cuts = self._automatic.cuts
        self._automatic.forget_rows()
        # Keras would not wait for this callback before it begins the next step.
        self._callback_list._async_train = False

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._computed.clear()

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._began = time.monotonic() - self._waited()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._computed.append(time.monotonic() - self._waited() - self._began)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        is_known = self._cuts and len(self._computed) >= _FEWEST_CALLS
        told = self._peers.gather("speed", statistics.median(self._computed) if is_known else None, "finish the epoch")
        before = self._automatic.shares
        if None in told:
            return
        shares = shares_by_speed(before, self._automatic.rows_of_workers(), told)
        if shares == before:
            return
        self._automatic.set(shares)
        if self._peers.rank == 0:
            EventLog.from_environment().write("batch-shares", epoch=epoch + 1, shares=shares, seconds=told)
            listing = ", ".join(
                f"{name} {new:.0%} (so far {old:.0%}, {1000 * taken:.3g} ms)"
                for name, new, old, taken in zip(self._peers.names, shares, before, told, strict=True)
            )
            _log.info("batch_shares: each worker's part of the rows, and its time to compute a step: %s", listing)
