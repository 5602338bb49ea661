"""`LocalStepsStrategy` on two processes, beside a simulation: a model for each worker, and the outer step by hand."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.cluster.attempt import Failure, attempt, error_of
from tests.tiers import daily
from tfdist.compression import PowerSGD, TopK
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]
ROWS, BATCH, EPOCHS = 83, 16, 3  # a last batch of three rows
OUTER = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}

# Kinds of programs: what is special about the model, and how it is trained.
KINDS = {
    "plain": {},
    "BatchNormalization": {"layers": "normalization"},
    "steps_per_execution": {"steps_per_execution": 2},
    "run_eagerly": {"run_eagerly": True},
    "jit_compile": {"jit_compile": True},
    "a step of its own, with two optimizers": {"model": "two optimizers"},
    "a step that updates a copy of the weights": {"model": "momentum encoder"},
    "accumulated gradients": {"accumulated": 2},
    "frozen layer": {"layers": "frozen"},
    "masks and sample weights": {"layers": "masked", "sample_weight": True},
    "a dataset": {"data": "dataset"},
    "an endless dataset": {"data": "endless"},
    "train_on_batch": {"data": "batches"},
    "last batch of one row": {"rows": 81},
    "a dataset of unknown size, of whole periods": {"data": "unknown", "rows": 64},
    "a copy of the weights that Keras takes for trainable": {"model": "trainable copy"},
    "a loss of gathered rows": {"model": "gathered"},
    "two fragments, BatchNormalization": {"fragments": 2, "layers": "normalization"},
    "four fragments, BatchNormalization": {"fragments": 4, "layers": "normalization"},
    "two fragments, steps_per_execution": {"fragments": 2, "steps_per_execution": 3},
    "PowerSGD": {"layers": "wide", "compression": ("PowerSGD", {"rank": 1})},
    "PowerSGD, BatchNormalization, a frozen layer": {
        "layers": "wide, normalization, frozen",
        "compression": ("PowerSGD", {"rank": 2}),
    },
    "TopK": {"layers": "wide", "compression": ("TopK", {"fraction": 0.05})},
    "TopK with momentum": {"layers": "wide", "compression": ("TopK", {"fraction": 0.1, "momentum_correction": True})},
}
DAILY = ("BatchNormalization", "a step of its own, with two optimizers", "last batch of one row")


def make_model(kind: dict[str, Any]) -> Any:
    """A compiled model, in float64."""
    import keras
    import tensorflow as tf

    class TwoOptimizers(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)
            self.other = keras.optimizers.Adam(0.02)

        def call(self, x: Any) -> Any:
            return self.second(self.first(x))

        def train_step(self, data: tuple) -> dict:
            x, y, *_ = data
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
            self.optimizer.apply(tape.gradient(loss, self.first.trainable_variables), self.first.trainable_variables)
            self.other.apply(tape.gradient(loss, self.second.trainable_variables), self.second.trainable_variables)
            return {"own": loss, "rows": tf.cast(tf.shape(x)[0], "float64")}

    class MomentumEncoder(keras.Sequential):
        def __init__(self, is_trainable: bool = False) -> None:
            super().__init__([keras.Input((5,)), keras.layers.Dense(1)])
            self.copy = keras.layers.Dense(1, trainable=is_trainable)
            self.copy.build((None, 5))

        def train_step(self, data: tuple) -> dict:
            logs = super().train_step(data)
            for slow, fast in zip(self.copy.weights, self.layers[0].weights, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
            return logs

    class Gathered(keras.Sequential):
        def __init__(self) -> None:
            super().__init__([keras.Input((5,)), keras.layers.Dense(1)])

        def train_step(self, data: tuple) -> dict:
            x, y, *_ = data
            context = tf.distribute.get_replica_context()
            with tf.GradientTape() as tape:
                out = self(x, training=True)
                rows = context.all_gather(out, axis=0)
                loss = tf.reduce_mean((y - out) ** 2) + 0.1 * tf.reduce_mean((rows - tf.reduce_mean(rows)) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"own": loss, "rows": context.all_reduce("SUM", tf.cast(tf.shape(x)[0], "float64"))}

    special = {
        "normalization": [keras.layers.BatchNormalization(momentum=0.8)],
        "frozen": [keras.layers.Dense(7, "tanh", trainable=False)],
        "masked": [keras.layers.Reshape((5, 1)), keras.layers.Masking(0.0), keras.layers.SimpleRNN(4)],
        "wide": [keras.layers.Dense(64, "tanh"), keras.layers.Dense(48, "tanh")],
        "wide, normalization, frozen": [
            keras.layers.Dense(64, "tanh"),
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.Dense(48, "tanh", trainable=False),
            keras.layers.Dense(40, "tanh"),
        ],
    }.get(kind.get("layers", ""), [])
    if "model" in kind:
        model = {
            "two optimizers": TwoOptimizers,
            "momentum encoder": MomentumEncoder,
            "trainable copy": functools.partial(MomentumEncoder, True),
            "gathered": Gathered,
        }[kind["model"]]()
        model(np.zeros((1, 5)))
    else:
        layers = [keras.layers.Dense(6, "tanh"), *special, keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *(layers[1:] if kind.get("layers") == "masked" else layers)])
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=kind.get("accumulated"))
    compiled = {name: kind[name] for name in ("steps_per_execution", "run_eagerly", "jit_compile") if name in kind}
    model.compile(optimizer, "mse", metrics=["mae"], **{"jit_compile": False, **compiled})
    return model


def make_data(kind: dict[str, Any]) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(1)
    x = generator.normal(size=(kind.get("rows", ROWS), 5))
    if kind.get("layers") == "masked":
        x[::3, 3:] = 0.0
    weights = [generator.uniform(0.5, 2.0, size=len(x))] if kind.get("sample_weight") else []
    return x, np.tanh(x @ generator.normal(size=(5, 1))), *weights


def method_of(kind: dict[str, Any]) -> Any:
    """A new method of compression, or `None`."""
    import tfdist

    name, options = kind.get("compression", (None, {}))
    return getattr(tfdist.compression, name)(**options) if name else None


def trained(name: str, sync_every: int, outer: dict[str, Any], epochs: int = EPOCHS, **more: Any) -> dict[str, Any]:
    """Trains under the strategy. Runs on every process."""
    import keras
    import tensorflow as tf

    import tfdist

    keras.config.set_floatx("float64")
    kind = KINDS[name]
    optimizer = functools.partial(keras.optimizers.SGD, **outer)
    times = {"start_timeout": 60, "peer_timeout": 300}
    options = {"fragments": kind.get("fragments", 1), "compression": method_of(kind)}
    strategy = tfdist.LocalStepsStrategy(sync_every, outer_optimizer=optimizer, **options, **times, **more)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = make_model(kind)
    data = make_data(kind)
    sums: list[float] = []

    class Sums(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            sums.append([float(np.sum(np.square(v))) for v in model.trainable_variables])

    dataset = tf.data.Dataset.from_tensor_slices(data).batch(BATCH)
    steps = -(-len(data[0]) // BATCH)
    history = {}
    if kind.get("data") == "batches":
        for _ in range(epochs):
            for i in range(steps):
                model.train_on_batch(*(array[i * BATCH : (i + 1) * BATCH] for array in data))
                Sums.on_train_batch_end(None, i)
    else:
        arguments = {"x": data[0], "y": data[1], "batch_size": BATCH, "shuffle": False}
        if kind.get("sample_weight"):
            arguments["sample_weight"] = data[2]
        if kind.get("data") == "dataset":
            arguments = {"x": dataset}
        elif kind.get("data") == "unknown":
            arguments = {"x": dataset.filter(lambda *_: True)}
        elif kind.get("data") == "endless":
            arguments = {"x": dataset.repeat(), "steps_per_epoch": steps}
        callbacks = [Sums()]
        history = model.fit(**arguments, epochs=epochs, verbose=0, callbacks=callbacks, validation_data=dataset).history
    return {
        "weights": model.get_weights(),
        "history": history,
        "evaluated": model.evaluate(dataset, verbose=0),
        "predicted": model.predict(data[0], batch_size=BATCH, verbose=0),
        "sums": sums,
    }


def simulated(name: str, sync_every: int, outer: dict[str, Any], epochs: int = EPOCHS) -> dict[str, Any]:
    """The same in one process: a model for each of two workers, trained by itself, and the outer step in NumPy."""
    import keras
    import tensorflow as tf

    from tests.compressed_by_hand import Largest, Low
    from tfdist.strategies.local_steps.sending import in_parts

    keras.config.set_floatx("float64")
    kind = {key: value for key, value in KINDS[name].items() if key not in ("data", "steps_per_execution")}
    data = make_data(kind)
    keras.utils.set_random_seed(3)
    model = make_model(kind)
    models = [model, make_model(kind)]
    models[1].set_weights(model.get_weights())
    copied = set(map(id, model.copy.weights)) if hasattr(model, "copy") else set()
    trainable = set(map(id, model.trainable_variables)) - copied
    is_trained = [id(v) in trainable for v in model.weights]
    momentum, base = [np.zeros(w.shape) for w in model.get_weights()], model.get_weights()
    kept = float(np.float32(outer.get("momentum", 0.0)))  # Keras has it from a float32
    method = method_of(kind)
    compress: Any = Low(method) if isinstance(method, PowerSGD) else Largest(method)
    if isinstance(method, TopK) and method.momentum_correction:
        compress, kept = Largest(method, outer["momentum"], outer["nesterov"]), 0.0
    places = [i for i, trained in enumerate(is_trained) if trained]
    parts = [
        [places[i] for i in part] for part in in_parts([base[i].size for i in places], KINDS[name].get("fragments", 1))
    ]
    counts, seen = np.zeros((2, len(parts))), np.zeros(2)
    sent: tuple | None = None

    def stepped(i: int, difference: np.ndarray) -> np.ndarray:
        gradient, rate = difference, outer["learning_rate"]
        momentum[i] = kept * momentum[i] - rate * gradient
        return base[i] + (kept * momentum[i] - rate * gradient if outer.get("nesterov") else momentum[i])

    def differences(part: int) -> list[dict]:
        return [{i: base[i] - one.get_weights()[i] for i in parts[part]} for one in models]

    def mean_of(part: int, own: list[dict], rows: np.ndarray) -> dict:
        share = rows / rows.sum()
        weighted = {i: [share[0] * own[0][i], share[1] * own[1][i]] for i in parts[part]}
        return {i: compress(i, pair) if method else sum(pair) for i, pair in weighted.items()}

    def send(part: int) -> None:
        nonlocal sent
        sent = part, differences(part), counts[:, part].copy()
        counts[:, part] = 0

    def receive() -> None:
        nonlocal sent
        if sent is None:
            return
        part, own, rows = sent
        means, sent = mean_of(part, own, rows), None
        weights = [one.get_weights() for one in models]
        for i in parts[part]:
            since = [of_worker[i] - (base[i] - learned[i]) for of_worker, learned in zip(weights, own, strict=True)]
            base[i] = stepped(i, means[i])
            for of_worker, more in zip(weights, since, strict=True):
                of_worker[i] = base[i] + more
        for one, values in zip(models, weights, strict=True):
            one.set_weights(values)

    def exchange() -> None:
        receive()
        weights, share = [one.get_weights() for one in models], seen / seen.sum()
        new = [share[0] * one + share[1] * other for one, other in zip(*weights, strict=True)]
        for part, places in enumerate(parts):
            if not counts[:, part].sum():  # it has just been received
                for i in places:
                    new[i] = base[i]
                continue
            for i, mean in mean_of(part, differences(part), counts[:, part]).items():
                new[i] = stepped(i, mean)
        for one in models:
            one.set_weights(new)
        base[:] = new
        counts[:] = seen[:] = 0

    turn = sync_every // len(parts)
    for _ in range(epochs):
        period = 0
        for begin in range(0, len(data[0]), BATCH):
            rows = min(BATCH, len(data[0]) - begin)
            middle = begin + -(-rows // 2)
            for worker, (first, last) in enumerate([(begin, middle), (middle, begin + rows)]):
                if last > first:
                    models[worker].train_on_batch(*(array[first:last] for array in data))
                    counts[worker] += last - first
                    seen[worker] += last - first
            period += 1
            if len(parts) > 1 and period % turn == 0:
                receive()
                send((period // turn - 1) % len(parts))
            elif len(parts) == 1 and period % turn == 0:
                exchange()
                period = 0
        if period and KINDS[name].get("data") != "batches":
            exchange()
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(BATCH)
    return {
        "weights": model.get_weights(),
        "evaluated": model.evaluate(dataset, verbose=0),
        "predicted": model.predict(data[0], batch_size=BATCH, verbose=0),
    }


def all_trained(names: list[str]) -> dict[str, dict[str, Any]]:
    """Runs on every process."""
    return {name: trained(name, 4, OUTER) for name in names}


def all_trained_by_members(names: list[str]) -> dict[str, dict[str, Any]]:
    """Runs on every process: where workers may come and go, and none does."""
    return {name: attempt(name, trained, name, 4, OUTER, min_workers=1) for name in names}


def all_simulated(names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: simulated(name, 4, OUTER) for name in names}


@functools.cache
def simulation(names: tuple[str, ...]) -> list[dict[str, dict[str, Any]]]:
    return run_local(all_simulated, 1, args=(list(names),), timeout=360)


@functools.cache
def results(names: tuple[str, ...], train: Callable = all_trained) -> list[dict[str, dict[str, Any]]]:
    """What two workers have found, and the simulation."""
    return [*run_local(train, 2, args=(list(names),), timeout=360), *simulation(names)]


def gap(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of weights and predictions."""
    pairs = [*zip(found["weights"], expected["weights"], strict=True), (found["predicted"], expected["predicted"])]
    pairs.append((np.array(found["evaluated"]), np.array(expected["evaluated"])))
    assert all(np.isfinite(one).all() for one, _ in pairs)
    return max(float(np.abs(one - other).max()) for one, other in pairs)


@pytest.mark.parametrize("name", daily(list(KINDS), *DAILY))
def test_is_what_the_equations_say(name: str) -> None:
    """Periods of four steps, and an epoch of six: its last period has two."""
    together = tuple(one for one in KINDS if (one in DAILY) == (name in DAILY))
    first, second, expected = (found[name] for found in results(together))
    check_equations(name, first, second, expected)


# What workers that come and go refuse, and a step that asks what the others have.
NOT_OF_MEMBERS = ("train_on_batch", "steps_per_execution", "two fragments", "four fragments", "PowerSGD", "TopK")
OF_MEMBERS = [name for name in KINDS if not name.startswith(NOT_OF_MEMBERS)]


@pytest.mark.parametrize("name", daily(OF_MEMBERS, *DAILY))
def test_is_the_same_where_workers_may_come_and_go(name: str) -> None:
    """As long as none does."""
    together = tuple(one for one in OF_MEMBERS if (one in DAILY) == (name in DAILY))
    first, second, expected = (found[name] for found in results(together, all_trained_by_members))
    assert not isinstance(first, Failure), first
    assert not isinstance(second, Failure), second
    check_equations(name, first, second, expected)


def check_equations(name: str, first: dict[str, Any], second: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares two workers with the simulation, and their histories."""
    is_fit = KINDS[name].get("data") != "batches"
    # XLA computes in another order, and TopK sends float32.
    tolerance = 1e-6 if name == "jit_compile" or name.startswith("TopK") else 1e-10
    assert set(first["history"]) == set(second["history"])
    for key, values in first["history"].items():
        np.testing.assert_allclose(values, second["history"][key], rtol=1e-12, err_msg=key)
    if is_fit:  # else the last period is not over
        for one, other in zip(first["weights"], second["weights"], strict=True):
            np.testing.assert_array_equal(one, other)
        assert gap(first, expected) < tolerance
        assert gap(second, expected) < tolerance
    if "own" in first["history"]:
        assert first["history"]["rows"] == [1.5] * EPOCHS  # the last batch has two rows here, and one there
    for step, (one, other) in enumerate(zip(first["sums"], second["sums"], strict=True)):
        # In a period, weights differ, but for the step that only accumulates; callbacks see its end.
        steps = -(-KINDS[name].get("rows", ROWS) // BATCH)
        place = (step % steps if is_fit else step) + 1
        if not {"steps_per_execution", "fragments"} & set(KINDS[name]) and (
            place % 4 == 0 or "accumulated" not in KINDS[name]
        ):
            assert (one == other) == (place % 4 == 0), step


@pytest.mark.nightly
def test_another_outer_step_is_found() -> None:
    """The negative control."""
    (wrong,) = run_local(simulated, 1, args=("plain", 4, OUTER | {"learning_rate": 0.71}), timeout=300)
    (right,) = run_local(simulated, 1, args=("plain", 4, OUTER), timeout=300)
    assert gap(wrong, right) > 1e-5


def with_wrong_rows(names: list[str]) -> dict[str, dict[str, Any]]:
    """Runs on every process: what rank 1 has learned counts twice."""
    from tfdist.runtime.rounds import Membership

    bring = Membership.bring

    def wrong(membership: Any, place: Any, stops: bool, rows: float, *given: Any) -> Any:
        return bring(membership, place, stops, rows * (1 + membership.rank), *given)

    with mock.patch.object(Membership, "bring", wrong):
        return all_trained_by_members(names)


@pytest.mark.nightly
def test_other_weights_of_a_member_are_found() -> None:
    """The negative control."""
    first, _, expected = (found["plain"] for found in results(("plain",), with_wrong_rows))
    assert not isinstance(first, Failure), first
    assert gap(first, expected) > 1e-5


@pytest.mark.parametrize("name", daily(["plain", "masks and sample weights"], "plain"))
def test_averaged_after_each_step_it_is_data_parallel(name: str) -> None:
    """With an outer SGD(1.0) and an inner SGD, the mean of weights after a step is a step with the mean gradient."""

    first, second = run_local(averaged, 2, args=(name,), timeout=300)
    (alone,) = run_local(averaged, 1, args=(name,), timeout=300)
    for found in (first, second):
        assert gap(found, alone) < 1e-6
        for key, values in alone["history"].items():
            np.testing.assert_allclose(found["history"][key], values, rtol=1e-6, err_msg=key)


def averaged(name: str) -> dict[str, Any]:
    """Runs on every process, or on one alone without the strategy."""
    import keras
    import tensorflow as tf

    import tfdist

    keras.config.set_floatx("float64")
    is_alone = tfdist.discover().num_workers == 1
    outer = functools.partial(keras.optimizers.SGD, 1.0)
    strategy = tf.distribute.get_strategy() if is_alone else tfdist.LocalStepsStrategy(1, outer_optimizer=outer)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = make_model(KINDS[name])
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    data = make_data(KINDS[name])
    weights = {"sample_weight": data[2]} if len(data) > 2 else {}
    # Masked means are those of each worker's rows: in full batches of equal weights only, they are those of all.
    if "layers" in KINDS[name]:
        data, weights = tuple(array[:80] for array in data), {}
    history = model.fit(data[0], data[1], batch_size=BATCH, epochs=3, verbose=0, shuffle=False, **weights)
    return {
        "weights": model.get_weights(),
        "history": history.history,
        "evaluated": model.evaluate(data[0], data[1], verbose=0),
        "predicted": model.predict(data[0], batch_size=BATCH, verbose=0),
    }


def in_the_middle(folder: str) -> dict[str, Any]:
    """What callbacks see in the middle of a period. Runs on every process."""
    import keras

    import tfdist

    strategy = tfdist.LocalStepsStrategy(4, start_timeout=60, peer_timeout=300)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = make_model({})
    x, y = make_data({})
    begun = model.get_weights()
    found: dict[str, Any] = {}

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            if self.params.get("epochs") and batch == 2 and not found:
                own = model.get_weights()
                found["alone"] = strategy._keras_hooks.steps_alone(model)
                found["evaluated"] = model.evaluate(x, y, batch_size=BATCH, verbose=0)
                found["predicted"] = model.predict(x, batch_size=BATCH, verbose=0)
                model.save(Path(folder) / "own.keras")
                found["kept"] = all(np.array_equal(*pair) for pair in zip(own, model.get_weights(), strict=True))
                found["own"] = own

    saving = keras.callbacks.ModelCheckpoint(Path(folder) / "best-{epoch}-{batch}.weights.h5", save_freq=3)
    saving.save_weights_only = True
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False, callbacks=[Looks(), saving])
    return {"begun": begun, **found}


@pytest.mark.nightly
def test_in_the_middle_of_a_period_files_have_its_beginning(tmp_path: Path) -> None:
    import keras

    first, second = run_local(in_the_middle, 2, args=(str(tmp_path),), timeout=300)
    assert first["kept"] and second["kept"]
    assert first["alone"] == second["alone"] == 3
    assert not all(np.array_equal(*pair) for pair in zip(first["own"], second["own"], strict=True))
    np.testing.assert_array_equal(first["evaluated"], second["evaluated"])
    np.testing.assert_array_equal(first["predicted"], second["predicted"])
    back = keras.models.load_model(tmp_path / "own.keras")
    for one, other in zip(back.get_weights(), first["begun"], strict=True):
        np.testing.assert_array_equal(one, other)
    x, y = make_data({})
    np.testing.assert_allclose(back.evaluate(x, y, batch_size=BATCH, verbose=0), first["evaluated"], rtol=1e-5)
    back.load_weights(tmp_path / "best-1-3.weights.h5")
    for one, other in zip(back.get_weights(), first["begun"], strict=True):
        np.testing.assert_array_equal(one, other)


def resumed(folder: str, epochs: int, ends: int = 0, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Trains with backups after every five steps, to the end or to step `ends`. Runs on every process."""
    import keras

    import tfdist

    strategy = tfdist.LocalStepsStrategy(4, **(options or {}), start_timeout=60, peer_timeout=300)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = make_model({"layers": "wide, normalization, frozen"})
        model.add(keras.layers.Dropout(0.2))
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x, y = make_data({})

    class Ends(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            self.steps += 1
            if self.steps == ends:
                raise KeyboardInterrupt

    backup = tfdist.callbacks.BackupAndRestore(folder, save_freq=5, delete_checkpoint=False)
    history = None
    with contextlib.suppress(KeyboardInterrupt):
        history = model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[backup, Ends()]).history
    outer = strategy._outer_models[model]
    state = [*model.optimizer.variables, *outer.variables]
    return {"weights": model.get_weights(), "state": [np.array(v) for v in state], "history": history}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [{}, {"fragments": 2}, {"compression": PowerSGD(1)}, {"compression": TopK(0.1)}],
    ids=["whole", "fragments", "PowerSGD", "TopK"],
)
def test_a_resumed_run_goes_on_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    """From the middle of a period, where each worker has weights and slots of its own, and a part is on its way."""
    whole = run_local(resumed, 2, args=(str(tmp_path / "whole"), 4, 0, options), timeout=300)
    run_local(resumed, 2, args=(str(tmp_path / "parts"), 4, 17, options), timeout=300)
    rest = run_local(resumed, 2, args=(str(tmp_path / "parts"), 4, 0, options), timeout=300)
    for found, expected in zip(rest, whole, strict=True):
        for key in ("weights", "state"):
            for one, other in zip(found[key], expected[key], strict=True):
                np.testing.assert_array_equal(one, other, err_msg=key)
        assert found["history"]["loss"][-1] == expected["history"]["loss"][-1]
    # Slots are each worker's own.
    assert any(not np.array_equal(*pair) for pair in zip(rest[0]["state"], rest[1]["state"], strict=True))


@pytest.mark.nightly
def test_another_number_of_workers_begins_from_the_last_exchange(tmp_path: Path) -> None:
    run_local(resumed, 2, args=(str(tmp_path), 4, 17), timeout=300)
    found = run_local(resumed, 3, args=(str(tmp_path), 4), timeout=300)
    for other in found[1:]:
        for pair in zip(found[0]["weights"], other["weights"], strict=True):
            np.testing.assert_array_equal(*pair)
    assert found[0]["history"] is not None


def stopped(folder: str, how: str) -> dict[str, Any]:
    """One worker stops, or is told to, in the middle of a period. Runs on every process."""
    import os
    import signal

    import keras

    import tfdist

    strategy = tfdist.LocalStepsStrategy(4, start_timeout=60, peer_timeout=300)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = make_model({})
    x, y = make_data({})
    seen: list[int] = []

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            seen.append(batch)
            if not strategy.is_chief and len(seen) == 2:
                if how == "signal":
                    os.kill(os.getpid(), signal.SIGTERM)
                else:
                    self.model.stop_training = True

    callbacks: list[Any] = [Stops()]
    if how == "signal":
        callbacks.append(tfdist.callbacks.BackupAndRestore(folder))
    code = None
    try:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    except SystemExit as error:
        code = error.code
    return {"seen": seen, "code": code, "weights": model.get_weights()}


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["stop_training", "signal"])
def test_all_stop_after_the_next_exchange(how: str, tmp_path: Path) -> None:
    found = run_local(stopped, 2, args=(str(tmp_path), how), timeout=300)
    for one in found:
        assert one["seen"] == [0, 1, 2, 3]
        assert one["code"] == (77 if how == "signal" else None)
    for pair in zip(*(one["weights"] for one in found), strict=True):
        np.testing.assert_array_equal(*pair)


def stopped_in_the_last_step(folder: str, is_first: bool) -> dict[str, Any]:
    """A signal, heard when the last part of an epoch is sent; or the next start. Runs on every process."""
    import os
    import signal

    import keras

    import tfdist

    strategy = tfdist.LocalStepsStrategy(4, fragments=2, start_timeout=60, peer_timeout=300)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = make_model({})
    x, y = make_data({"rows": 64})

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            if is_first and batch == 4:  # sent with the part of step 6, heard with that of step 8, the last one
                os.kill(os.getpid(), signal.SIGTERM)

    backup = tfdist.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    code, history = None, {}
    try:
        fit = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[Stops(), backup])
        history = fit.history
    except SystemExit as error:
        code = error.code
    return {"code": code, "weights": model.get_weights(), "history": history}


@pytest.mark.nightly
def test_an_epoch_that_is_resumed_behind_its_last_step_ends_with_an_exchange(tmp_path: Path) -> None:
    whole = run_local(stopped_in_the_last_step, 2, args=(str(tmp_path / "whole"), False), timeout=300)
    first = run_local(stopped_in_the_last_step, 2, args=(str(tmp_path / "parts"), True), timeout=300)
    assert [one["code"] for one in first] == [77, 77]
    # Stopped where only the end of the epoch is left.
    assert not all(np.array_equal(*pair) for pair in zip(*(one["weights"] for one in first), strict=True))
    for found, expected in zip(
        run_local(stopped_in_the_last_step, 2, args=(str(tmp_path / "parts"), False), timeout=300), whole, strict=True
    ):
        for pair in zip(found["weights"], expected["weights"], strict=True):
            np.testing.assert_array_equal(*pair)
        assert found["history"] == expected["history"]


def saved_by_time(folder: str) -> list[int]:
    """After which steps of an epoch a backup is made that is due once. Runs on every process."""
    import keras

    import tfdist
    from tfdist.checkpoint.backup_and_restore import FitBackup

    strategy = tfdist.LocalStepsStrategy(4, fragments=2, start_timeout=60, peer_timeout=300)
    with strategy.scope():
        model = make_model({})
    backup = tfdist.callbacks.BackupAndRestore(folder, save_freq="2h")
    save, steps = FitBackup._save, []

    class Waits(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            if batch == 1:
                backup._fit._schedule._time -= 7200

    def noting(fit: FitBackup, mid_epoch: bool) -> None:
        steps.append(fit._place.steps)
        save(fit, mid_epoch)

    FitBackup._save = noting
    model.fit(*make_data({}), batch_size=4, epochs=1, shuffle=False, verbose=0, callbacks=[Waits(), backup])
    return steps


@pytest.mark.nightly
def test_a_backup_that_is_due_once_is_made_once(tmp_path: Path) -> None:
    """Requested after step 2, sent with the part of step 4, heard with that of step 6; and the last one."""
    assert run_local(saved_by_time, 2, args=(str(tmp_path),), timeout=300) == [[6, 0]] * 2


def special_cases(folder: str) -> dict[str, Any]:
    """What strangers do; each gives something that has to be the same on all. Runs on every process."""
    import keras
    import tensorflow as tf

    import tfdist

    strategy = tfdist.LocalStepsStrategy(4, start_timeout=60, peer_timeout=300)
    x, y = make_data({"rows": 81})
    x, y = x.astype("float32"), y.astype("float32")
    found: dict[str, Any] = {}

    def made(*layers: Any, optimizer: Any = "adam", **compiled: Any) -> Any:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((5,)), *[make() for make in layers], keras.layers.Dense(1)])
            model.compile(optimizer if isinstance(optimizer, str) else optimizer(), "mse", **compiled)
        return model

    def fit(model: Any, epochs: int = 2, **more: Any) -> dict:
        arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "validation_data": (x, y)}
        return model.fit(x, y, epochs=epochs, **{**arguments, **more}).history

    model = made()
    found["fitted twice, the last batches have no row here"] = fit(model), fit(model), model.get_weights()

    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    averaged = functools.partial(keras.optimizers.Adam, use_ema=True, ema_momentum=0.9)
    model = made(optimizer=averaged)
    found["averages of weights"] = fit(model), model.get_weights(), fit(model), model.get_weights()
    model = made(optimizer=averaged)
    found["averages of weights, swapped"] = fit(model, callbacks=[swap]), model.get_weights()

    model = made(functools.partial(keras.layers.Dense, 4, trainable=False), run_eagerly=True)
    before = model.layers[0].get_weights()
    fit(model)
    found["frozen weights, run eagerly"] = [
        float(np.abs(one - other).max()) for one, other in zip(model.layers[0].get_weights(), before, strict=True)
    ]

    parts: list[Any] = []
    normalization = functools.partial(keras.layers.BatchNormalization, momentum=0.5)
    model = made(functools.partial(keras.layers.Dense, 4), normalization)

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            if batch == 5:
                parts.append([self.model.predict(x, verbose=0), encoder.predict(x, verbose=0)])

    with strategy.scope():
        encoder = keras.Model(model.inputs, model.layers[-2].output)
    found["a part in the middle of a period"] = fit(model, 1, callbacks=[Looks()]), parts

    with strategy.scope():
        other = keras.Model(model.inputs, model.outputs)
        other.compile("sgd", "mae")
    for _ in range(3):  # two models that train the same weights
        model.train_on_batch(x[:16], y[:16])
        other.train_on_batch(x[16:32], y[16:32])
    strategy.synchronize(model)
    strategy.synchronize(other)
    found["two models, the same weights"] = model.get_weights()

    model.train_on_batch(x[:16], y[:16])
    before = model.get_weights()
    predicted = model.predict(x, verbose=0)
    assert not all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))
    found["predict ends a period"] = predicted, model.get_weights()
    model.train_on_batch(x[:16], y[:16])
    with pytest.warns(UserWarning, match=r"strategy\.synchronize\(model\) before"):
        model.save(Path(folder) / "model.keras")

    class Logs(keras.Sequential):
        def __init__(self) -> None:
            super().__init__([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")])
            self.centre = tf.Variable(0.0, trainable=False)

        def train_step(self, data: tuple) -> dict:
            self.centre.assign(0.9 * self.centre + 0.1 * tf.reduce_mean(data[0]))
            return {**super().train_step(data), "largest": tf.reduce_max(data[0])}

    with strategy.scope():
        model = Logs()
        model.compile("sgd", "binary_crossentropy", metrics=["AUC"])
    labels = (y > 0).astype("float32")
    history = model.fit(x, labels, batch_size=81, epochs=1, verbose=0, shuffle=False).history
    found["logs beside metrics, a tf.Variable"] = history, float(model.centre.numpy())

    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(tfdist.ShardedOptimizer(keras.optimizers.Adam()), "mse")
    with pytest.raises(ValueError, match="a ShardedOptimizer under LocalStepsStrategy"):
        fit(model)
    return found


@pytest.mark.nightly
def test_special_cases_are_the_same_on_all(tmp_path: Path) -> None:
    import tensorflow as tf

    first, second = run_local(special_cases, 2, args=(str(tmp_path),), timeout=300)
    assert set(first) == set(second)
    for name in first:
        for one, other in zip(tf.nest.flatten(first[name]), tf.nest.flatten(second[name]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=name)
    assert first["frozen weights, run eagerly"] == [0.0, 0.0]
    # Rows of both have counted, 41 and 40.
    x, _ = make_data({"rows": 81})
    history, centre = first["logs beside metrics, a tf.Variable"]
    largest = [x[:41].max(), x[41:].max()]
    np.testing.assert_allclose(history["largest"], [np.mean(largest)], rtol=1e-6)
    np.testing.assert_allclose(centre, 0.1 * x.mean(), rtol=1e-5)


def more_cases(folder: str) -> dict[str, Any]:
    """Runs on every process."""
    import keras
    import tensorflow as tf

    import tfdist
    from tfdist.inspection.model_state import gather

    x, y = make_data({"rows": 96})
    x, y = x.astype("float32"), y.astype("float32")
    found: dict[str, Any] = {}

    def strategy_of(*arguments: Any, **more: Any) -> Any:
        keras.utils.set_random_seed(3)
        return tfdist.LocalStepsStrategy(*arguments, start_timeout=60, peer_timeout=300, **more)

    strategy = strategy_of(4, memory=tfdist.memory.MemoryPolicy("auto", budget="1 GB"))
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), *(keras.layers.Dense(5, "relu") for _ in range(9))])
        model.compile("adam", "mse")
    found["a step that is traced before the first fit"] = model.fit(x, x, batch_size=32, verbose=0).history["loss"]

    strategy = strategy_of(4)
    with strategy.scope():
        inner = keras.layers.Dense(6)
        model = keras.Sequential([keras.Input((5,)), keras.layers.SpectralNormalization(inner), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse")
    kept: dict[str, Any] = {}

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            if batch == 3:
                kept["begin"] = model.get_weights()
            if batch == 5:
                model.save_weights(Path(folder) / "middle.weights.h5")

    model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=[Looks()])
    model.load_weights(Path(folder) / "middle.weights.h5")
    found["weights that are assigned before they are trained"] = [
        float(np.abs(one - other).max()) for one, other in zip(model.get_weights(), kept["begin"], strict=True)
    ]

    with strategy.scope():
        normalization = keras.layers.BatchNormalization()
        model = keras.Sequential([keras.Input((5,)), normalization, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, y, batch_size=16, verbose=0)
    normalization.moving_mean.assign(np.full(5, 3.0))
    predicted = [model.predict(x, verbose=0)]
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 1 and predicted.append(model.predict(x, verbose=0))
    )
    model.fit(x, y, batch_size=16, verbose=0, callbacks=[look])
    found["state that is assigned before it is trained"] = float(np.abs(predicted[0] - predicted[1]).max())

    with strategy.scope():
        critic = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
        critic.compile("adam", "binary_crossentropy")
        maker = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4)])
        both = keras.Sequential([keras.Input((5,)), maker, critic])
        critic.trainable = False
        both.compile("adam", "binary_crossentropy")
    alone = []
    for _ in range(3):
        critic.trainable = True
        critic.train_on_batch(x[:8, :4], y[:8] * 0 + 1)
        critic.trainable = False
        both.train_on_batch(x[:8], y[:8] * 0 + 1)
        alone.append([strategy._keras_hooks.steps_alone(one) for one in (critic, both)])
    found["steps of a GAN"] = alone

    class Student(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = keras.layers.Dense(1), keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.student(x) + 0 * tf.stop_gradient(self.teacher(x))

        def train_step(self, data: tuple) -> dict:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
            weights = self.student.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    outer = functools.partial(keras.optimizers.Adam, 0.1)
    strategy = strategy_of(2, fragments=2, outer_optimizer=outer)
    with strategy.scope():
        model = Student()
        model.compile("sgd")
    model.fit(x, y, batch_size=16, epochs=1, verbose=0)
    found["a part of which nothing is trained"] = [float(np.abs(one).max()) for one in model.student.get_weights()]

    class Filter(keras.layers.Layer):
        def build(self, shape: tuple) -> None:
            self.weight = self.add_weight(
                shape=(5,), dtype="complex64", initializer="zeros", trainable=False, autocast=False
            )

        def call(self, x: Any) -> Any:
            return tf.math.real(tf.cast(x, tf.complex64) * self.weight.value)

    strategy = strategy_of(2)
    with strategy.scope():
        layer = Filter()
        model = keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    layer.weight.assign(np.full(5, 0.5 + 0.25j, "complex64"))
    model.fit(x, y, batch_size=32, verbose=0)
    found["complex numbers"] = layer.weight.numpy().tolist()
    layer.weight.assign(np.full(5, 1j + tfdist.discover().rank, "complex64"))
    found["complex numbers in a backup"] = gather(strategy, [layer.weight])[0].numpy()[:, 0].tolist()
    return found


@pytest.mark.nightly
def test_more_cases(tmp_path: Path) -> None:
    for found in run_local(more_cases, 2, args=(str(tmp_path),), timeout=300):
        assert np.isfinite(found["a step that is traced before the first fit"]).all()
        assert found["weights that are assigned before they are trained"] == [0.0] * 5
        assert found["state that is assigned before it is trained"] == 0.0
        assert found["steps of a GAN"] == [[1, 1], [2, 2], [3, 3]]
        assert np.isfinite(found["a part of which nothing is trained"]).all()
        np.testing.assert_allclose(found["complex numbers"], [0.5 + 0.25j] * 5, rtol=1e-6)
        assert found["complex numbers in a backup"] == [1j, 1 + 1j]


def asking_for_data() -> list[tuple[str, str]]:
    """Workers with data of their own, of unknown size, ask each other in each step. Runs on every process."""
    import tensorflow as tf

    import tfdist

    x, y = make_data({"rows": 64})
    found = []
    for steps, fragments in ((3, 2), (1, 2), (3, 1)):
        strategy = tfdist.LocalStepsStrategy(4, fragments=fragments, start_timeout=60, peer_timeout=60)
        with strategy.scope():
            model = make_model({"steps_per_execution": steps})
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).filter(lambda *_: True)
        data = strategy.distribute_datasets_from_function(lambda _, rows=rows: rows)
        found.append(error_of(lambda model=model, data=data: len(model.fit(data, verbose=0).history)))
    return found


@pytest.mark.nightly
def test_several_steps_at_once_are_refused_where_workers_ask_for_data_while_a_part_is_sent() -> None:
    for (kind, text), *others in run_local(asking_for_data, 2, timeout=240):
        assert kind == "ValueError"
        assert "fragments=2 and steps_per_execution=3, with data that each process has sharded" in text
        assert others == [("no error", "2")] * 2


def refused() -> list[tuple[str, str]]:
    """Runs on every process."""
    import keras

    import tfdist

    make: Callable[..., Any] = tfdist.LocalStepsStrategy
    rank = tfdist.discover().task_index
    return [
        error_of(make, 0),
        error_of(make, compression="PowerSGD"),
        error_of(make, 4, fragments=3),
        error_of(make, 4, compression=PowerSGD(2), fragments=2),
        error_of(make, 4, compression=TopK(0.1), min_workers=1),
        error_of(make, 4 + rank),
        error_of(make, 4, outer_optimizer=lambda: keras.optimizers.SGD(0.5 + rank)),
    ]


def test_what_cannot_be_is_refused() -> None:
    for of_count, of_compression, of_parts, *of_methods, of_period, of_outer in run_local(refused, 2, timeout=240):
        assert of_parts == (
            "ValueError",
            "Received: fragments=3 with sync_every=4. Expected: a number that divides it.",
        )
        assert of_count == ("ValueError", "Received: sync_every=0. Expected: a whole number, at least 1.")
        assert of_compression[0] == "ValueError"
        for (kind, text), other in zip(of_methods, ("fragments=2", "min_workers=1"), strict=True):
            assert kind == "ValueError" and f" with {other}. Expected: one of them." in text
        for error, name in ((of_period, "sync_every"), (of_outer, "outer_optimizer")):
            assert error[0] == "ValueError", error
            assert re.search(rf"\b{name}\b", error[1]), error


def in_a_loop() -> list[str]:
    """Runs on every process."""
    import warnings

    import keras
    import tensorflow as tf

    import tfdist

    strategy = tfdist.LocalStepsStrategy(4, start_timeout=60, peer_timeout=300)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2) / 2
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            strategy.run(step, (tf.ones((2, 4)),))
    return [str(one.message) for one in caught if "LocalStepsStrategy" in str(one.message)]


def test_loops_of_ones_own_are_told_once() -> None:
    for found in run_local(in_a_loop, 2, timeout=240):
        assert len(found) == 1
        assert "this loop exchanges the gradients of every step" in found[0]


def said(sync_every: int, averages: bool) -> list[str]:
    """What the log says in a training with epochs of six steps. Runs on every process."""
    import logging

    import keras

    import tfdist

    lines: list[str] = []

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("tfdist").addHandler(Notes())
    outer = functools.partial(keras.optimizers.SGD, 1.0) if averages else None
    strategy = tfdist.LocalStepsStrategy(sync_every, outer_optimizer=outer, start_timeout=60, peer_timeout=300)
    with strategy.scope():
        model = make_model({})
    x, y = make_data({})
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    return [line for line in lines if "LocalStepsStrategy" in line or "periods of" in line]


@pytest.mark.nightly
def test_what_it_is_and_short_periods_are_told_once() -> None:
    for sync_every, averages in ((4, False), (50, False), (4, True)):
        first, second = run_local(said, 2, args=(sync_every, averages), timeout=300)
        assert second == []
        assert len(first) == (1 if averages else 2)
        assert f"LocalStepsStrategy(sync_every={sync_every}): workers train by themselves" in first[0]
        assert averages or f"periods of {min(sync_every, 6)} steps, and the default outer_optimizer" in first[1]
