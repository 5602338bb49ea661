"""Does a strategy compute what one process computes? Weights, history, metrics and predictions are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def train_and_observe(
    strategy: tf.distribute.Strategy,
    build_model: Callable[[], keras.Model],
    data: Any,
    *,
    validation_data: Any = None,
    seed: int = 7,
    **fit_arguments: Any,
) -> dict[str, np.ndarray]:
    """Builds a compiled model in the strategy's scope, trains it, and returns everything that can be compared.

    Args:
        strategy: a strategy, or `tf.distribute.get_strategy()` for one process.
        build_model: returns a compiled model.
        data: `(x, y)` or `(x, y, sample_weight)` arrays, or a function that returns anything that `fit` accepts as
            `x`; a function is called again for `fit`, `evaluate` and `predict`.
        validation_data: passed to `fit` (a function is called first).
        seed: seeds Python, NumPy, TensorFlow and Keras before the model is built.
        **fit_arguments: passed to `fit`; `batch_size` to `evaluate` and `predict`, too.

    Returns:
        Arrays by name: "weight 0 (path)", "history 0 (loss)", "evaluate 0 (loss)", "predict 0", "optimizer iterations".
    """
    fit_arguments = {"verbose": 0, "epochs": 2, "shuffle": False, **fit_arguments}
    arrays = not callable(data)
    x, *rest = data if arrays else (None,)
    names = dict(zip(("y", "sample_weight"), rest, strict=False))
    batch = {"batch_size": fit_arguments["batch_size"]} if "batch_size" in fit_arguments else {}
    steps = {"steps": fit_arguments["steps_per_epoch"]} if "steps_per_epoch" in fit_arguments else {}
    with strategy.scope():
        keras.utils.set_random_seed(seed)
        model = build_model()
    if validation_data is not None:
        fit_arguments["validation_data"] = validation_data() if callable(validation_data) else validation_data
    history = model.fit(x if arrays else data(), **names, **fit_arguments)
    seen = {f"history {i} ({name})": np.asarray(v) for i, (name, v) in enumerate(history.history.items())}
    if model.optimizer is not None:
        seen["optimizer iterations"] = np.asarray(model.optimizer.iterations)
    results = model.evaluate(x if arrays else data(), **names, **batch, **steps, verbose=0, return_dict=True)
    seen |= {f"evaluate {i} ({name})": np.asarray(value) for i, (name, value) in enumerate(results.items())}
    predictions = model.predict(x if arrays else data(), **batch, **steps, verbose=0)
    for i, value in enumerate(keras.tree.flatten(predictions)):
        seen[f"predict {i}"] = np.asarray(value)
    for i, weight in enumerate(model.weights):
        seen[f"weight {i} ({weight.path})"] = np.asarray(weight)
    return seen


def differences(expected: Mapping[str, np.ndarray], received: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Largest absolute difference by name; `inf` where shapes differ, a name is missing, or a value is not finite."""
    result = {}
    for name in sorted({*expected, *received}):
        if name not in expected or name not in received or expected[name].shape != received[name].shape:
            result[name] = float("inf")
            continue
        gap = np.abs(np.asarray(expected[name], "float64") - np.asarray(received[name], "float64"))
        result[name] = float(np.nan_to_num(gap, nan=np.inf).max(initial=0.0))
    return result


def assert_transparent(
    strategy_factory: Callable[[], tf.distribute.Strategy] | tf.distribute.Strategy,
    build_model: Callable[[], keras.Model],
    data: Any,
    *,
    tolerance: float = 1e-5,
    **arguments: Any,
) -> dict[str, float]:
    """Asserts that training under a strategy equals training in one process on the same global batches.

    Call it in one process for local strategies, or on every process of `run_local` for multi-worker ones.

    Args:
        strategy_factory: a strategy, or a function that builds one.
        build_model: returns a compiled model; called once without and once within the strategy.
        data: see `train_and_observe`, which also takes the remaining arguments.
        tolerance: largest absolute difference that is accepted, for every compared array.
        **arguments: passed to `train_and_observe`.

    Returns:
        The largest absolute difference by name.

    Raises:
        AssertionError: if anything differs by more; the message lists what, largest first.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> def build():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        ...     return model
        >>> x = np.arange(40.0).reshape(10, 4) / 40
        >>> _ = tfdist.testing.assert_transparent(tfdist.MirroredStrategy, build, (x, x[:, :1]), batch_size=4)
    """
    strategy = strategy_factory() if callable(strategy_factory) else strategy_factory
    expected = train_and_observe(tf.distribute.get_strategy(), build_model, data, **arguments)
    received = train_and_observe(strategy, build_model, data, **arguments)
    # Names of variables and metrics carry counters (dense_1, auc_2): compare by position, report the names.
    gaps = differences(_by_position(expected), _by_position(received))
    wrong = sorted((name for name in gaps if not gaps[name] <= tolerance), key=lambda name: -gaps[name])
    if wrong:
        full_names = {name.split(" (")[0]: name for name in received}
        listing = "\n".join(f"  {full_names.get(name, name)}: {gaps[name]:.3g}" for name in wrong)
        raise AssertionError(
            f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas does not equal one process. "
            f"Largest absolute differences (tolerance {tolerance:g}):\n{listing}"
        )
    return gaps


def _by_position(seen: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.split(" (")[0]: value for name, value in seen.items()}
