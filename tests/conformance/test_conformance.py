"""A sample of `make conformance`, and what it calls worse and better."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from tests.conformance.in_scope import KERAS_DISTRIBUTION
from tests.conformance.keras_tests import DISTRIBUTION, files, keras_directory, run_file
from tools.conformance import KNOWN, compare, failures, table

FILES = {path.name: path for path in files()}

needs_jax = pytest.mark.skipif(
    find_spec("jax") is None, reason="Keras' tests of its trainer import jax; `make conformance` installs it"
)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "strategy", "options"),
    [
        pytest.param("reduce_lr_on_plateau_test.py", "MultiWorker", [], marks=pytest.mark.nightly),
        pytest.param("trainer_test.py", "Mirrored", ["-k", "nested_inputs or fit_flow_jit"], marks=needs_jax),
    ],
)
def test_sample(name, strategy, options):
    outcomes = run_file(FILES[name], strategy, options)
    assert outcomes, "no test ran"
    failed = {test: reason for test, (outcome, reason) in outcomes.items() if outcome == "failed"}
    assert not failed


@pytest.mark.cluster
@pytest.mark.nightly
def test_keras_own_tests_of_its_distribution_api():
    if not (path := keras_directory() / DISTRIBUTION).exists():
        pytest.skip("this Keras comes without its tests")
    outcomes = run_file(path, KERAS_DISTRIBUTION)
    failed = {KERAS_DISTRIBUTION: {test: why for test, (outcome, why) in outcomes.items() if outcome != "passed"}}
    assert compare(failed, json.loads(KNOWN.read_text()), set(outcomes)) == []
    assert len(outcomes) >= 38


@pytest.mark.cluster
@pytest.mark.nightly
def test_the_strategy_is_really_there():
    """The negative control: `tf.distribute`'s own strategy fails where the one of tfdist passes."""
    outcomes = run_file(FILES["swap_ema_weights_test.py"], "tf.distribute's Mirrored")
    assert "failed" in {outcome for outcome, _ in outcomes.values()}


def test_worse_and_better():
    found = {
        "none": {"a": ("passed", ""), "b": ("passed", ""), "c": ("failed", "anyway"), "d": ("passed", "")},
        "Mirrored": {"a": ("failed", "it hangs"), "b": ("passed", ""), "c": ("failed", "anyway")},
    }
    failed = failures(found)
    assert failed == {"Mirrored": {"a": "it hangs", "d": "did not run: the file ended before"}}
    assert compare(failed, {"Mirrored": {"d": "known", "b": "known"}}, {"a", "b", "d"}) == [
        "worse: Mirrored: a: it hangs",
        "better: Mirrored: b passes; take it out of known.json",
    ]
    assert table(found).splitlines()[2:] == ["| none | 3 |", "| Mirrored | 1 |"]
