"""What makes processes of a job differ is named: other weights, models in another order, fits in threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tests.cluster.attempt import error_of
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


def built(strategy: Any, name: str = "digits") -> Any:
    import keras

    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(4, name="first"), keras.layers.BatchNormalization(name="norm")]
        model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1, name="last")], name=name)
        model.compile("adam", "mse")
    return model


def rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((8, 3)).astype("f"), rng.standard_normal((8, 1)).astype("f")


def flip_one_bit(model: Any, path: str) -> None:
    (variable,) = [v for v in model.weights if v.path.endswith(path)]
    value = np.array(variable)
    value.view("u4").flat[0] ^= 1 << 12
    variable.assign(value)


def differ_by_rounding() -> tuple[str, int]:
    """Runs on every process, as if it had GPUs; rank 1 rounds otherwise. The error of its fit; how many warnings."""
    import warnings

    import keras

    import tfdist
    from tfdist.runtime import agreement

    agreement.has_gpus = lambda: True
    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60)

    class Round(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if strategy._peers.rank == 1:
                flip_one_bit(self.model, "last/bias")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind, _ = error_of(built(strategy).fit, *rows(), batch_size=2, epochs=3, verbose=0, callbacks=[Round()])
    return kind, sum("differ between the processes by rounding after epoch 1" in str(one.message) for one in caught)


@pytest.mark.nightly
def test_rounding_on_gpus_ends_no_training() -> None:
    assert run_local(differ_by_rounding, timeout=120) == [("no error", 1)] * 2


def differ_in_one_bit(where: list[tuple[str, int]], at: int) -> list[tuple[str, str]]:
    """Runs on every process; each entry is a variable, and the rank that changes it after a batch of the second epoch.

    The averages that layers keep would be the same again after the next step.
    """
    import keras

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60)
    rank, errors = strategy._peers.rank, []
    for path, changed_on in where:
        model = built(strategy)

        class Change(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if self.epoch == 1 and batch == at and rank == changed_on:  # noqa: B023
                    flip_one_bit(self.model, path)  # noqa: B023

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.epoch = epoch

        errors.append(error_of(model.fit, *rows(), batch_size=2, epochs=3, verbose=0, callbacks=[Change()]))
    return errors


def test_a_rank_that_differs_in_one_bit_is_named() -> None:
    where = [("last/bias", 1), ("norm/moving_mean", 2), ("last/bias", -1)]
    found = run_local(differ_in_one_bit, workers=3, timeout=120, args=(where, 3))
    for errors in found:
        for (kind, error), (path, rank) in zip(errors[:2], where, strict=False):
            assert kind == "RuntimeError"
            assert error.startswith("The processes hold different weights after epoch 2."), error
            assert f"Received: weights of worker {rank} (" in error, error
            assert "not those of the 2 others, in " in error and path in error, error
        assert errors[2][0] == "no error"  # negative control


@pytest.mark.nightly
def test_checks_between_epochs_name_both_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDIST_CHECK_WEIGHTS", "2")
    for ((_, error),) in run_local(differ_in_one_bit, workers=2, timeout=120, args=([("last/bias", 0)], 0)):
        assert "different weights after batch 2 of epoch 2. Received: weights of worker 0 (" in error
        assert "; worker 1 (" in error and "each holds others, in" in error


@pytest.mark.nightly
def test_nothing_is_compared_if_the_program_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDIST_CHECK_WEIGHTS", "0")
    for ((kind, _),) in run_local(differ_in_one_bit, workers=2, timeout=120, args=([("last/bias", 0)], 0)):
        assert kind == "no error"


def in_threads_and_in_another_order() -> tuple[dict[str, tuple[str, str]], str]:
    """Runs on both processes: while one model is trained, threads use another one; then each trains its own."""
    import keras

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60)
    model, other = built(strategy), built(strategy, "critic")
    x, y = rows()
    errors = {}

    def use(what: str, *args: Any) -> None:
        def call() -> None:
            errors[what] = error_of(getattr(other, what), *args)

        thread = threading.Thread(target=call, name=f"thread of {what}")
        thread.start()
        thread.join()

    def at_the_end(epoch: int, logs: Any) -> None:
        for what, *data in (("fit", x, y), ("evaluate", x, y), ("train_on_batch", x, y), ("predict", x)):
            use(what, *data)
        errors["nested"] = error_of(other.evaluate, x, y, verbose=0)

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=at_the_end)]
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=callbacks)
    use("predict_on_batch", x)
    return errors, error_of([model, other][strategy._peers.rank].train_on_batch, x, y)[1]


@pytest.mark.nightly
def test_models_in_another_order_and_a_second_thread_are_told_by_name() -> None:
    found = run_local(in_threads_and_in_another_order, workers=2, timeout=120)
    # The other one traces its model's first step, and hears that this one has ended.
    assert any("Every process has to make the same calls in the same order" in order for _, order in found)
    for errors, order in found:
        assert "Every process has to make" in order or "waited for worker 0" in order, order
        assert errors.pop("nested")[0] == errors.pop("predict_on_batch")[0] == "no error"
        assert sorted(errors) == ["evaluate", "fit", "predict", "train_on_batch"]
        for what, (kind, error) in errors.items():
            assert kind == "RuntimeError"
            assert f"Received: {what} of model 'critic' in thread 'thread of {what}', while" in error
            assert "fit of model 'digits' in thread 'MainThread'" in error
    assert all("apply the gradients of a train step of 'critic', variables " in order for _, order in found), found
