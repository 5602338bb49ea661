"""The example of TensorFlow Datasets: prepared by one of two workers, killed in an epoch; its images are made up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES, values

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT, MADE_UP = "train_fashion_mnist.py", ["--made-up", "--epochs=2"]


@pytest.mark.nightly
def test_a_worker_that_is_killed_changes_nothing(warm_launch, tmp_path: Path) -> None:
    """Its data are prepared by each run for itself, from a cold cache, and its files are shuffled."""
    # A backup is left out while the one before is still being written: on a slow disk, most of these are.
    script = [str(EXAMPLES / SCRIPT), "--made-up", "--epochs=6", "--save-freq=2"]
    started = warm_launch("", command=["drill", "--json", "--only", "kill-worker", *script])
    result = started.finish(500)
    assert result.code == 0, f"{result.out[-3000:]}\n{result.err[-3000:]}"
    assert '"identical"' in result.out


@pytest.mark.nightly
def test_two_workers_learn_what_one_learns(example, tmp_path: Path) -> None:
    two = example(SCRIPT, *MADE_UP, run=["-n", "2"])
    assert re.search(r"^test accuracy: [01]\.\d+; the best model is in fashion\.keras$", two, re.MULTILINE)
    one = example(SCRIPT, *MADE_UP)
    # Dropout draws another mask on each replica.
    assert values(one, "val_loss") == pytest.approx(values(two, "val_loss"), abs=0.1)
