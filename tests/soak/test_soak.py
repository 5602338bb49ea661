"""A soak that has to find something; `make soak` runs the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE = 540


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
class TestSoak:
    def test_a_training_that_forgets_is_found(self, tmp_path: Path):
        """Negative control."""
        (tmp_path / "forget").touch()
        code, said = soak("--seconds", "0", "--seed", "7", "--folder", str(tmp_path))
        assert code == 1
        assert "failed: the end differs from that of an undisturbed run: History.history.loss[0]: " in said
        assert "dense/kernel: 1536 of 1536 values differ" in said
        assert "again: python -m tests.soak --seed 7 --seconds 0 --pause 18" in said


def soak(*options: str) -> tuple[int, str]:
    """The exit code of a soak, and what it has printed."""
    words = [sys.executable, "-m", "tests.soak", *options]
    # As in a shell: tests/conftest.py sets it, for other tests.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = process.communicate(timeout=DEADLINE)
    finally:
        # SIGTERM has it end what it has started, and so has its guardian if it is killed.
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
    print(said)
    return process.returncode, said
