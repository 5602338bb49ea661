"""Memory policies on two processes: weights stay what they are, and all processes choose the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.file_checks import gap
from tests.features.table import rows
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly]
DEADLINE = 240
BLOCKS = [f"block_{index}" for index in range(4)]


def trained(memory: Any = None) -> Any:
    """A strategy's model of blocks whose statistics are those of all processes: recomputing one is a meeting."""
    import keras
    from keras import layers

    import tfdist

    keras.utils.set_random_seed(0)
    with tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=300, memory=memory).scope():
        x = inputs = keras.Input((8,))
        for name in BLOCKS:
            inner = [layers.Dense(64, "gelu"), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(8)]
            x = keras.Sequential([keras.Input((8,)), *inner], name=name)(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        model.compile("adam", "mse")
    model.fit(*rows(96), batch_size=32, shuffle=False, verbose=0)
    return model


def everything() -> dict[str, Any]:
    """In each process: the gaps to plain training of a policy, and of what is chosen for a budget."""
    from tfdist.memory import MemoryPolicy, choose, report
    from tfdist.memory.modes import modes_of

    plain = trained()
    some = trained(MemoryPolicy({"block_[13]": "recompute"}, BLOCKS))
    most = report(plain, 32, MemoryPolicy("none", BLOCKS)).devices[0]
    policy = MemoryPolicy("auto", BLOCKS, budget=int(0.7 * (most.total + 0.1 * most.step)))
    choice = choose(plain, 32, policy)
    automatic = trained(policy)
    return {
        "batch": most.batch,
        "modes": [choice.policy.mode_of(name) for name in BLOCKS],
        "in fit": [modes_of(automatic).mode_of(name) for name in BLOCKS],
        "gaps": [gap(plain.get_weights(), other.get_weights()) for other in (some, automatic)],
    }


def test_weights_are_those_of_plain_training_and_all_processes_choose_the_same():
    first, second = run_local(everything, timeout=DEADLINE)
    assert first == second
    assert max(first["gaps"]) < 2e-6
    assert first["modes"] == first["in fit"]
    assert 0 < first["modes"].count("recompute") < len(BLOCKS)
    # A process has half of a batch of 32 rows with 8 features and a label.
    assert first["batch"] == 16 * (8 + 1) * 4
