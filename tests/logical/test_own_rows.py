"""`reduce_scatter` on the devices of one process: each replica gets its rows of the sum."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.steps.keras_step import global_replica
from tfdist.steps.reduce import all_gather, reduce_scatter

WAYS = {
    "graph": lambda make: tf.function(make)(),
    "branch": lambda make: tf.function(make)(),
    "eager": lambda make: make(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_rows_of_the_sum(four_devices: list[str], replicas: int, way: str) -> None:
    strategy = tfdist.MirroredStrategy(four_devices[:replicas])
    given = np.random.default_rng(5).integers(-9, 9, (replicas, 4 * replicas, 3)).astype("f")

    def on_replica() -> list[tf.Tensor]:
        own = tf.constant(given[global_replica()])

        def scatter() -> list[tf.Tensor]:
            rows = reduce_scatter([own, 2 * tf.cast(own, tf.bfloat16)])
            return [*rows, *all_gather(rows[:1])]

        return tf.cond(tf.constant(True), scatter, scatter) if way == "branch" else scatter()

    rows, twice, gathered = WAYS[way](lambda: strategy.run(on_replica))
    expected = given.sum(0)
    for factor, found in [(1, rows), (2, twice)]:
        parts = strategy.experimental_local_results(found)
        assert [part.shape for part in parts] == [(4, 3)] * replicas
        np.testing.assert_array_equal(np.concatenate([tf.cast(part, tf.float32) for part in parts]), factor * expected)
    for whole in strategy.experimental_local_results(gathered):
        np.testing.assert_array_equal(whole, expected)


def test_no_replica_adds_up_more_than_its_rows(mirrored: tf.distribute.Strategy) -> None:
    @tf.function
    def step() -> tf.Tensor:
        return mirrored.run(lambda: reduce_scatter([tf.random.normal([8, 3])])[0])

    added = [one for one in step.get_concrete_function().graph.get_operations() if one.type == "AddN"]
    assert [(one.device[-5:], one.outputs[0].shape) for one in added] == [("CPU:0", (4, 3)), ("CPU:1", (4, 3))]
