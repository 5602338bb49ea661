"""A model that was made in the scope, and what is done to it outside: it belongs to the model's strategy, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfdist
from tests.models import in_scope, ready
from tests.tiers import daily

X = np.random.default_rng(0).normal(size=(30, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def mlp() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])


def compiled() -> keras.Model:
    return ready(mlp(), "adam", "mse")


def names(model: keras.Model) -> keras.Model:
    model.compile("adam", "mse", metrics=["mae", "mse"], weighted_metrics=["mae"])
    return model


def again_after_a_fit(model: keras.Model) -> keras.Model:
    model.fit(X, Y, batch_size=8, verbose=0)
    model.layers[0].trainable = False
    model.compile("rmsprop", "mae")
    return model


def from_config(model: keras.Model) -> keras.Model:
    model.compile_from_config(model.get_compile_config())
    return model


def in_a_callback(model: keras.Model) -> keras.Model:
    def compile(logs: Any) -> None:
        model.compile("rmsprop", "mae", metrics=["mse"])

    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_end=compile)])
    return model


def lora(model: keras.Model) -> keras.Model:
    model.layers[0].enable_lora(2)
    model.compile("adam", "mse")
    return model


def quantized(model: keras.Model) -> keras.Model:
    model.layers[0].use_bias = False
    model.layers[0].enable_lora(2)
    model.layers[0].quantize("int8")
    model.compile("adam", "mse")
    return model


def head(model: keras.Model) -> keras.Model:
    hidden = layers.Dense(3, activation="tanh")(layers.Dropout(0.0)(model.layers[0].output))
    return ready(keras.Model(model.inputs, layers.Dense(1)(hidden)), "adam", "mse")


def built(model: keras.Model) -> keras.Model:
    model.build((None, 4))
    model.compile("adam", "mse")
    return model


def adapted(model: keras.Model) -> keras.Model:
    model.layers[0].adapt(X)
    model.compile("adam", "mse")
    return model


WAYS: dict[str, tuple[Callable, Callable]] = {
    "names": (mlp, names),
    "again, after a fit": (compiled, again_after_a_fit),
    "compile_from_config": (compiled, from_config),
    "compile in a callback": (compiled, in_a_callback),
    "enable_lora": (mlp, lora),
    "quantize": (mlp, quantized),
    "a head": (mlp, head),
    "build": (lambda: keras.Sequential([layers.Dense(8), layers.Dense(1)]), built),
    "adapt": (lambda: keras.Sequential([layers.Normalization(), layers.Dense(1)]), adapted),
}


def trained(strategy: Any, name: str) -> list[np.ndarray]:
    """Weights, losses and predictions of a model that one way has finished outside of the scope."""
    make, finish = WAYS[name]
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = make()
    model = finish(model)
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    assert strategy is None or model.distribute_strategy is strategy
    return [*model.get_weights(), np.array([*history.values()]), model.predict(X, verbose=0)]


@pytest.mark.parametrize("name", daily(WAYS, "names", "adapt"))
def test_equals_one_process(mirrored, name):
    for ours, theirs in zip(trained(mirrored, name), trained(None, name), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "strategy",
    daily(
        [
            pytest.param(lambda: tfdist.PipelineStrategy(["CPU:0", "CPU:1"]), id="pipeline"),
            pytest.param(lambda: tfdist.HostOffloadStrategy("CPU:1"), id="offload"),
        ],
        "pipeline",
    ),
)
def test_a_head_on_plain_variables_belongs_to_their_strategy(four_devices, strategy):
    """Those of a pipeline, or on the host, are plain variables: their layers know."""
    strategy = strategy()
    for ours, theirs in zip(trained(strategy, "a head"), trained(None, "a head"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_instances_are_refused(mirrored):
    model = ready(in_scope(mirrored, mlp), keras.optimizers.SGD(name="mine"), "mse")
    with pytest.raises(ValueError, match=r"Received: optimizer 'mine', created outside of strategy\.scope"):
        model.fit(X, Y, verbose=0)


def test_a_clone_and_a_part_of_a_model_stay_outside(mirrored):
    model = in_scope(mirrored, mlp)
    part = keras.Model(model.inputs, model.layers[0].output)
    clone = keras.models.clone_model(model)
    assert part._distribute_strategy is clone._distribute_strategy is None
    np.testing.assert_allclose(part.predict(X, verbose=0), np.tanh(X @ model.layers[0].get_weights()[0]), atol=1e-6)
    assert not hasattr(clone.weights[0].value, "distribute_strategy")
