"""How the processes of a job stay together in a fit: they leave it after the same step, see the same batches, and hold
the same weights.

Leaving, by `model.stop_training` or a signal:

all set it after the same batch   each says so, hears the others, and all stop there, as one process does
only some do                      they take it back and request it with the next step's gradients; all stop after that
at the end of an epoch, or before its first batch
                                  all ask each other; one that has set it is enough

A request travels with the all-reduce of a step's gradients (`Agreement`):

worker 0  request (0, 0, 0) --+                       +--> agreed (w, 0, 0)
worker 1  request (1, 0, 0) --+-- sum, with gradients -+--> agreed (w, 0, 0)     both save and leave after this step

No message of its own, no race: a worker that has finished a step has received what every worker requested before it.
The sum is weighted as the gradients are, with w > 0. A worker that has no row of a last batch has weight 0: what it
requests is agreed on one step later, and never if that was the last step of the fit.

Weights are compared bit for bit: their checksums travel with other messages. Sums of gradients are the same on all, and
so is what optimizers make of them. What differs stays: a callback that one process runs, a layer adapted to its own
rows, a machine with a broken memory. On GPUs, which add up the rows of a sparse gradient in any order, weights may
differ by their rounding: that is said once.

Batches are compared at the end of each epoch, by some values of some of their rows (`RowsSeen`).
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import os
import signal
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.arguments import is_new
from tfdist.cluster.variables import CHECK_WEIGHTS, optional_number
from tfdist.compat.keras import hooks_of
from tfdist.compat.upstream import is_default
from tfdist.inspection.model_state import is_kept_per_replica
from tfdist.runtime.peers import Peers, PeerTimeoutError

# How long to wait for those that may set it after the same batch, and are still in a callback that comes before.
_PATIENCE_SECONDS = 10.0

_BATCH_HOOKS = ("on_batch_begin", "on_train_batch_begin", "on_batch_end", "on_train_batch_end")

# So many variables are named that differ.
_NAMED = 5
# Of the norm: steps on slightly different sums are further apart than a single rounding.
_ROUNDING = 1e-3

# Of steps that see batches, and of how many of each it is known by itself what they have seen.
_KINDS, _STEPS = ("train", "test"), 32
# Of the sum of sizes: hosts may compute the same rows with other last bits.
_SAME_NUMBERS = 1e-5


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
        self._all_stop = self._requested = self._keeps_own = False
        self._between_checks: int | None = None
        self._checks = 0

    @property
    def _peers(self) -> Peers:
        return hooks_of(self.model.distribute_strategy).peers

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._fit = self._peers.count("fit")
        # Weights that each process trains by itself are the same at the ends of epochs.
        self._keeps_own = hooks_of(self.model.distribute_strategy).keeps_own
        between = batches_between_checks()
        self._between_checks = None if between and self._keeps_own else between
        told = self._peers.gather("may stop", [*self._may_stop, bool(self.model.stop_training)], "begin to train")
        # Sums must be the same on all: one process with such a callback is enough.
        self._asks_in_batches, self._asks_at_beginning, stops = (any(of_all) for of_all in zip(*told, strict=True))
        self._note(stops)
        self._agreement = None
        if self._asks_in_batches or self._between_checks:
            # Keras would not wait for this callback before it begins the next step.
            self._callback_list._async_train = False
        if self._asks_in_batches:
            self._agreement = hooks_of(self.model.distribute_strategy).agreement
            self._agreement.begin(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch, self._checks = epoch, 0
        hooks_of(self.model.distribute_strategy).rows_seen.begin()
        if self._asks_at_beginning:
            self._ask("begin an epoch")

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._all_stop or (self._agreement is not None and self._agreement.take(Request.STOP)):
            self._note(True)  # also if a callback has taken it back
        elif self.model.stop_training:
            # What sets it after every batch from now on has been heard already.
            if self._asks_in_batches and not self._requested and not self._keeps_own:
                self._note(self._all_stop_after(batch))
            if not self._all_stop:
                self.model.stop_training = False
                self._requested = True
                if self._agreement is not None:
                    self._agreement.request(Request.STOP)
        # A call comes after several batches with steps_per_execution.
        if self._between_checks and (batch + 1) // self._between_checks > self._checks:
            self._checks = (batch + 1) // self._between_checks
            sums = self._peers.gather("checksum", checksum_of_weights(self.model), "finish the batch")
            check_weights(self._peers, self.model, sums, f"after batch {batch + 1} of epoch {self._epoch + 1}")

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        seen = hooks_of(self.model.distribute_strategy).rows_seen
        checksum = 0 if self._between_checks == 0 else checksum_of_weights(self.model)
        sums, samples = zip(*self._ask("finish the epoch", [checksum, seen.totals()]), strict=True)
        seen.check(self._peers, samples, epoch)
        check_weights(self._peers, self.model, sums, f"after epoch {epoch + 1}")

    def _ask(self, purpose: str, own: Any = None) -> Sequence[Any]:
        """Agrees on whether to stop; returns what each process tells beside."""
        stops = bool(self.model.stop_training) or self._requested
        all_stop, told = zip(*self._peers.gather("stop", [stops, own], purpose), strict=True)
        self._note(any(all_stop))
        return told

    def _note(self, all_stop: bool) -> None:
        self._all_stop = self.model.stop_training = all_stop
        self._requested = False

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


def batches_between_checks() -> int | None:
    """After how many batches weights are compared, besides at the end of each epoch; 0 for never, `None` for only then.

    Raises:
        ValueError: if TFDIST_CHECK_WEIGHTS is negative.
    """
    batches = optional_number(os.environ, CHECK_WEIGHTS) if CHECK_WEIGHTS in os.environ else None
    if batches is not None and batches < 0:
        raise ValueError(f"Received: {CHECK_WEIGHTS}={batches}. Expected: a number of batches, 0 for no comparison.")
    return batches


def checksum_of_weights(model: keras.Model) -> int:
    """A checksum of the weights' bits, without metrics and seeds."""
    return functools.reduce(_add_bits, _weights(model), 0)


def check_weights(peers: Peers, model: keras.Model, checksums: Sequence[int], when: str) -> None:
    """Ends the training if a process holds other weights than the others; warns once if GPUs have rounded otherwise.

    Args:
        peers: the processes.
        model: the model.
        checksums: of each process, by rank.
        when: such as "after epoch 3"; for the message.

    Raises:
        RuntimeError: on every process; it names those that differ, or groups of equal size, and their variables.
    """
    if len(set(checksums)) == 1:
        return
    weights = _weights(model)
    own = [has_gpus(), [[_add_bits(0, variable), *_sketch(variable)] for variable in weights]]
    everyone = peers.gather("weights", own, "compare its weights")
    peers.acknowledge("weights compared", "compare its weights")
    told = list(zip(weights, zip(*(sums for _, sums in everyone), strict=True), strict=True))
    paths = [variable.path for variable, sums in told if len({checksum for checksum, *_ in sums}) > 1]
    if any(gpus for gpus, _ in everyone) and all(_is_rounding([sketch for _, *sketch in sums]) for _, sums in told):
        if is_new(model, "rounding of weights"):
            warnings.warn(
                f"The weights {', '.join(paths[:_NAMED])} differ between the processes by rounding {when}: GPUs add up "
                "the rows of a sparse gradient in any order. tf.config.experimental.enable_op_determinism() makes them "
                f"the same; {CHECK_WEIGHTS}=0 goes on without comparing.",
                stacklevel=2,
            )
        return
    groups: dict[int, list[str]] = collections.defaultdict(list)
    for name, one in zip(peers.names, checksums, strict=True):
        groups[one].append(name)
    *fewer, most = sorted(groups.values(), key=len)
    if len(fewer[-1]) == len(most):
        who = f"{'; '.join(', '.join(names) for names in groups.values())}: each holds others"
    else:
        who = f"{', '.join(name for names in fewer for name in names)}: not those of the {len(most)} others"
    raise RuntimeError(
        f"The processes hold different weights {when}. Received: weights of {who}, in {', '.join(paths[:_NAMED])}"
        f"{' and more' if len(paths) > _NAMED else ''}. Expected: the same bits on all. Look for what changes weights "
        "on one process only: a callback, `adapt` with rows of its own, hosts with different processors, broken "
        f"memory. {CHECK_WEIGHTS}=0 goes on without comparing."
    )


def has_gpus() -> bool:
    """Whether this process computes on GPUs."""
    return bool(tf.config.list_logical_devices("GPU"))


def _sketch(variable: Any) -> list[float]:
    """The norm of a variable and two sums of its values, which tell rounding from other weights."""
    value = np.asarray(variable.value, "float64").ravel()
    return [float(np.linalg.norm(value)), float(value.sum()), float(value[::2].sum() - value[1::2].sum())]


def _is_rounding(sketches: Sequence[Sequence[float]]) -> bool:
    low, high = np.min(sketches, 0), np.max(sketches, 0)
    return bool(np.all(high - low <= _ROUNDING * high[0]))


def _weights(model: keras.Model) -> list:
    return [variable for variable in model.weights if not is_kept_per_replica(variable)]


def _add_bits(before: int, variable: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(variable.value).reshape(-1).view(np.uint8), before)


class RowsSeen:
    """What tells the global batches of an epoch from others. To be made outside of the strategy's scope."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            # By kind of step, for each of the first steps, and in the last line for all others.
            self._samples = tf.Variable(tf.zeros([len(_KINDS), _STEPS + 1, 3], tf.float64), trainable=False)
            self._counts = tf.Variable(tf.zeros([len(_KINDS)], tf.int32), trainable=False)

    def begin(self) -> None:
        """At the beginning of an epoch."""
        self._samples.assign(tf.zeros_like(self._samples))
        self._counts.assign(tf.zeros_like(self._counts))

    def note(self, kind: str, sample: tf.Tensor) -> None:
        """In a step of this kind: notes the batch.

        Args:
            kind: "train" or "test".
            sample: a number made of some of its values, the sum of their sizes, and whether Python has made them
                (float64, `[3]`).
        """
        number = _KINDS.index(kind)
        is_run = tf.executing_eagerly()
        outside_of_xla = contextlib.nullcontext() if is_run else tf.xla.experimental.jit_scope(compile_ops=False)
        # Not in a step that finds no data.
        with tf.control_dependencies([sample]), tf.device("CPU:0"), outside_of_xla:
            step = self._counts.read_value()[number]
            # Batches that have changed places are others.
            factors = tf.stack([tf.cos(tf.cast(step, tf.float64)), 1.0, 1.0])
            self._samples.scatter_nd_add([[number, tf.minimum(step, _STEPS)]], [sample * factors])
            self._counts.assign_add(tf.one_hot(number, len(_KINDS), dtype=tf.int32), read_value=False)

    def totals(self) -> list[float]:
        """What tells the epoch's batches from others."""
        return np.ravel(self._samples.numpy().sum(1)).tolist()

    def check(self, peers: Peers, totals: Sequence[list[float]], epoch: int) -> None:
        """Ends the training if a process has seen other batches; warns once if Python has made them.

        Python may augment the same rows with other random numbers.

        Args:
            peers: the processes.
            totals: of each process, by rank.
            epoch: its number, from 0.

        Raises:
            RuntimeError: on every process; it names those that differ, and the first batch that does.
        """
        if all(_are_near(totals[0], other) for other in totals):
            return
        everyone = np.array(peers.gather("rows seen", self._samples.numpy().tolist(), "compare its batches"))
        peers.acknowledge("rows compared", "compare its batches")
        apart = [
            (number, step)
            for number in range(len(_KINDS))
            for step in range(_STEPS + 1)
            if not all(_are_near(everyone[0, number, step], other[number, step]) for other in everyone)
        ]
        number, step = apart[0] if apart else (0, _STEPS)
        batch = f"{step + 1}{' of the validation data' if _KINDS[number] == 'test' else ''}"
        others = [name for name, own in zip(peers.names, totals, strict=True) if not _are_near(totals[0], own)]
        message = (
            f"Received: other rows on {', '.join(others)} than on {peers.names[0]}, from batch {batch} of epoch "
            f"{epoch + 1} on. Each process cuts its part out of the global batch: where these differ, some rows "
            "are used twice and others never. Expected: the same batches on all. Give every random generator of the "
            "data the same seed on all processes (`np.random.default_rng(seed)`, `train_test_split(..., "
            "random_state=seed)`), or make the data after the strategy, with Python's or NumPy's global generators; or "
            "let one process write the data to files that all read; or give each worker rows of its own, with "
            "AutoShardPolicy.OFF."
        )
        if not everyone[0, number, step, 2]:
            raise RuntimeError(message)
        if peers.rank == 0 and is_new(self, "augmented rows"):
            warnings.warn(f"{message} Random numbers that rows are augmented with may differ.", stacklevel=2)


def _are_near(numbers: Sequence[float], others: Sequence[float]) -> bool:
    """Whether these are those of the same batches: each a number, a sum of sizes, and a flag."""
    numbers, others = np.reshape(numbers, [-1, 3]), np.reshape(others, [-1, 3])
    scale = np.maximum(np.maximum(np.abs(numbers[:, 1]), np.abs(others[:, 1]))[:, None], 1e-9)
    return bool(np.all(np.abs(numbers - others)[:, :2] <= _SAME_NUMBERS * scale))


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

    def keep_sum(self, total: tf.Tensor) -> None:
        """Keeps the weighted sum over all workers; with several steps in an execution, the largest."""
        self._agreed.assign(tf.maximum(self._agreed.read_value(), total))


def restore_sigterm_handler() -> None:
    """Puts Python's handler of SIGTERM back.

    TensorFlow's preemption notifier, which comes with a multi-worker strategy, swallows the signal: a job could only be
    killed. It begins in a thread of its own, at some time after the strategy was made, so this is called again later.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and (handler := signal.getsignal(signal.SIGTERM)) is not None:
        signal.signal(signal.SIGTERM, handler)
