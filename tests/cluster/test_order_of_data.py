"""A dataset without an order of its own gets one, the same on all workers; one that cannot have one is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.cluster.attempt import error_of, logged
from tests.cluster.counting import EPOCHS, ROWS, SIZE, times_seen
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster
FILES = 4


# Each has rows of its own in the one dataset of all of them: a fit takes long to build.
TOGETHER = ("shuffle", "shuffled files", "sample", "filter")


def pipelines() -> dict[str, Callable[[], Any]]:
    """Datasets of row numbers, each of which has another order whenever it is read."""
    import tensorflow as tf

    from tfdist.compat.upstream import context

    numbers = tf.data.Dataset.range

    def late(row: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(_after_a_while, [row], tf.int64), [])

    def file(number: Any) -> Any:
        first = number * (ROWS // FILES)
        return numbers(first, first + ROWS // FILES)

    def as_tfds_reads() -> Any:
        files = numbers(FILES).shuffle(FILES)
        options = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": False}
        return files.interleave(lambda number: file(number).map(late), cycle_length=FILES, **options)

    def without_seeds(make: Callable[[], Any]) -> Any:
        # As if it were built before the strategy, which Horovod's allows.
        eager = context.context()
        seed, eager._seed = eager._seed, None
        try:
            return make()
        finally:
            eager._seed = seed

    return {
        "interleave": as_tfds_reads,
        "shuffle": lambda: without_seeds(lambda: numbers(ROWS).shuffle(ROWS)),
        "shuffled files": lambda: without_seeds(lambda: numbers(FILES).flat_map(lambda n: file(n).shuffle(ROWS))),
        "sample": lambda: without_seeds(
            lambda: tf.data.Dataset.sample_from_datasets([numbers(ROWS // 2), numbers(ROWS // 2, ROWS)])
        ),
        # Some rows, others each time: the same number of steps.
        "filter": lambda: without_seeds(
            lambda: (
                numbers(2 * ROWS)
                .map(lambda n: (n % ROWS, tf.random.uniform([]) < 0.5), num_parallel_calls=4)
                .filter(lambda n, kept: kept)
                .map(lambda n, kept: n)
                .take(SIZE)
            )
        ),
    }


def batches(rows: Any, among: int) -> Any:
    """What `times_seen` is given: batches of rows, told apart among so many."""
    import tensorflow as tf

    return rows.map(lambda row: (tf.one_hot(row, among), tf.zeros([1]))).batch(SIZE)


def _after_a_while(row: Any) -> Any:
    time.sleep(0.003 * np.random.default_rng().random())
    return row


def seen() -> dict[str, Any]:
    """Runs on every process: how often each row is seen; what is said about it, and what is refused."""
    import tensorflow as tf

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=300)
    found: dict[str, Any] = {}
    made = {name: make() for name, make in pipelines().items()}
    alone = batches(made["interleave"], ROWS)
    found["said"] = logged(lambda: found.update(interleave=times_seen(strategy, alone)))
    rows = made[TOGETHER[0]]
    for at, name in enumerate(TOGETHER[1:], start=1):
        rows = rows.concatenate(made[name].map(lambda row, first=at * ROWS: first + row))
    among = len(TOGETHER) * ROWS
    together: list[float] = []
    found["said again"] = logged(lambda: together.extend(times_seen(strategy, batches(rows, among), rows=among)))
    found.update({name: together[at * ROWS : (at + 1) * ROWS] for at, name in enumerate(TOGETHER)})
    snapshot = tf.data.Dataset.from_tensors((tf.zeros([ROWS]), tf.zeros([1]))).snapshot("never made").batch(1)
    found["refused"] = error_of(times_seen, strategy, snapshot)
    strategy._peers.acknowledge("refused", "end together: who is gone is another error")
    return found


@pytest.mark.timeout(150)
def test_every_row_is_seen_once_an_epoch():
    chief, other = run_local(seen, workers=2, timeout=120)
    for name in ("interleave", "shuffle", "shuffled files", "sample"):
        assert chief[name] == other[name] == pytest.approx([EPOCHS] * ROWS), name
    # As many rows as were taken, each a whole number of times.
    assert sum(chief["filter"]) == pytest.approx(EPOCHS * SIZE)
    assert chief["filter"] == other["filter"] == pytest.approx(np.round(chief["filter"]))
    (said,) = [line for line in chief["said"] if "order" in line]
    assert said.startswith("The dataset has no order of its own (ParallelInterleave, deterministic=False)")
    assert not [line for line in other["said"] + chief["said again"] if "order" in line]
    for found in (chief, other):
        kind, message = found["refused"]
        assert kind == "ValueError"
        assert "Snapshot returns rows in an order that is decided elsewhere" in message
        assert "Expected: cache() keeps rows in memory" in message
