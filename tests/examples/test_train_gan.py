"""The example of a GAN: `fit` on two workers and a loop alone train the same."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from tests.examples.conftest import values

SMALL = ["--filters=8", "--epochs=2", "--batch-size=256"]
NAMES = ("generator_loss", "discriminator_loss")

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def needs_images() -> None:
    pytest.importorskip("sklearn", reason="needs the extra `examples`")


def losses(printed: str) -> np.ndarray:
    found = np.array([values(printed, name) for name in NAMES])
    assert found.shape == (2, 2), printed[-3000:]
    return found


@pytest.mark.nightly
def test_fit_on_two_workers_and_a_loop_alone_train_the_same(example, tmp_path: Path) -> None:
    two = losses(example("train_gan.py", *SMALL, run=["-n", "2"]))
    # A grid of eight by eight images of 8x8 pixels.
    assert struct.unpack(">II", (tmp_path / "gan.png").read_bytes()[16:24]) == (64, 64)
    assert (tmp_path / "generator.keras").stat().st_size > 10_000
    alone = ["--loop", "--images-path=alone.png", "--model-path=alone.keras"]
    one, other = (losses(example("train_gan.py", *SMALL, *alone, *seed)) for seed in ([], ["--seed=2"]))
    np.testing.assert_allclose(one, two, atol=2e-3)
    assert np.abs(other - one).max() > 5e-3
