"""Training with parameter servers under `tfdist run --ps`: it survives the loss of each kind of process."""

from __future__ import annotations

import pytest

from tests.launcher.test_pipeline import told

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

DEADLINE = 180.0
_undisturbed: dict[str, dict] = {}

# arguments: mode, what is killed (or "nothing", "preempt"), name of the backup
TRAINING = """
    import threading
    import keras, numpy as np, tfdist

    mode, victim, folder = sys.argv[1:]
    keras.utils.set_random_seed(5)
    strategy = tfdist.ParameterServerStrategy(mode=mode, max_inflight=1)
    with strategy.scope():
        hidden = [keras.layers.Dense(16, activation="relu"), keras.layers.Dropout(0.2), keras.layers.Dense(16)]
        model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(2)])
        model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 8)).astype("float32"), rng.normal(size=(64, 2)).astype("float32")
    workers = strategy._dispatcher.workers
    done_by_first_life = None

    def kill(name):
        events = map(json.loads, Path(os.environ["TFDIST_LOG_DIR"], "events.jsonl").open())
        (start,) = (event for event in events if event["event"] == "start")
        os.kill(start["processes"][name], signal.SIGKILL)

    def strike(step, logs=None):
        global victim, done_by_first_life
        iterations = int(model.optimizer.iterations)
        if victim != "nothing" and iterations == 13 and os.environ["TFDIST_RESTART"] == "0":
            if victim == "preempt":
                os.kill(os.getppid(), signal.SIGTERM)
            elif victim == "midstep":
                threading.Timer(rng.uniform(0, 0.02), kill, ["worker 1"]).start()
            else:
                kill(victim)
            victim = "nothing"
        if workers[1].lives and not workers[1].is_lost and done_by_first_life is None:
            done_by_first_life = workers[1].done
        if iterations == 90 and workers[1].lives and folder != "left":
            # The rest is for the worker that has come back.
            end = time.monotonic() + 60
            while workers[1].is_lost and time.monotonic() < end:
                time.sleep(0.05)

    callbacks = [tfdist.callbacks.BackupAndRestore("backup-" + folder, save_freq=3, asynchronous=False),
                 keras.callbacks.LambdaCallback(on_train_batch_begin=strike)]
    history = model.fit(x, y, batch_size=8, epochs=18, verbose=0, callbacks=callbacks)
    weights = [float(np.abs(w).sum()) for w in model.get_weights()]
    result = {"weights": weights, "loss": history.history["loss"], "iterations": int(model.optimizer.iterations)}
    again = None if done_by_first_life is None else workers[1].done - done_by_first_life
    print(json.dumps({"result": result, "lives": workers[1].lives, "lost": workers[1].is_lost, "again": again}))
"""

DATA_ON_WORKERS = """
    import keras, numpy as np, tensorflow as tf, tfdist

    strategy = tfdist.ParameterServerStrategy()
    x = np.random.default_rng(0).normal(size=(320, 8)).astype("float32")

    def shard(context):
        rows = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
        return rows.shard(context.num_input_pipelines, context.input_pipeline_id).batch(16)

    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[keras.metrics.MeanMetricWrapper(lambda y, p: y[:, 0] * 0 + 1, name="one")])

    def kill(epoch, logs):
        if epoch == 2 and os.environ["TFDIST_RESTART"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    counts = []
    count = lambda epoch, logs: counts.append(float(model.metrics[1].metrics[0].count.numpy()))
    callbacks = [tfdist.callbacks.BackupAndRestore("backup", asynchronous=False),
                 keras.callbacks.LambdaCallback(on_epoch_begin=kill, on_epoch_end=count)]
    model.fit(shard, epochs=4, verbose=0, callbacks=callbacks)
    print(json.dumps({"iterations": int(model.optimizer.iterations), "rows": counts}))
"""


WORDS = """
    import keras, numpy as np, tensorflow as tf, tfdist

    strategy = tfdist.ParameterServerStrategy()
    with strategy.scope():
        words = keras.Input((3,), dtype="string")
        ids = keras.layers.StringLookup(vocabulary=list("abcdefg"))(words)
        hidden = keras.layers.Flatten()(keras.layers.Embedding(8, 4)(ids))
        model = keras.Model(words, keras.layers.Dense(1)(hidden))
        model.compile("sgd", "mse", steps_per_execution=2)
    letters = np.random.default_rng(0).choice(list("abcdefg"), (64, 3))
    data = tf.data.Dataset.from_tensor_slices((letters, np.ones((64, 1), "float32"))).batch(4).repeat()
    worker = strategy._dispatcher.workers[0]
    seen = []

    def strike(step, logs=None):
        if not seen and step > 20:
            events = map(json.loads, Path(os.environ["TFDIST_LOG_DIR"], "events.jsonl").open())
            (start,) = (event for event in events if event["event"] == "start")
            os.kill(start["processes"]["worker 0"], signal.SIGKILL)
            seen.append(worker.done)

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=strike)]
    model.fit(data, steps_per_epoch=200, verbose=0, callbacks=callbacks)
    print(json.dumps({"iterations": int(model.optimizer.iterations), "again": worker.done - seen[0]}))
"""


def run(warm_launch, mode: str, victim: str, folder: str, *options: str):
    started = warm_launch(TRAINING, "-n", "2", "--ps", "1", *options, arguments=[mode, victim, folder])
    result = started.finish(DEADLINE)
    started.assert_nothing_is_left()
    return result


def undisturbed_run(warm_launch, mode: str) -> dict:
    """The result without a fault, which several tests compare with."""
    if mode not in _undisturbed:
        _undisturbed[mode] = told(run(warm_launch, mode, "nothing", "undisturbed"))["result"]
    return _undisturbed[mode]


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_lost_processes_cost_nothing(warm_launch, mode) -> None:
    undisturbed = undisturbed_run(warm_launch, mode)
    assert undisturbed["iterations"] == 144
    assert undisturbed["loss"][-1] < 0.9 * undisturbed["loss"][0]

    worker = run(warm_launch, mode, "worker 1", "worker")
    seen = told(worker)
    assert_same(seen["result"], undisturbed)
    assert seen["lives"] >= 1 and not seen["lost"]
    assert seen["again"] > 0, "the worker that came back has got nothing to do"
    assert "worker 1 was killed by SIGKILL" in worker.err and "started again (replacement 1 of 3)" in worker.err

    # The same is done about both of them, in both modes.
    for victim in {"async": ["chief 0"], "sync": ["ps 0"]}[mode]:
        result = run(warm_launch, mode, victim, victim.replace(" ", ""))
        assert_same(told(result)["result"], undisturbed)
        assert f"{victim} was killed by SIGKILL" in result.err
        assert "restart 1 of 3: training again after " in result.err


def test_a_gradient_never_counts_twice(warm_launch) -> None:
    undisturbed = undisturbed_run(warm_launch, "sync")
    seen = told(run(warm_launch, "sync", "midstep", "killed"))
    assert_same(seen["result"], undisturbed)
    assert seen["lives"] >= 1  # once more if a step is sent while it comes back


@pytest.mark.nightly
def test_sigterm_saves_and_the_next_start_goes_on(warm_launch) -> None:
    undisturbed = undisturbed_run(warm_launch, "async")
    preempted = run(warm_launch, "async", "preempt", "preempted")
    assert preempted.code == 77, f"{preempted.out[-3000:]}\n{preempted.err[-3000:]}"
    assert_same(told(run(warm_launch, "async", "nothing", "preempted"))["result"], undisturbed)


@pytest.mark.nightly
def test_data_on_the_workers_begin_anew_with_the_epoch(warm_launch) -> None:
    result = warm_launch(DATA_ON_WORKERS, "-n", "2", "--ps", "1").finish(DEADLINE)
    seen = told(result)
    assert seen["iterations"] == 80
    assert len(seen["rows"]) in (2, 3) and set(seen["rows"]) == {320.0}, "each epoch uses each row once"
    assert "restart 1 of 3: training again after " in result.err
    assert "BackupAndRestore saves at the ends of epochs only" in result.out


@pytest.mark.nightly
def test_a_worker_that_comes_back_has_tables_again(warm_launch) -> None:
    """The only worker: without a table it would fail each step, and the run would not end."""
    seen = told(warm_launch(WORDS, "-n", "1", "--ps", "1").finish(DEADLINE))
    assert seen["iterations"] >= 200 and seen["again"] > 50


def assert_same(found: dict, expected: dict) -> None:
    """The workers' parts of a metric are added up as they come; all else is the same, bit for bit."""
    assert found["iterations"] == expected["iterations"]
    assert found["weights"] == expected["weights"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
