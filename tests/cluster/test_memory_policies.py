"""Memory policies on two processes: weights stay what they are, and all processes choose the same."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest

from tests.cluster.attempt import attempt, found_on
from tests.cluster.file_checks import gap
from tests.features.table import rows
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.exhaustive]
DEADLINE = 240
BLOCKS = [f"block_{index}" for index in range(5)]


def _strategy(memory: Any = None) -> Any:
    import tfdist

    return tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=40, memory=memory)


def _weights(strategy: Any) -> list[np.ndarray]:
    """Trains blocks whose statistics are those of all processes: recomputing one is a meeting."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    with strategy.scope():
        x = inputs = keras.Input((8,))
        for name in BLOCKS:
            inner = [layers.Dense(64, "gelu"), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(8)]
            x = keras.Sequential([keras.Input((8,)), *inner], name=name)(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        model.compile("adam", "mse")
    x, y = rows(96)
    model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    strategy.model = model
    return model.get_weights()


def recomputed() -> list[float]:
    """The gaps between plain training and two policies."""
    from tfdist.memory import MemoryPolicy

    plain = _weights(_strategy())
    every = _weights(_strategy(MemoryPolicy("recompute", BLOCKS)))
    some = _weights(_strategy(MemoryPolicy({"block_[13]": "recompute"}, BLOCKS)))
    return [gap(plain, every), gap(plain, some)]


def chosen() -> dict[str, Any]:
    """What is chosen for a budget by processes that measure different rates, and the gap to plain training."""
    from tfdist.memory import MemoryPolicy, choose, report
    from tfdist.memory.estimation import choosing
    from tfdist.memory.estimation.block_options import Rates
    from tfdist.memory.modes import modes_of

    strategy = _strategy()
    plain = _weights(strategy)
    own = Rates(1e9 * (1 + strategy.extended._input_position()[1]), 1e9)
    choosing.measured_rates = lambda device, host: own
    most = report(strategy.model, 32, MemoryPolicy("none", BLOCKS)).devices[0]
    policy = MemoryPolicy("auto", BLOCKS, budget=int(0.7 * (most.total + 0.1 * most.step)))
    choice = choose(strategy.model, 32, policy)
    automatic = _strategy(policy)
    found = _weights(automatic)
    return {
        "batch": most.batch,
        "rates": list(choice.rates),
        "modes": [option.mode for option in choice.options],
        "in fit": [modes_of(automatic.model).mode_of(name) for name in BLOCKS],
        "gap": gap(plain, found),
    }


def everything(folder: str) -> dict[str, Any]:
    return {function.__name__: attempt(function.__name__, function) for function in (recomputed, chosen)}


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="tfdist-memory-") as folder:
        return run_local(everything, args=(folder,), timeout=DEADLINE)


def test_weights_are_those_of_plain_training(seen):
    for rank in range(2):
        assert max(found_on(seen, rank, "recomputed")) < 2e-6


def test_all_processes_choose_the_same(seen):
    first, second = (found_on(seen, rank, "chosen") for rank in range(2))
    assert first == second
    assert first["rates"] == [1e9, 1e9]
    assert first["modes"] == first["in fit"]
    assert 0 < first["modes"].count("recompute") < len(BLOCKS)
    assert first["gap"] < 2e-6
    # A process has half of a batch of 32 rows with 8 features and a label.
    assert first["batch"] == 16 * (8 + 1) * 4
