"""A part of the weights is exchanged in the background, while the next steps are computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.inspection.model_state import own_copy
from tfdist.runtime.agreement import Agreement, Request
from tfdist.runtime.exchange import ExchangeError


class Sending:
    """Exchanges one part of the weights in the background, while the next steps are computed.

        step            1  2  3 | 4  5  6 | 7  8  9 | ...
        first part      trains  | is sent | begins from the outer step, with what was learned in 4, 5, 6
        second part     trains ---------- | is sent | ...

    What was sent is a variable, too: after a restart it is sent again.

    Args:
        strategy: that of the weights.
        parts: the weights.
        make: makes a variable, given shape, dtype and name.
    """

    def __init__(self, strategy: Any, parts: list[list[keras.Variable]], make: Callable) -> None:
        self._strategy, self._shapes = strategy, [[v.shape for v in part] for part in parts]
        self._sizes = [[v.shape.num_elements() for v in part] for part in parts]
        self._dtypes = [[v.dtype for v in part] for part in parts]
        is_wide = any(tf.as_dtype(v.dtype).size > 4 for part in parts for v in part)
        self._sent = make(shape=(max(map(sum, self._sizes)),), dtype="float64" if is_wide else "float32", name="sent")
        self._sent_rows = make(shape=(), dtype="int64", name="sent_rows")
        # The number of the part that is on its way, from 1; 0: none is.
        self._number = make(shape=(), dtype="int64", name="on_its_way")
        self._found: Future | None = None

    @property
    def variables(self) -> list[keras.Variable]:
        """For backups."""
        return [self._sent, self._sent_rows, self._number]

    @property
    def part_on_its_way(self) -> int | None:
        """Which part was sent, and is not received yet."""
        number = int(own_copy(self._number))
        return number - 1 if number else None

    def is_on_its_way(self) -> tf.Tensor:
        """Whether a part was sent, and is not received yet; in the graph."""
        return tf.greater(own_copy(self._number).read_value(), 0)

    def forget(self, is_dropped: bool) -> None:
        """Forgets what this process has on its way: it is sent again, or dropped."""
        self._found = None
        if is_dropped:
            own_copy(self._number).assign(0)

    def send(self, part: int, differences: list[tf.Tensor], rows: tf.Tensor, agreement: Agreement | None) -> None:
        """Sends what this worker has learned of a part, with what it requests."""
        sent = own_copy(self._sent)
        flat = tf.concat([tf.reshape(tf.cast(one, sent.dtype), [-1]) for one in differences], 0)
        sent.assign(tf.pad(flat, [[0, sent.shape[0] - sum(self._sizes[part])]]))
        own_copy(self._sent_rows).assign(rows)

        def start(_: np.ndarray, values: np.ndarray, rows: np.ndarray, requests: np.ndarray) -> np.int64:
            if self._strategy.extended.exchange is not None:
                work = functools.partial(self._exchanged, values.copy(), int(rows), requests.copy())
                self._found = self._strategy.extended.exchange.in_background(work)
            return np.int64(part + 1)

        with tf.device("CPU:0"):
            # The number lets it come after what receives the part before, which writes it.
            given = [own_copy(self._number).read_value(), flat, rows, _requests(agreement)]
            number = tf.numpy_function(start, given, tf.int64)
        own_copy(self._number).assign(tf.ensure_shape(number, []))

    def receive(self, part: int, agreement: Agreement | None) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """What this worker has sent of a part, and the mean over all; waits for it if need be."""
        size = sum(self._sizes[part])
        own = own_copy(self._sent).read_value()[:size]

        def finish(_: np.ndarray, values: np.ndarray, rows: np.ndarray, requests: np.ndarray) -> list[np.ndarray]:
            if self._strategy.extended.exchange is None:
                return [np.asarray(values), np.zeros_like(requests), np.int64(0)]
            try:
                # After a restart, nothing is on its way.
                found, self._found = self._found, None
                mean, heard = found.result() if found else self._exchanged(values, int(rows), requests)
            except ExchangeError as error:
                raise tf.errors.UnavailableError(None, None, f"Exchanging what was learned failed: {error}") from None
            return [mean, heard, np.int64(0)]

        given = [
            own_copy(self._number).read_value(),
            own,
            own_copy(self._sent_rows).read_value(),
            _requests(agreement),
        ]
        with tf.device("CPU:0"):
            mean, heard, number = tf.numpy_function(finish, given, [own.dtype, tf.float32, tf.int64])
        own_copy(self._number).assign(tf.ensure_shape(number, []))
        if agreement is not None:
            agreement.keep_sum(tf.ensure_shape(heard, _requests(agreement).shape))
        return self._apart(part, own), self._apart(part, tf.ensure_shape(mean, [size]))

    def _apart(self, part: int, flat: tf.Tensor) -> list[tf.Tensor]:
        pieces = zip(tf.split(flat, self._sizes[part]), self._shapes[part], self._dtypes[part], strict=True)
        return [tf.cast(tf.reshape(one, shape), dtype) for one, shape, dtype in pieces]

    def _exchanged(self, values: np.ndarray, rows: int, requests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The mean of what the workers have learned, by rows, and the sum of what they request."""
        exchange, dtype = self._strategy.extended.exchange, self._strategy._gradient_options.dtype
        (head,) = exchange.all_reduce_each([np.array([rows, *requests], "float64")])
        # What a worker makes of no rows may be NaN.
        weighted = (values * (rows / head[0])).astype(values.dtype) if rows else np.zeros_like(values)
        narrow = None if dtype is None else np.dtype(dtype.as_numpy_dtype)
        (mean,) = exchange.all_reduce_each([weighted], narrow)
        return mean, head[1:].astype("float32")


def _requests(agreement: Agreement | None) -> tf.Tensor:
    """What this worker requests; not again what has just been agreed, and is taken after the step."""
    if agreement is None:
        return tf.zeros([len(Request)])
    return tf.where(agreement._agreed.read_value() > 0, 0.0, agreement.read())


def in_parts(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Places of neighbours, in so many parts of about the same size.

    Raises:
        ValueError: if there are fewer places.

    Example:
        >>> in_parts([5, 1, 1, 1, 4], 3)
        [[0], [1, 2, 3], [4]]
    """
    if count > max(1, len(sizes)):
        raise ValueError(
            f"Received: fragments={count} of a model with {len(sizes)} weights. Expected: at most as many."
        )
    parts: list[list[int]] = [[]]
    for place, size in enumerate(sizes):
        left, filled = count - len(parts), sum(sizes[i] for i in parts[-1])
        fair = (filled + sum(sizes[place:])) / (left + 1)
        is_full = parts[-1] and (filled + size / 2 > fair or len(sizes) - place <= left)
        if left and is_full:
            parts.append([])
        parts[-1].append(place)
    return parts
