"""What the processes of a job tell each other outside of the training step.

Used when a dataset is distributed (every process must have the same one, and draw the same random numbers for it) and
when a file is saved. A collective would do as well only if every process made the same calls in the same order; here
each message has a name, every wait a deadline, and a late process is named.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.cluster.server import ProcessGoneError, Store
from tfdist.inspection.datasets import seeds
from tfdist.inspection.model_state import random_state, restore_random_state
from tfdist.inspection.program import check_same_program
from tfdist.supervision.progress import ProgressWriter

_log = logging.getLogger("tfdist")
_FIRST_POLL_SECONDS = 2.0
_POLL_SECONDS = 10.0
_LAST_WORDS_SECONDS = 5.0
# A network that comes back delivers what one connection has lost later than another's.
_IN_VAIN_SECONDS = 30.0
# In place of a rank, in the name of what rank 0 has collected.
_ALL = "all"

_SHARD_REMEDY = (
    "If the dataset is already cut for this process (`dataset.shard`), remove the cut, or set "
    "`options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF`."
)
_SAME_STEPS = (
    "With AutoShardPolicy.OFF or FILE, or distribute_datasets_from_function, each worker has its own rows, but as many "
    "steps as the others: cut or repeat the shards to one length, `dataset.take(n)`."
)
_SAME_CALLS = (
    "Expected: every process makes the same calls of fit, evaluate, predict and *_on_batch. Look for code that only "
    "one rank runs, and at that process' log."
)
_REMEDIES = {
    "number of rows": "Pass the arrays whole, and the same, on every process.",
    "number of batches": _SHARD_REMEDY,
    "components of a batch": _SHARD_REMEDY,
    "seeds of its shuffling": "Give `keras.utils.set_random_seed` the same seed on every process, and build the "
    "dataset after the strategy.",
}


class PeerTimeoutError(TimeoutError):
    """Another process of the job did not get where this one waits for it."""


class ProcessLeftError(ProcessGoneError):
    """The program of the process has come to its end."""


class Peers:
    """The processes of a multi-worker job.

    Args:
        names: a readable name per rank, such as "worker 1 (host:port)".
        rank: rank of this process.
        timeout: how long to wait for another process, in seconds.
        store: keeps what they tell each other.
    """

    def __init__(self, names: list[str], rank: int, timeout: float, store: Store):
        self.names = names
        self.rank = rank
        self.timeout = timeout
        self._store = store
        self._counts: dict[str, int] = {}
        self._told: set[str] = set()
        self._told_up_to: dict[tuple[str, str], int] = {}
        # How often each process has said that it waits, and for what it did last, as far as this one has heard.
        self._waits = [0] * len(names)
        self._last_waits: dict[int, list] = {}
        # What others wait for while this one exchanges: the count of the wait, and since when it is seen.
        self._waits_seen: dict[int, tuple[int, float]] = {}

    def tell(self, key: str, value: Any) -> None:
        """Publishes a JSON-serialisable value under a key that was never used before."""
        self._told.add(key)
        self._store.set(f"tfdist/{key}", json.dumps(value))

    def hear(
        self,
        key: str,
        rank: int,
        purpose: str,
        within: float | None = None,
        since: float | None = None,
        more: float = 0.0,
    ) -> Any:
        """Waits for a value that `rank` publishes.

        Args:
            key: what `rank` passes to `tell`.
            rank: who publishes it.
            purpose: what that process has to do for it; for messages.
            within: how long to wait, in seconds, if not `timeout`.
            since: when this process began to wait, on `time.monotonic`'s clock, if before this call.
            more: how much longer than `timeout` that process may need.

        Raises:
            PeerTimeoutError: if it does not come in time, or both processes wait for each other.
            ConnectionError: if that process is known to be gone.
        """
        began = time.monotonic() if since is None else since
        timeout = self.timeout + more if within is None else within
        poll = _FIRST_POLL_SECONDS
        while True:
            left = timeout - (time.monotonic() - began)
            is_gone = has_left = False
            try:
                text = self._store.get(f"tfdist/{key}", max(0.0, min(left, poll)), rank)
            except ProcessGoneError:
                text, is_gone = None, True
            if text is None:
                with contextlib.suppress(*([ConnectionError] if is_gone else [])):
                    has_left = self._store.get(f"tfdist/left/{rank}", 0.0) is not None
                    if has_left:  # what it did last comes before that
                        text = self._store.get(f"tfdist/{key}", 0.0)
            if text is not None:
                if poll != _FIRST_POLL_SECONDS:
                    self._tell_launcher("")
                return json.loads(text)
            if has_left:
                self._check_other_waits(rank, key, purpose)
                raise ProcessLeftError(
                    f"{self.names[self.rank]} waited for {self.names[rank]} to {purpose}, and that program has ended. "
                    f"{_SAME_CALLS}"
                )
            if is_gone:
                raise ProcessGoneError(
                    f"{self.names[self.rank]} waited for {self.names[rank]} to {purpose}, and that process is gone. "
                    "Look into its output for why."
                )
            if left <= 0:
                raise PeerTimeoutError(
                    f"{self.names[self.rank]} waited {timeout:.0f} s for {self.names[rank]} to {purpose}, and "
                    f"it did not. {_SAME_CALLS}"
                )
            if within is None:
                if poll == _FIRST_POLL_SECONDS:
                    self._tell_launcher(purpose)
                    self._say_that_it_waits(rank, key, purpose)
                self._check_other_waits(rank, key, purpose)
            poll = _POLL_SECONDS
            _log.warning("%s is waiting for %s to %s", self.names[self.rank], self.names[rank], purpose)

    def glance(self, key: str) -> Any:
        """What a process has told; `None` if none has, or rank 0 does not answer soon."""
        text = self._store.glance(f"tfdist/{key}")
        return None if text is None else json.loads(text)

    def forget(self, key: str) -> None:
        """Removes a value that was told, when all have heard it who need it."""
        self._store.delete(f"tfdist/{key}")

    def _tell_launcher(self, purpose: str) -> None:
        """Lets the launcher say where this process stands still, if it does."""
        if (writer := ProgressWriter.from_environment()) is not None:
            writer.waits(purpose)

    def _say_that_it_waits(self, rank: int, key: str, purpose: str) -> None:
        """In place of what it has said last: others ask for its last wait only, and for that at any time."""
        self._waits[self.rank] += 1
        is_main = threading.current_thread() is threading.main_thread()
        self._store.set(f"tfdist/waits/{self.rank}", json.dumps([self._waits[self.rank], rank, key, purpose, is_main]))

    def _check_other_waits(self, rank: int, key: str, purpose: str) -> None:
        """Ends what would last for ever: the process that this one waits for waits for something that comes later."""
        text = self._store.get(f"tfdist/waits/{rank}", 0.0)
        if text is not None:  # else it has not waited, or is about to say that it waits again
            self._waits[rank], *self._last_waits[rank] = json.loads(text)
        last = self._last_waits.get(rank)
        if last is None or last[0] != self.rank or self._has_told(last[1]):
            return
        if self._store.get(f"tfdist/{key}", 0.0) is not None:
            return  # it came after the last look, and before that process began to wait
        self.tell(f"parted/{self.rank}/{self._waits[self.rank]}", True)
        if self.rank == 0:
            # With this program ends what keeps the messages: the other one shall have seen the same.
            with contextlib.suppress(ProcessGoneError):
                self._store.get(f"tfdist/parted/{rank}/{self._waits[rank]}", 1.5 * _POLL_SECONDS, rank)
        raise PeerTimeoutError(
            f"{self.names[self.rank]} waits for {self.names[rank]} to {purpose}, while {self.names[rank]} waits for "
            f"{self.names[self.rank]} to {last[2]}. {_SAME_CALLS} A callback that calls evaluate, predict or fit has "
            "to do so on every process."
        )

    def waits_in_vain(self, rank: int) -> str:
        """Why a process that this one waits for in an exchange will not come: it waits for this one; "" if it does not.

        Asked now and then, outside of `hear`. What the other one has exchanged before that may still be on its way: it
        has to be the same wait for some time.
        """
        count, other, key, purpose, is_main = self.glance(f"waits/{rank}") or (0, -1, "", "", False)
        # A thread that writes a backup may wait while the main threads exchange.
        if other != self.rank or not is_main or self._has_told(key):
            return ""
        if self._waits_seen.get(rank, (0, 0.0))[0] != count:
            self._waits_seen[rank] = count, time.monotonic()
        if time.monotonic() - self._waits_seen[rank][1] < _IN_VAIN_SECONDS:
            return ""
        return (
            f"{self.names[rank]} waits for {self.names[self.rank]} to {purpose}. Every process has to make the same "
            "calls in the same order"
        )

    def decide(self, key: str, value: Any) -> Any:
        """The value that the first process which calls this has passed, the same on all; it waits for nobody."""
        return json.loads(self._store.decide(f"tfdist/{key}", json.dumps(value)))

    def leave(self) -> None:
        """Tells the others that this program ends, so that nobody waits for it."""
        # There may be nobody left who keeps messages; and where this host is cut off, TensorFlow's call never returns.
        with contextlib.suppress(Exception):
            teller = threading.Thread(target=self._tell_of_leaving, name="tfdist-leave", daemon=True)
            teller.start()
            teller.join(_LAST_WORDS_SECONDS)

    def wait_until_left(self, within: float) -> None:
        """Waits until the other programs end, for so many seconds at most; and for nobody when one of them is gone."""
        deadline = time.monotonic() + within
        # At the end of a program TensorFlow may raise anything.
        with contextlib.suppress(Exception):
            for rank in range(len(self.names)):
                if rank != self.rank:
                    self.hear(f"left/{rank}", rank, "end", within=deadline - time.monotonic())

    def _tell_of_leaving(self) -> None:
        with contextlib.suppress(Exception):
            self.tell(f"left/{self.rank}", True)

    def count(self, topic: str) -> int:
        """How often this process has come to a topic, this time included: the same on all that make equal calls."""
        number = self._counts[topic] = self._counts.get(topic, 0) + 1
        return number

    def gather(self, topic: str, value: Any, purpose: str) -> list:
        """Exchanges a value between all processes; returns the values by rank. All must call it equally often.

        Rank 0 collects the values and tells all of them at once, so that each of the others reads a single text. What
        it has read it deletes; what it has told, when all have come to the next exchange of this topic.

        Raises:
            PeerTimeoutError: if a process does not come in time.
            ConnectionError: if one is known to be gone.
        """
        number = self.count(topic)
        if len(self.names) == 1:
            return [value]
        place = f"{topic}/{number}"
        if self.rank == 0:
            return self._collect(topic, number, value, purpose)
        self._publish(topic, number, self.rank, value)
        # Rank 0 waits until its own time is over for the last of the others, and then says so.
        more = _LAST_WORDS_SECONDS if len(self.names) > 2 else 0.0
        try:
            told = self.hear(f"{place}/{_ALL}", 0, purpose, more=more)
        except PeerTimeoutError:
            last = self._last_waits.get(0)
            if last is None or not last[1].startswith(f"{place}/"):
                raise
            # It came later than this process, and its own time for another one is not over.
            told = self.hear(f"{place}/{_ALL}", 0, purpose, more=more)
        if isinstance(told, dict):
            raise (ProcessGoneError if told["gone"] else PeerTimeoutError)(told["error"])
        return [value if rank == self.rank else other for rank, other in enumerate(told)]

    def _collect(self, topic: str, number: int, value: Any, purpose: str) -> list:
        values, began = [value], time.monotonic()
        for rank in range(1, len(self.names)):
            try:
                values.append(self.hear(f"{topic}/{number}/{rank}", rank, purpose, since=began))
            except (PeerTimeoutError, ConnectionError) as error:
                # The others wait for this process, and hear why it has nothing to say.
                with contextlib.suppress(ConnectionError):
                    gone = not isinstance(error, PeerTimeoutError)
                    self._publish(topic, number, _ALL, {"error": str(error), "gone": gone})
                raise
        self._publish(topic, number, _ALL, values)
        for rank in range(1, len(values)):
            self.forget(f"{topic}/{number}/{rank}")
        if number > 1:
            self.forget(f"{topic}/{number - 1}/{_ALL}")
        return values

    def _publish(self, topic: str, number: int, who: int | str, value: Any) -> None:
        """As `tell`, for the value of a rank, or of all, in an exchange."""
        self._told_up_to[topic, str(who)] = number  # not each name: there is no end of them
        self._store.set(f"tfdist/{topic}/{number}/{who}", json.dumps(value))

    def _has_told(self, name: str) -> bool:
        place, _, who = name.rpartition("/")
        topic, _, number = place.rpartition("/")
        return name in self._told or (number.isdecimal() and int(number) <= self._told_up_to.get((topic, who), 0))

    def acknowledge(self, topic: str, purpose: str) -> None:
        """Comes after what all processes have heard, before they end: rank 0, which keeps the messages, ends last."""
        number = self.count(topic)
        if self.rank == 0:
            for rank in range(1, len(self.names)):
                self.hear(f"{topic}/{number}/{rank}", rank, purpose)
        else:
            # Rank 0 may have heard it, and be gone, before it could say so.
            with contextlib.suppress(ConnectionError):
                self.tell(f"{topic}/{number}/{self.rank}", True)

    def share_random_state(
        self, purpose: str = "start fit, evaluate or predict", program: Mapping[str, Any] | None = None
    ) -> None:
        """Gives every process the chief's random state: TensorFlow's, Python's and NumPy's global generators.

        tf.data's and Keras' shuffling draws from these. Processes that shuffle differently would train on some rows
        twice and on others never.

        Args:
            purpose: what the others have to do for it; for messages.
            program: what this process is about to do, as JSON can hold it; it travels along, as a digest.

        Raises:
            ValueError: on every process, if they are about to do different things.
        """
        own = random_state()
        told = self.gather("random-state", [_digest(own), _digest(program)], purpose)
        digests, programs = (set(of_all) for of_all in zip(*told, strict=True))
        if len(programs) > 1:
            everyone = self.gather("program", program, "compare its program")
            self.acknowledge("programs compared", "compare its program")
            check_same_program(self.names, everyone)
        if len(digests) == 1:
            return
        key = f"random-state/{self._counts['random-state']}/chief"
        if self.rank == 0:
            self.tell(key, own)
        else:
            restore_random_state(self.hear(key, 0, "tell its random state"))

    def check_same_strategy(self, arguments: Mapping[str, str]) -> None:
        """Compares the arguments of this process' strategy with the others'.

        Raises:
            ValueError: on every process, if some differ: they would exchange other numbers than the others expect.
        """
        everyone = self.gather("strategy", dict(arguments), "create the strategy")
        for name in arguments:
            values = [one[name] for one in everyone]
            if len(set(values)) > 1:
                raise ValueError(
                    f"The processes have different strategies. Received: {name}: {self._listing(values)}. Expected: "
                    "the same arguments on every process."
                )

    def _listing(self, values: Sequence[Any]) -> str:
        return "; ".join(f"{name}: {value}" for name, value in zip(self.names, values, strict=True))

    def check_same_dataset(
        self, dataset: tf.data.Dataset, manual: bool = False, rows: int | None = None, glance: Sequence[float] = ()
    ) -> None:
        """Compares this process' dataset with the others'. Warns of other numbers in arrays.

        Args:
            dataset: the dataset, with one element for each step.
            manual: whether the user has sharded the data: each process then has other rows, in any order.
            rows: number of rows, where it is known.
            glance: numbers that say what is in some of the rows, where that is known.

        Raises:
            ValueError: on every process, if they differ in size, structure or the seeds of their shuffling.
        """
        own_facts = {
            "number of rows": None if manual else rows,
            "number of batches": int(dataset.cardinality()),
            "components of a batch": str(_of_any_rows(dataset.element_spec) if manual else dataset.element_spec),
            "seeds of its shuffling": [] if manual else seeds(dataset),
        }
        told = self.gather("dataset", [own_facts, list(glance)], "pass its dataset to fit, evaluate or predict")
        everyone = [facts for facts, _ in told]
        for what in own_facts:
            values = [value[what] for value in everyone]
            if any(value != values[0] for value in values):
                remedy = _SAME_STEPS if manual else _REMEDIES[what]
                raise ValueError(
                    f"The processes have different datasets. Received: {what}: {self._listing(values)}. Expected: the "
                    f"same dataset of global batches on every process; tfdist gives each its rows. {remedy}"
                )
        different = [name for name, (_, numbers) in zip(self.names, told, strict=True) if not near(numbers, told[0][1])]
        if different and self.rank == 0:
            _log.warning(
                "Received: arrays with other numbers on %s than on %s, as many rows. Expected: the same arrays, whole, "
                "on every process: tfdist gives each its rows of them, so that of parts, such as x[rank::2], many rows "
                "are never used. Remove the cut; if the numbers are random, seed what makes them.",
                ", ".join(different),
                self.names[0],
            )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _of_any_rows(specification: Any) -> Any:
    """A specification of batches whose dense components may have any number of rows."""

    def of_any(one: Any) -> Any:
        is_dense = isinstance(one, tf.TensorSpec) and one.shape.rank
        return tf.TensorSpec([None, *one.shape[1:]], one.dtype) if is_dense else one

    return tf.nest.map_structure(of_any, specification)


def near(numbers: Sequence[float], others: Sequence[float]) -> bool:
    """Whether numbers tell of the same data. Machines may compute them with other last bits.

    Args:
        numbers: those of this process, say.
        others: those of another one.
    """
    return len(numbers) == len(others) and np.allclose(numbers, others, rtol=1e-3, atol=1e-3, equal_nan=True)
