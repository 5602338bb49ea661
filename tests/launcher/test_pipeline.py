"""Pipelines over real processes: they train what one process trains, and survive the loss of a stage."""

from __future__ import annotations

import json

import pytest

from tests.tiers import daily

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

DEADLINE = 180.0

TRANSPARENT = """
    import json, os
    import keras, numpy as np, tensorflow as tf, tfdist
    from keras import layers as L

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(37, 8)).astype("float32"), rng.normal(size=(37, 2)).astype("float32")
    tokens = rng.integers(1, 20, size=(37, 5))
    tokens[::2, 3:] = 0

    def skips():
        i = keras.Input((8,))
        a = L.Dense(16, activation="relu", kernel_regularizer="l2")(i)
        b = L.Dense(16, activation="tanh")(a)
        c = L.Dense(16)(L.Add()([a, b]))
        model = keras.Model(i, [L.Dense(2, name="p")(c), L.Dense(2, name="q")(L.Add()([a, c]))])
        model.compile(keras.optimizers.AdamW(0.01, global_clipnorm=0.1), ["mse", "mae"], metrics=[["mae"], ["mse"]])
        return model

    def masked():
        i = keras.Input((5,), dtype="int32")
        h = L.LSTM(8, return_sequences=True)(L.Embedding(20, 8, mask_zero=True)(i))
        model = keras.Model(i, L.Dense(20)(h))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        return model

    class Pairwise(keras.Model):
        def train_step(self, data):
            features, targets = data
            with tf.GradientTape() as tape:
                p = self(features, training=True)
                loss = tf.reduce_mean((p - targets) ** 2) + tf.reduce_mean((p[:, None] - p[None]) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    def pairwise():
        i = keras.Input((8,))
        h = L.Dense(8, activation="relu")(L.Dense(8, activation="relu")(i))
        model = Pairwise(i, L.Dense(2)(h))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    options = json.loads(sys.argv[1])
    strategy = tfdist.PipelineStrategy(num_microbatches=4, **options)
    gaps = {}
    for build, data in ((skips, (x, [y, y])), (masked, (tokens, tokens)), (pairwise, (x, y)))[:int(sys.argv[2])]:
        found = tfdist.testing.assert_transparent(strategy, build, data, batch_size=16)
        gaps[build.__name__] = max(found.values())
    with strategy.scope():
        model = skips()
    model.fit(x, [y, y], batch_size=16, verbose=0)
    owners = {v.path: tf.DeviceSpec.from_string(v.value.device).task for v in model.variables}
    slots = {v.path: tf.DeviceSpec.from_string(v.value.device).task for v in model.optimizer.variables}
    schedule = strategy._prepare(model).schedule.name
    seen = {"gaps": gaps, "owners": owners, "slots": slots, "devices": strategy.devices, "schedule": schedule}
    print(json.dumps(seen), flush=True)
"""

RESUMED = """
    import json, os, signal
    import keras, numpy as np, tfdist

    keras.utils.set_random_seed(5)
    strategy = tfdist.PipelineStrategy(num_microbatches=2)
    with strategy.scope():
        hidden = [keras.layers.Dense(16, activation="relu"), keras.layers.Dropout(0.2), keras.layers.Dense(16)]
        model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(2)])
        model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 8)).astype("float32"), rng.normal(size=(64, 2)).astype("float32")

    def kill(step, logs=None):
        if "kill" in sys.argv and int(model.optimizer.iterations) == 13 and os.environ["TFDIST_RESTART"] == "0":
            events = map(json.loads, Path(os.environ["TFDIST_LOG_DIR"], "events.jsonl").open())
            (start,) = (event for event in events if event["event"] == "start")
            os.kill(start["processes"]["worker 1"], signal.SIGKILL)

        if "preempt" in sys.argv and int(model.optimizer.iterations) == 13:
            os.kill(os.getppid(), signal.SIGTERM)
            sys.argv.remove("preempt")

    callbacks = [tfdist.callbacks.BackupAndRestore("backup-" + sys.argv[2], save_freq=3, asynchronous=False),
                 keras.callbacks.LambdaCallback(on_train_batch_begin=kill)]
    history = model.fit(x, y, batch_size=16, epochs=6, verbose=0, callbacks=callbacks)
    weights = [float(np.abs(w).sum()) for w in model.get_weights()]
    print(json.dumps({"weights": weights, "loss": history.history["loss"]}), flush=True)
"""


def told(result) -> dict:
    """What the chief has printed last."""
    assert result.code == 0, f"{result.out[-3000:]}\n{result.err[-3000:]}"
    line = [line for line in result.out.splitlines() if "{" in line][-1]
    return json.loads(line[line.index("{") :])


def stages(launch, program: str, count: int, *arguments: str, options: tuple[str, ...] = ()):
    started = launch(program, "--stages", str(count), *options, arguments=arguments)
    result = started.finish(DEADLINE)
    started.assert_nothing_is_left()
    return result


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("models", "options"),
    daily([(1, {}), (3, {"schedule": "gpipe", "memory": "recompute", "weight_gradients": "batched"})], "1"),
)
def test_two_processes_equal_one(warm_launch, models: int, options: dict) -> None:
    seen = told(stages(warm_launch, TRANSPARENT, 2, json.dumps(options), str(models)))
    assert list(seen["gaps"]) == ["skips", "masked", "pairwise"][:models]
    assert max(seen["gaps"].values()) < 1e-5
    assert seen["schedule"] == options.get("schedule", "eager-1f1b")
    assert [["task:0" in d, "task:1" in d] for d in seen["devices"][0]] == [[True, False], [False, True]]
    # Half of the layers are in the other process, and each slot is where its weight is.
    assert sorted(set(seen["owners"].values())) == [0, 1]
    for path, task in seen["owners"].items():
        slots = {owner for slot, owner in seen["slots"].items() if path.replace("/", "_") in slot}
        assert slots == {task}, path


def test_a_lost_stage_costs_nothing(warm_launch) -> None:
    options = ("--max-restarts", "1")
    undisturbed = told(stages(warm_launch, RESUMED, 2, "leave", "alone", options=options))
    result = stages(warm_launch, RESUMED, 2, "kill", "killed", options=options)
    resumed = told(result)
    assert len(undisturbed["loss"]) == 6
    assert resumed == undisturbed
    assert (
        "worker 1 was killed by SIGKILL at step 13; restart 1 of 1\ntfdist: restart 1 of 1: training again after "
        in result.err
    )


@pytest.mark.nightly
def test_sigterm_saves_and_the_next_start_goes_on(warm_launch) -> None:
    undisturbed = told(stages(warm_launch, RESUMED, 2, "leave", "alone"))
    preempted = stages(warm_launch, RESUMED, 2, "preempt", "preempted")
    assert preempted.code == 77, f"{preempted.out[-3000:]}\n{preempted.err[-3000:]}"
    assert '{"weights"' not in preempted.out
    assert told(stages(warm_launch, RESUMED, 2, "leave", "preempted")) == undisturbed
