"""The example of a language model: two stages, or two workers, train what one process trains."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.examples.conftest import values
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


def by_epoch(printed: str) -> list[float]:
    """The loss at the end of each epoch; a progress bar has shown others before."""
    _, *epochs = re.split(r"^Epoch \d+/\d+$", printed, flags=re.MULTILINE)
    return [values(epoch, "loss")[-1] for epoch in epochs]


@pytest.mark.exhaustive
def test_two_stages_train_what_one_device_trains(warm_launch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = [*SMALL, "--timeline", "timeline.png"]
    started = warm_launch("", command=["run", "--stages", "2", str(EXAMPLE), *options])
    result = started.finish(DEADLINE)
    assert result.code == 0, f"{result.out[-3000:]}\n{result.err[-3000:]}\n{started.log('worker-1')[-3000:]}"
    started.assert_nothing_is_left()
    perplexity, sample = results(result.out)
    assert 10.0 < perplexity < 100.0
    assert sample.startswith("The ")

    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    boxes = Counter((e["pid"], e["tid"], e["name"]) for e in events if e["ph"] == "X")
    assert boxes == Counter(
        (process, stage, f"{kind} {i}")
        for process in (1, 2)
        for stage in (0, 1)
        for kind in ("forward", "backward")
        for i in range(3)
    )
    assert (tmp_path / "timeline.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "language_model.keras").stat().st_size > 10_000

    alone = forked([str(EXAMPLE), *SMALL, "--model-path", "alone.keras"], tmp_path / "alone", tmp_path, os.environ)
    assert alone.wait(DEADLINE) == 0, (tmp_path / "alone").read_text()[-3000:]
    assert results((tmp_path / "alone").read_text()) == (pytest.approx(perplexity, abs=0.02), sample)


@pytest.mark.exhaustive
def test_two_workers_that_recompute_train_what_one_device_trains(example, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 400)
    options = ["--text=own.txt", "--epochs=8", "--batch-size=128", "--length=16", "--width=16", "--blocks=2"]
    data = ["--parallel=data", "--memory=recompute", "--backup-dir=backup"]
    two = example("train_language_model.py", *options, *data, run=["-n", "2"])
    one = example("train_language_model.py", *options, "--microbatches=2")
    other = example("train_language_model.py", *options, "--microbatches=2", "--seed=2")
    losses = [by_epoch(printed) for printed in (two, one, other)]
    assert len(losses[0]) == 8
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    # In the end it knows the sentence with any seed.
    assert losses[2][0] != pytest.approx(losses[0][0], rel=4e-3)
    perplexity, sample = results(two)
    assert results(one) == (pytest.approx(perplexity, rel=0.02), sample)
    assert perplexity < 12


@pytest.mark.exhaustive
def test_a_text_that_is_too_short_is_refused(example, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("The end.")
    printed = example("train_language_model.py", "--text=own.txt", fails=True)
    assert "received a part of 7 bytes, expected more than --length 64: a longer text" in printed
