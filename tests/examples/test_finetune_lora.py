"""The example of LoRA: only adapters are trained, and two workers train what one trains."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

SMALL = ["--base-epochs=1", "--epochs=1", "--batch-size=128"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def needs_keras_hub() -> None:
    pytest.importorskip("keras_hub", reason="needs the extra `lora`")


def adapters(path: Path) -> np.ndarray:
    """All numbers in a file of adapters."""
    import h5py

    found = []
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.append(np.ravel(item)) if hasattr(item, "shape") else None)
    return np.concatenate([numbers for numbers in found if numbers.size > 1])  # not the rank


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """How far apart they are, relative to their size."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def losses(printed: str) -> tuple[float, float]:
    ((before, after),) = re.findall(r"^held-out loss: ([\d.]+) before, ([\d.]+) after;", printed, re.MULTILINE)
    return float(before), float(after)


def test_two_workers_train_the_adapters_that_one_trains(example, tmp_path: Path) -> None:
    two = example("finetune_lora.py", *SMALL, run=["-n", "2"])
    one = example("finetune_lora.py", *SMALL, "--adapter-path=alone.lora.h5")
    before, after = losses(two)
    assert after < before - 0.01
    assert losses(one) == pytest.approx((before, after), abs=0.003)
    assert "a sample: 'def " in two

    found, expected = adapters(tmp_path / "adapter.lora.h5"), adapters(tmp_path / "alone.lora.h5")
    assert found.shape == expected.shape
    # Adam's first steps have the size of the learning rate, also where the gradient is hardly more than rounding.
    assert distance(found, expected) < 0.05
    example("finetune_lora.py", *SMALL, "--adapter-path=other.lora.h5", "--seed=2")
    assert distance(adapters(tmp_path / "other.lora.h5"), expected) > 0.5
