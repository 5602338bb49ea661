"""Keras' OrbaxCheckpoint on two workers: one process writes, in the background."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed: pip install orbax-checkpoint, with jax")
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("orbax_program.py")
pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1900)]


def train(folder: Path, epochs: int) -> list[dict[str, Any]]:
    """Runs the program on two workers; returns what each has printed."""
    options = ["-n", "2", "--output", "all", "--log-dir", f"{folder}-logs"]
    done = subprocess.run(
        [sys.executable, "-m", "tfdist", "run", *options, str(PROGRAM), str(folder), str(epochs)],
        cwd=folder.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '{"begin"' in line]


def epochs_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_goes_on_with_the_newest_checkpoint(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 4)
    first = train(tmp_path / "parts", 2)
    assert epochs_in(tmp_path / "parts") == ["0", "1"]
    second = train(tmp_path / "parts", 4)
    assert epochs_in(tmp_path / "parts") == epochs_in(tmp_path / "whole") == ["1", "2", "3"]
    # All know where to go on, one writes.
    assert sorted(run["saves"] for run in first) == [0, 2]
    assert [run["begin"] for run in second] == [2, 2]
    assert {str(run["sums"]) for run in second} == {str(run["sums"]) for run in whole}
    # Would a difference be seen?
    assert {str(run["sums"]) for run in first}.isdisjoint(str(run["sums"]) for run in second)
