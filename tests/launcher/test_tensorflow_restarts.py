"""Restarts of a Keras fit under a multi-worker strategy."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.launcher.test_goodput import goodput
from tests.launcher.training import of_kind

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(900)]

FIT = """
    import keras, numpy as np, tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)

    class Fault(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if EPOCHS > 2: time.sleep(0.1)
            if os.environ["TFDIST_RESTART"] == "0" and index == 1 and batch == 6: FAULT

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = np.random.default_rng(0).normal(size=(39, 4)), np.ones((39, 1))
    callbacks = [Fault(), tfdist.callbacks.BackupAndRestore('FOLDER', save_freq=2, asynchronous=False)]
    history = model.fit(*data, batch_size=4, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    print("loss", *history.history["loss"])
"""


def losses(warm_launch, folder: str, fault: str, *options: str, epochs: int = 2) -> tuple[str, str]:
    """The losses of a run with a fault at the seventh step, and what the launcher said."""
    script = FIT.replace("FAULT", fault).replace("FOLDER", f"backup-{folder}").replace("EPOCHS", str(epochs))
    started = warm_launch(script, "--log-dir", folder, *options)
    result = started.finish(400)
    assert result.code == 0, result.err
    started.assert_nothing_is_left()
    (line,) = [line for line in result.out.splitlines() if "loss" in line]
    return line, result.err


@pytest.mark.nightly
def test_neither_a_killed_worker_nor_a_hang_changes_the_result(warm_launch) -> None:
    expected, said = losses(warm_launch, "undisturbed", "pass")
    assert "restart" not in said
    after_kill, said = losses(warm_launch, "killed", "os.kill(os.getpid(), signal.SIGKILL)")
    assert re.search(
        r"worker 1 was killed by SIGKILL at step 7; restart 1 of 3\n"
        r"tfdist: restart 1 of 3: training again after \d+\.\d s, [1-3] step",
        said,
    )
    after_hang, said = losses(warm_launch, "hung", "time.sleep(1000)", "--hang-timeout", "20")
    # Both fall silent at the same moment: which one is the cause cannot be seen from outside.
    assert re.search(
        r"worker [01] stands still at step 7.* \(--hang-timeout\); restart 1 of 3\n"
        r"tfdist: restart 1 of 3: training again",
        said,
    )
    assert [after_kill, after_hang] == [expected, expected]


@pytest.mark.nightly
def test_a_run_that_shrinks_grows_again_and_its_result_is_the_same(warm_launch, tmp_path) -> None:
    options = ("--log-dir", "logs", "-n", "1:2", "--regrow-after", "2")
    expected, _ = losses(warm_launch, "undisturbed", "pass", epochs=12)
    seen, _ = losses(warm_launch, "killed", "os.kill(os.getpid(), signal.SIGKILL)", *options, epochs=12)
    events = map(json.loads, (tmp_path / "logs" / "events.jsonl").read_text().splitlines())
    workers = [event["workers"] for event in events if event["event"] == "start"]
    assert workers == [2, 1, 2]
    numbers = [[float(word) for word in line.split("loss ")[1].split()] for line in (seen, expected)]
    np.testing.assert_allclose(*numbers, rtol=1e-5)


KERAS_BACKUP = """
    import keras, numpy as np, tensorflow as tf, tfdist

    class Fault(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.05)
            if os.environ["TFDIST_RESTART"] == "0" and index == 1 and int(self.model.optimizer.iterations) == 34:
                os.kill(os.getpid(), signal.SIGKILL)

    keras.utils.set_random_seed(1)
    with tfdist.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.random.default_rng(0).normal(size=(40, 4)), np.ones((40, 1))
    backup = keras.callbacks.BackupAndRestore("backup")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).filter(lambda x, y: True)  # of unknown size
    model.fit(data, epochs=5, verbose=0, callbacks=[Fault(), backup])
"""


@pytest.mark.nightly
def test_a_backup_of_keras_counts_as_one(warm_launch) -> None:
    """It is taken up behind three epochs of ten steps, and not at the beginning."""
    started = warm_launch(KERAS_BACKUP)
    result = started.finish(400)
    assert result.code == 0, result.err
    assert re.search(r"restart 1 of 3: training again after \d+\.\d s, 4 steps redone\n", result.err), result.err
    (again,) = of_kind(started.folder, "training-again")
    assert (again["resumed_step"], again["steps_redone"]) == (30, 4)
    (failure,) = goodput(started)["interruptions"]
    assert failure["steps_redone"] == 4
    assert failure["redone"] > 0


@pytest.mark.timing
def test_steps_that_are_done_again_take_a_part_of_the_time(warm_launch) -> None:
    started = warm_launch(KERAS_BACKUP)
    assert started.finish(400).code == 0
    report = goodput(started)
    (failure,) = report["interruptions"]
    assert 0 < failure["redone"] < report["seconds"]["training"]


ON_ONE_RANK = """
    import keras, numpy as np, tfdist

    class Own(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if index == 1 and batch == 3:
                self.model.predict(x, verbose=0)

    with tfdist.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.random.default_rng(0).normal(size=(40, 4)), np.ones((40, 1))
    model.fit(x, y, batch_size=4, epochs=5, verbose=0, callbacks=[Own()])
"""


@pytest.mark.nightly
def test_a_callback_that_calls_predict_on_one_rank(warm_launch) -> None:
    result = warm_launch(ON_ONE_RANK, "--hang-timeout", "20", "--max-restarts", "0").finish(400)
    assert result.code == 124, result.err
    # Which of them was silent first depends on how long predict takes to begin.
    assert re.search(
        "stands still at step 4(, as do all others| and was the first to fall silent): worker 1 waits for the others "
        "to start fit, evaluate or predict, and worker 0 does not come to that. Look for a call that only some "
        "processes make",
        result.err,
    ), result.err
