"""The launcher with TensorFlow itself in the processes."""

from __future__ import annotations

import signal

import pytest

from tests.tiers import daily

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(900)]

ALL_REDUCE = """
    import tensorflow as tf
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def step():
        def replica():
            return tf.distribute.get_replica_context().all_reduce("sum", tf.constant(index + 1.0))
        return strategy.run(replica)

    for number in range(COUNT):
        print("sum", float(step()), flush=True)
        if number == 5: Path(name).touch()
        if number == 5 and index == 1: LAST
"""


def script(count: int, last: str) -> str:
    return ALL_REDUCE.replace("COUNT", str(count)).replace("LAST", last)


@pytest.mark.parametrize(
    ("last", "code", "words"),
    daily(
        [
            (
                "raise ValueError('the culprit')",
                1,
                ["worker 1 failed with exit code 1;", "\n  ValueError: the culprit\n"],
            ),
            ("os.kill(os.getpid(), signal.SIGKILL)", 137, ["worker 1 was killed by SIGKILL (exit code 137"]),
        ],
        "os.kill(os.getpid(), signal.SIGKILL)",
    ),
)
def test_the_culprit_is_named_not_its_peer(warm_launch, last: str, code: int, words: list[str]) -> None:
    started = warm_launch(script(10_000_000, last), "-n", "2")
    result = started.finish(240)
    assert result.code == code, result.err
    assert "[worker 0] sum 3.0\n" * 5 in result.out
    for word in words:
        assert word in result.err
    started.assert_nothing_is_left()


def test_sigterm_that_tensorflow_swallows(warm_launch) -> None:
    started = warm_launch(script(10_000_000, "pass"), "-n", "2", "--grace", "2")
    started.wait_for_file("worker-0", "worker-1", deadline=240)
    started.popen.send_signal(signal.SIGTERM)
    # All those sums take minutes.
    assert started.finish().code == 143
    started.assert_nothing_is_left()


@pytest.mark.nightly
def test_a_program_that_ends_where_others_wait_for_it_is_named(warm_launch) -> None:
    started = warm_launch(
        """
        import keras, numpy as np, tfdist
        strategy = tfdist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        if index == 1:
            sys.exit()
        model.fit(np.ones((8, 8)), np.ones((8, 1)), verbose=0)
        """,
        "-n",
        "2",
    )
    # Not after the half hour that is waited for a process that is there.
    result = started.finish(240)
    assert result.code == 1
    assert "to start fit, evaluate or predict, and that program has ended. Expected: every process makes" in result.err
    started.assert_nothing_is_left()
