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


@pytest.mark.exhaustive
def test_fit_on_two_workers_and_a_loop_alone_train_the_same(example, tmp_path: Path) -> None:
    two = losses(example("train_gan.py", *SMALL, run=["-n", "2"]))
    # A grid of eight by eight images of 8x8 pixels.
    assert struct.unpack(">II", (tmp_path / "gan.png").read_bytes()[16:24]) == (64, 64)
    assert (tmp_path / "generator.keras").stat().st_size > 10_000
    alone = ["--loop", "--images-path=alone.png", "--model-path=alone.keras"]
    np.testing.assert_allclose(losses(example("train_gan.py", *SMALL, *alone)), two, atol=2e-3)


@pytest.mark.exhaustive
def test_a_loop_on_two_workers_and_fit_alone_train_the_same(example) -> None:
    two = losses(example("train_gan.py", *SMALL, "--loop", run=["-n", "2"]))
    one = losses(example("train_gan.py", *SMALL))
    other = losses(example("train_gan.py", *SMALL, "--seed=2"))
    np.testing.assert_allclose(one, two, atol=2e-3)
    assert np.abs(other - one).max() > 5e-3


@pytest.mark.exhaustive
def test_images_become_like_those_of_the_data(example, tmp_path: Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_digits

    example("train_gan.py", run=["-n", "2"])
    made = np.asarray(Image.open(tmp_path / "gan.png"), dtype=float) / 255
    wanted = load_digits().images / 16
    assert made.mean() == pytest.approx(wanted.mean(), abs=0.1)
    assert made.std() == pytest.approx(wanted.std(), abs=0.1)
    # The corners of all images are dark, and their middles are not.
    images = made.reshape(8, 8, 8, 8).swapaxes(1, 2).reshape(64, 8, 8)
    assert images[:, ::7, ::7].mean() < 0.15
    assert images[:, 2:6, 2:6].mean() > 0.35
    # They differ from each other as much as those of the data.
    assert images.std(axis=0).mean() > 0.5 * wanted.std(axis=0).mean()
