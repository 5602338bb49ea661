"""The feature table, with one execution at a time, and in synchronous training: some rows, one of each kind that is not
equal, and what is refused; all others in `make nightly`."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.features import reference
from tests.features.running import Found, gaps_of, run_rows
from tests.features.selection import AGAIN, EXCHANGES, VARIANTS
from tests.features.table import ASSIGNED, DERIVED, FEATURES
from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# One start of TensorFlow for the whole table, and one deadline for all of its rows.
_DEADLINE = 540

WITHOUT_CALL = "a train_step without call, layers built in it (as in Keras' VAE and DCGAN examples)"
XLA = "jit_compile=True (XLA), with BatchNormalization"
REFUSED = {
    "async": {
        XLA: "Received: compile(jit_compile=True) under ParameterServerStrategy.",
        "run_eagerly": "Received: run_eagerly=True under ParameterServerStrategy.",
        "distribute_datasets_from_function": "Received: a dataset function for predict",
    },
    "sync": {
        XLA: "Received: compile(jit_compile=True) under ParameterServerStrategy.",
        "run_eagerly": "Received: run_eagerly=True under ParameterServerStrategy.",
        "distribute_datasets_from_function": "Received: a dataset function and mode='sync'.",
        "two optimizers in a train_step (GAN)": "Received: a train_step that applies gradients 2 times (optimizers '",
        WITHOUT_CALL: "Received: a train_step that applies gradients 2 times (optimizers '",
        "loss reduced by mean_with_sample_weight": "Received: something that needs the whole batch",
        "masked sequences, a loss per time step": "Received: something that needs the whole batch",
        "BatchNormalization(synchronized=True)": "Received: something that needs the whole batch",
        "all_gather in the loss of a train_step (clip)": "Received: something that needs the whole batch",
        "global_sum in compute_loss and add_loss, uneven": "Received: something that needs the whole batch",
        "state that layers and a train_step keep (centre, counts, momentum encoder, memory bank)": (
            "Received: something that needs the whole batch"
        ),
    },
}

# In synchronous training BatchNormalization takes the statistics of a shard, and all rows are in no one place.
PER_SHARD = {
    "TextVectorization and ragged.to_tensor without a length, unmasked",
    "BatchNormalization",
    "BatchNormalization in a custom train_step, uneven",
    "train_on_batch, test_on_batch, predict_on_batch",
}
# The gradients are applied after the step has logged `iterations`.
LOGGED_BEFORE = {"metrics and other values in the logs of a train_step"}

# The others are the same bit for bit with one execution at a time; here TensorFlow fuses operations otherwise in the
# function of several steps, and across devices.
ALMOST_EQUAL = {
    "steps_per_execution, uneven",
    "labelled and unlabelled rows, of other numbers, in one batch (FixMatch)",
    WITHOUT_CALL,
    # On some processors, and with TensorFlow 2.20.
    "BatchNormalization",
}


def some_rows(names: list[str], mode: str, place: Path) -> Found:
    """In the chief."""
    import tfdist

    return run_rows(tfdist.ParameterServerStrategy(mode=mode, max_inflight=1, start_timeout=120), names, place)


# What `make test` runs in synchronous training; in asynchronous training, nothing.
EQUAL_DAILY = (
    "batches of 5 and of 3 rows, plain SGD",
    "Embedding and Adam (sparse gradients)",
    "BatchNormalization",
    "a Transformer's block, padded batches",
    DERIVED,
    ASSIGNED,
)
# Before the step, and in it.
REFUSED_DAILY = ("run_eagerly", "masked sequences, a loss per time step")
DAILY = (*REFUSED_DAILY, *EQUAL_DAILY)
REST = tuple(name for name in FEATURES if name not in (*DAILY, *VARIANTS))
ASYNCHRONOUS = tuple(dict.fromkeys([*EXCHANGES, *AGAIN, *REFUSED["async"], WITHOUT_CALL]))


@functools.cache
def _results(mode: str, names: tuple[str, ...]) -> Found:
    (table,) = run_local(some_rows, workers=2, ps=2, timeout=_DEADLINE, args=(list(names), mode, reference.folder()))
    return table


def results(mode: str, name: str) -> Found:
    """What was found of a row, and of those that are run with it."""
    return _results(mode, ASYNCHRONOUS if mode == "async" else DAILY if name in DAILY else REST)


@pytest.mark.nightly
@pytest.mark.timeout(_DEADLINE + 60)
@pytest.mark.parametrize("name", [name for name in ASYNCHRONOUS if name not in REFUSED["async"]])
def test_one_execution_at_a_time_equals_one_process(name):
    assert max(gaps_of(results("async", name), name).values()) <= (1e-6 if name in ALMOST_EQUAL else 0.0)


@pytest.mark.timeout(_DEADLINE + 60)
@pytest.mark.parametrize("name", daily([name for name in DAILY + REST if name not in REFUSED["sync"]], *EQUAL_DAILY))
def test_synchronous_training_equals_one_process(name):
    found = results("sync", name)
    if name in PER_SHARD | LOGGED_BEFORE:
        assert "does not equal one process" in found[name] or "Largest absolute" in found[name]
    else:
        assert max(gaps_of(found, name).values()) <= (2e-3 if name.startswith("mixed_") else 1e-6)


@pytest.mark.timeout(_DEADLINE + 60)
@pytest.mark.parametrize(
    ("mode", "name"),
    [
        pytest.param(mode, name, marks=() if mode == "sync" and name in DAILY else pytest.mark.nightly)
        for mode, names in REFUSED.items()
        for name in names
    ],
)
def test_what_is_refused(mode, name):
    assert REFUSED[mode][name] in results(mode, name)[name]
