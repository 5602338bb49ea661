"""Keras' OrbaxCheckpoint under tfdist's strategies: one process writes, in the background."""

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
pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1900)]


def train(folder: Path, epochs: int, strategy: str) -> list[dict[str, Any]]:
    """Runs the program, with "workers" on two of them; returns what each has printed."""
    words = [str(PROGRAM), str(folder), str(epochs), strategy]
    logs = folder.with_name(f"{folder.name}-logs")
    options = ["run", "-n", "2", "--output", "all", "--log-dir", str(logs)]
    command = ["-m", "tfdist", *options, *words] if strategy == "workers" else words
    done = subprocess.run(
        [sys.executable, *command],
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


@pytest.mark.parametrize("strategy", [pytest.param("workers", marks=pytest.mark.cluster)])
def test_goes_on_with_the_newest_checkpoint(strategy: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 4, strategy)
    first = train(tmp_path / "parts", 2, strategy)
    assert epochs_in(tmp_path / "parts") == ["0", "1"]
    second = train(tmp_path / "parts", 4, strategy)
    assert epochs_in(tmp_path / "parts") == epochs_in(tmp_path / "whole") == ["1", "2", "3"]
    # All know where to go on, one writes.
    processes = 2 if strategy == "workers" else 1
    assert sorted(run["saves"] for run in first) == [0, 2][-processes:]
    assert [run["begin"] for run in second] == [2] * processes
    assert {str(run["sums"]) for run in second} == {str(run["sums"]) for run in whole}
    # Would a difference be seen?
    assert {str(run["sums"]) for run in first}.isdisjoint(str(run["sums"]) for run in second)
