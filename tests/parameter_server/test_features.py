"""Every row of the feature table, with one execution at a time, and in synchronous training."""

from __future__ import annotations

import functools
import traceback
import unittest

import pytest

from tests.features.table import FEATURES
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# One start of TensorFlow for the whole table, and one deadline for all of its rows.
_DEADLINE = 540

REFUSED = {
    "async": {
        "run_eagerly": "Received: run_eagerly=True under ParameterServerStrategy.",
        "distribute_datasets_from_function": "Received: a dataset function for predict",
    },
    "sync": {
        "run_eagerly": "Received: run_eagerly=True under ParameterServerStrategy.",
        "distribute_datasets_from_function": "Received: a dataset function and mode='sync'.",
        "two optimizers in a train_step (GAN)": "Received: a train_step that applies gradients 2 times (optimizers '",
        "optimizers in a dict and in a sub-model": "Received: a train_step that applies gradients 2 times",
        "loss reduced by mean_with_sample_weight": "Received: something that needs the whole batch",
        "masked sequences, a loss per time step": "Received: something that needs the whole batch",
        "BatchNormalization(synchronized=True)": "Received: something that needs the whole batch",
    },
}

# In synchronous training BatchNormalization takes the statistics of a shard.
PER_SHARD = {
    "BatchNormalization",
    "BatchNormalization in a custom train_step, uneven",
    "BatchNormalization of data far from zero",
    "convolutional network",
    "subclassed model, built by fit",
    "train_on_batch, test_on_batch, predict_on_batch",
}
# The gradients are applied after the step has logged `iterations`.
LOGGED_BEFORE = {"metrics and other values in the logs of a train_step"}

# The others are the same bit for bit with one execution at a time; here TensorFlow fuses operations otherwise in the
# function of several steps, and across devices.
ALMOST_EQUAL = {
    "global_clipnorm",
    "steps_per_execution",
    "steps_per_execution, uneven",
    "convolutional network",
}


def whole_table(names: list[str], mode: str) -> dict[str, dict[str, float] | str]:
    """In the chief: the largest differences, or the traceback, of every row."""
    import tfdist

    strategy = tfdist.ParameterServerStrategy(mode=mode, max_inflight=1, start_timeout=120)
    results: dict[str, dict[str, float] | str] = {}
    for name in names:
        print("feature:", name, flush=True)
        try:
            results[name] = FEATURES[name](strategy)
        except unittest.SkipTest as reason:
            results[name] = f"skipped: {reason}"
        except Exception:
            results[name] = traceback.format_exc()
    return results


@functools.cache
def results(mode: str) -> dict[str, dict[str, float] | str]:
    (table,) = run_local(whole_table, workers=2, ps=2, timeout=_DEADLINE, args=(list(FEATURES), mode))
    return table


def gaps_of(mode: str, name: str) -> dict[str, float]:
    found = results(mode)[name]
    if str(found).startswith("skipped"):
        pytest.skip(found)
    assert isinstance(found, dict), found
    assert found, "nothing was compared"
    return found


@pytest.mark.timeout(_DEADLINE + 60)
@pytest.mark.parametrize("name", [name for name in FEATURES if name not in REFUSED["async"]])
def test_one_execution_at_a_time_equals_one_process(name):
    assert max(gaps_of("async", name).values()) <= (1e-6 if name in ALMOST_EQUAL else 0.0)


@pytest.mark.timeout(_DEADLINE + 60)
@pytest.mark.parametrize("name", [name for name in FEATURES if name not in REFUSED["sync"]])
def test_synchronous_training_equals_one_process(name):
    if name in PER_SHARD | LOGGED_BEFORE:
        assert "does not equal one process" in results("sync")[name] or "Largest absolute" in results("sync")[name]
    else:
        assert max(gaps_of("sync", name).values()) <= (2e-3 if name.startswith("mixed_") else 1e-6)


@pytest.mark.timeout(_DEADLINE + 60)
@pytest.mark.parametrize(("mode", "name"), [(mode, name) for mode, names in REFUSED.items() for name in names])
def test_what_is_refused(mode, name):
    assert REFUSED[mode][name] in results(mode)[name]
