"""The example of a language model: two stages, or two workers, train what one process trains."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.launcher.conftest import SOURCE
from tests.processes import forked

EXAMPLE = SOURCE / "examples" / "train_language_model.py"
SMALL = ["--epochs=1", "--batch-size=1024", "--length=16", "--width=16", "--blocks=1", "--microbatches=3"]
DEADLINE = 150.0

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE + 30)]


def results(printed: str) -> tuple[float, str]:
    """Perplexity and sample."""
    ((perplexity, sample),) = re.findall(r"text: ([\d.]+) \(by chance: 256\)\n.*a sample: '(.*)'", printed)
    return float(perplexity), sample


@pytest.mark.nightly
def test_two_stages_train_what_one_device_trains(warm_launch, tmp_path: Path) -> None:
    started = warm_launch("", command=["run", "--stages", "2", str(EXAMPLE), *SMALL])
    result = started.finish(DEADLINE)
    assert result.code == 0, f"{result.out[-3000:]}\n{result.err[-3000:]}\n{started.log('worker-1')[-3000:]}"
    started.assert_nothing_is_left()
    perplexity, sample = results(result.out)
    assert 10.0 < perplexity < 100.0
    assert sample.startswith("The ")
    assert (tmp_path / "language_model.keras").stat().st_size > 10_000

    alone = forked([str(EXAMPLE), *SMALL, "--model-path", "alone.keras"], tmp_path / "alone", tmp_path, os.environ)
    assert alone.wait(DEADLINE) == 0, (tmp_path / "alone").read_text()[-3000:]
    assert results((tmp_path / "alone").read_text()) == (pytest.approx(perplexity, abs=0.02), sample)
