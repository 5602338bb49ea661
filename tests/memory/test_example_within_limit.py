"""The example of a memory limit: plain Keras runs out of memory, and with a policy the same model learns in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import SOURCE

EXAMPLE = SOURCE / "examples" / "train_within_limit.py"
# It computes for two minutes on two quiet cores.
DEADLINE = 1200.0

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(DEADLINE + 30)]


def test_a_batch_that_only_a_policy_can_hold(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs the extra `examples`")
    result = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        # Without oneDNN, which TensorFlow uses by default on some processors only, the training hardly fits.
        env={**os.environ, "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": "-1", "TF_ENABLE_ONEDNN_OPTS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    _, plain, recomputed = re.split(r"^--- --memory \w+$", result.stdout, flags=re.MULTILINE)

    assert "test accuracy" not in plain
    # On some processors, TensorFlow's oneDNN takes the memory that it does not get for memory, and ends by SIGSEGV.
    if "--- ended with exit code -11" not in plain:
        # Which of a step's tensors does not fit, and whether several do not, depends on the order of the executor.
        assert re.search(r"^out of memory: .*OOM when allocating tensor", result.stderr, re.MULTILINE)
        assert "--- ended with exit code 1" in plain

    assert "--- ended with exit code 0" in recomputed, result.stderr[-3000:]
    assert len(re.findall(r"^Epoch \d+/20$", recomputed, re.MULTILINE)) == 20
    (numbers,) = re.findall(r"test accuracy: ([\d.]+); (\d+) MB of (\d+) were used", recomputed)
    accuracy, used, limit = map(float, numbers)
    assert accuracy >= 0.95
    assert used < limit == 128
