"""`ShardedEmbedding` whose rows are dealt out to replicas, on the four devices of one process, beside `Embedding`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.tiers import daily
from tfdist.layers import ShardedEmbedding
from tfdist.steps import shards

ROWS, WIDTH = 37, 5  # neither the replicas nor a line of memory divide it
STRATEGIES = {
    "multi-worker": tfdist.MultiWorkerMirroredStrategy,
    "fully sharded": tfdist.FullyShardedStrategy,
    "fully sharded, weights kept": lambda: tfdist.FullyShardedStrategy(reshard_after_forward=False),
}
DATA = np.random.default_rng(1).integers(0, ROWS, (83, 4)), np.random.default_rng(2).normal(size=(83, 1))


@pytest.fixture(params=["multi-worker", "fully sharded"])
def strategy(request: pytest.FixtureRequest, four_devices: list[str]) -> tf.distribute.Strategy:
    found = STRATEGIES[request.param]()
    assert found.num_replicas_in_sync == 4
    return found


def flat(table: Callable[..., Any]) -> keras.Model:
    inputs = keras.Input((4,), dtype="int32")
    hidden = keras.layers.Dense(8, "tanh")(keras.layers.Flatten()(table(ROWS, WIDTH)(inputs)))
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def twice(table: Callable[..., Any]) -> keras.Model:
    """Looked up twice, once for a mean over ids."""
    inputs = keras.Input((4,), dtype="int32")
    layer = table(ROWS, WIDTH)
    mean = keras.layers.GlobalAveragePooling1D()(layer(inputs))
    last = keras.layers.Flatten()(layer(inputs[:, :1]))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([mean, last])))


def masked(table: Callable[..., Any]) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            table(ROWS, WIDTH, mask_zero=True),
            keras.layers.LSTM(6),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )


def two_tables(table: Callable[..., Any]) -> keras.Model:
    inputs = keras.Input((4,), dtype="int32")
    wide, narrow = table(ROWS, 16)(inputs), table(ROWS + 3, 1, embeddings_regularizer="l2")(inputs)
    both = keras.layers.Concatenate()([wide, narrow])
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(both)))


class Subclassed(keras.Model):
    """Built by its first batch."""

    def __init__(self, table: Callable[..., Any]) -> None:
        super().__init__()
        self.table, self.out = table(ROWS, WIDTH), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.out(keras.ops.sum(self.table(x), axis=1))

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.compute_metrics(x, y, predicted)


MODELS = {"flat": flat, "twice": twice, "masked": masked, "two tables": two_tables, "subclassed": Subclassed}
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.02),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "clipped": lambda: keras.optimizers.Adam(0.02, clipnorm=0.05),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "weight decay": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1),
    "globally clipped": lambda: keras.optimizers.Adam(0.02, global_clipnorm=0.05),
    "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "averaged": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**10),
}


def trained(make: Callable[..., keras.Model], table: Any, optimizer: Any, **options: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    model = make(table)
    model.compile(optimizer(), "mse", metrics=["mae"], **options)
    history = model.fit(*DATA, batch_size=16, epochs=2, shuffle=False, verbose=0, validation_data=DATA)
    return {
        "weights": [weight for layer in model._flatten_layers(include_self=False) for weight in layer.get_weights()],
        "history": list(history.history.values()),
        "predicted": model.predict(DATA[0], batch_size=10, verbose=0),
        "evaluated": model.evaluate(*DATA, batch_size=10, verbose=0),
        "model": model,
    }


def gap(found: dict[str, Any], expected: dict[str, Any]) -> float:
    pairs = list(zip(found["weights"], expected["weights"], strict=True))
    pairs += [(found[name], expected[name]) for name in ("history", "predicted", "evaluated")]
    return max(float(np.max(np.abs(np.subtract(one, other)))) for one, other in pairs)


CASES = [(model, "Adam") for model in MODELS] + [("flat", optimizer) for optimizer in list(OPTIMIZERS)[1:]]


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("model", "optimizer"),
    daily([pytest.param(*case, id=", ".join(case)) for case in CASES], "masked, Adam"),
)
def test_equals_one_process(strategy: tf.distribute.Strategy, model: str, optimizer: str) -> None:
    expected = trained(MODELS[model], keras.layers.Embedding, OPTIMIZERS[optimizer])
    with strategy.scope():
        found = trained(MODELS[model], ShardedEmbedding, OPTIMIZERS[optimizer])
    assert gap(found, expected) < 1e-9
    tables = [v for v in found["model"].trainable_variables if v.name == "embeddings"]
    for variable in tables:
        rows, width = variable.shape
        assert [tuple(part.shape) for part in variable.value._values] == [(-(-rows // 4), width)] * 4
    slots = [v for v in found["model"].optimizer.variables if "embeddings" in v.name]
    for slot in slots:
        assert {part.shape[0] for part in slot.value._values} <= {-(-rows // 4) for rows in (ROWS, ROWS + 3)}


def shapes_of(strategy: tf.distribute.Strategy, table: Callable[..., Any]) -> set[tuple[int | None, ...]]:
    """Those of all tensors of a training step."""
    graphs: list[Any] = []

    def loss(y: Any, predicted: Any) -> Any:
        graphs.append(tf.compat.v1.get_default_graph())
        return keras.ops.mean(keras.ops.square(y - predicted), axis=-1)

    with strategy.scope():
        model = flat(table)
        model.compile("sgd", loss)
        model.fit(*DATA, batch_size=16, verbose=0)
    found: set[tuple[int | None, ...]] = set()
    # Not that of the trial, which reads the table once in a fit.
    graphs = [graph for graph in graphs if "step" in graph.name]
    assert graphs
    while graphs:
        for operation in graphs.pop().get_operations():
            branches = (getattr(operation, name, None) for name in ("_true_graph", "_false_graph"))
            graphs += filter(None, branches)
            found |= {tuple(out.shape) for out in operation.outputs if out.shape.rank is not None}
    return found


@pytest.mark.parametrize(
    "kind", daily(["multi-worker", "fully sharded", "fully sharded, weights kept"], "multi-worker")
)
def test_nobody_has_the_whole_table(four_devices: list[str], kind: str) -> None:
    strategy = STRATEGIES[kind]()
    assert (ROWS, WIDTH) in shapes_of(strategy, keras.layers.Embedding)  # so it would be seen
    assert (ROWS, WIDTH) not in shapes_of(strategy, ShardedEmbedding)


def test_ids_out_of_range_are_named(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        model = flat(ShardedEmbedding)
        model.compile("sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"a table of {ROWS} rows. Expected: ids from 0 to 36"):
        model.fit(np.full((8, 4), ROWS), np.ones((8, 1)), verbose=0)


def test_files_are_those_of_embedding(strategy: tf.distribute.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        found = trained(flat, ShardedEmbedding, OPTIMIZERS["momentum"])
    found["model"].save(tmp_path / "whole.keras")
    found["model"].save_weights(tmp_path / "whole.weights.h5")
    back = keras.models.load_model(tmp_path / "whole.keras")
    plain = flat(keras.layers.Embedding)
    plain.compile(OPTIMIZERS["momentum"](), "mse")
    plain.load_weights(tmp_path / "whole.weights.h5")
    for model in (back, plain):
        for one, other in zip(model.get_weights(), found["model"].get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
    with strategy.scope():
        again = flat(ShardedEmbedding)
        again.compile(OPTIMIZERS["momentum"](), "mse")
        again.load_weights(tmp_path / "whole.weights.h5")
    for one, other in zip(again.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("then", daily(["multi-worker", "one process"], "one process"))
def test_a_backup_goes_on_elsewhere(four_devices: list[str], tmp_path: Path, then: str) -> None:
    def fit(epochs: int) -> keras.Model:
        keras.utils.set_random_seed(3)
        model = flat(ShardedEmbedding)
        model.compile(OPTIMIZERS["momentum"](), "mse")
        backup = tfdist.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
        model.fit(*DATA, batch_size=16, epochs=epochs, shuffle=False, verbose=0, callbacks=[backup])
        return model

    with STRATEGIES["fully sharded"]().scope():
        fit(1)
    if then == "one process":
        found = fit(2)
    else:
        with STRATEGIES[then]().scope():
            found = fit(2)
    expected = trained(flat, keras.layers.Embedding, OPTIMIZERS["momentum"])["model"]
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.nightly
def test_gradients_without_their_weights_are_noticed(four_devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(flat, keras.layers.Embedding, OPTIMIZERS["momentum"])
    monkeypatch.setattr(shards, "weighted", lambda weight, values: list(values))
    with STRATEGIES["multi-worker"]().scope():
        found = trained(flat, ShardedEmbedding, OPTIMIZERS["momentum"])
    assert gap(found, expected) > 1e-4


def test_a_strategy_of_other_kinds_keeps_the_table_whole(mirrored: tf.distribute.Strategy) -> None:
    with mirrored.scope():
        model = flat(ShardedEmbedding)
    assert {tuple(part.shape) for part in model.layers[1].weights[0].value._values} == {(ROWS, WIDTH)}
