"""Restarts of a Keras fit under a multi-worker strategy."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

FIT = """
    import keras, numpy as np, tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)

    class Fault(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if os.environ["TFDIST_RESTART"] == "0" and index == 1 and batch == 6: FAULT

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = np.random.default_rng(0).normal(size=(40, 4)), np.ones((40, 1))
    callbacks = [Fault(), tfdist.callbacks.BackupAndRestore('FOLDER', save_freq=2, asynchronous=False)]
    history = model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    print("loss", *history.history["loss"])
"""


def losses(warm_launch, folder: str, fault: str, *options: str) -> tuple[str, str]:
    """The losses of a run with a fault at the seventh step, and what the launcher said."""
    script = FIT.replace("FAULT", fault).replace("FOLDER", f"backup-{folder}")
    started = warm_launch(script, "--log-dir", folder, *options)
    result = started.finish(120)
    assert result.code == 0, result.err
    started.assert_nothing_is_left()
    (line,) = [line for line in result.out.splitlines() if "loss" in line]
    return line, result.err


def test_neither_a_killed_worker_nor_a_hang_changes_the_result(warm_launch) -> None:
    expected, said = losses(warm_launch, "undisturbed", "pass")
    assert "restart" not in said
    after_kill, said = losses(warm_launch, "killed", "os.kill(os.getpid(), signal.SIGKILL)")
    assert re.search(
        r"worker 1 was killed by SIGKILL at step 7; restart 1 of 3\n"
        r"tfdist: restart 1 of 3: training again after \d+\.\d s, [1-3] step",
        said,
    )
    after_hang, said = losses(warm_launch, "hung", "time.sleep(1000)", "--hang-timeout", "4")
    # Both fall silent at the same moment: which one is the cause cannot be seen from outside.
    assert re.search(
        r"worker [01] stands still at step 7.* \(--hang-timeout\); restart 1 of 3\n"
        r"tfdist: restart 1 of 3: training again",
        said,
    )
    assert [after_kill, after_hang] == [expected, expected]
