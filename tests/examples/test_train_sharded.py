"""The example of a model that is too large for one process: two train it, if each keeps a part of every weight."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.conftest import DEADLINE, values

NAME = "train_sharded.py"

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(DEADLINE + 60)]


def test_two_processes_train_it(example: Callable[..., str], tmp_path: Path) -> None:
    printed = example(NAME, "--steps=6", run=["-n", "2"])
    first, last = values(printed, "loss")
    assert last < min(first, 5.0)  # by chance: 5.5, the logarithm of 256
    ((whole,), (used, limit)) = (
        map(float, re.search(pattern, printed).groups())
        for pattern in (r"with gradients and slots (\d+) MB", r"keras; (\d+) MB of (\d+) were used")
    )
    assert used <= limit == 170 < whole
    # A plain file of whole weights.
    assert (tmp_path / "sharded.keras").stat().st_size > 4 * 12e6


@pytest.mark.parametrize(
    ("options", "run"),
    [((), None), (("--strategy", "MultiWorkerMirroredStrategy"), ["-n", "2", "--max-restarts", "0"])],
)
def test_whole_weights_do_not_fit(example: Callable[..., str], options: tuple[str, ...], run: list[str] | None) -> None:
    printed = example(NAME, *options, run=run, fails=True)
    assert "out of memory: " in printed
    assert "saved as" not in printed
