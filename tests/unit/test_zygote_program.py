"""Changing the number of threads of numerical libraries after they were loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tfdist.launcher.warm.zygote_program import wanted_threads

COUNT_THREADS = """
import os
import numpy as np
from tfdist.launcher.warm.zygote_program import set_threads

set_threads(%d)
np.ones((600, 600)) @ np.ones((600, 600))
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "9"}, 8),
        ({"OMP_NUM_THREADS": ""}, 8),
        ({"OMP_NUM_THREADS": "0"}, 8),
    ],
)
def test_wanted_threads(env: dict[str, str], expected: int) -> None:
    assert wanted_threads(env, cores=8) == expected


@pytest.mark.parametrize("count", [1, 3])
def test_numpy_follows(count: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", COUNT_THREADS % count],
        env={"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.stderr, result.stdout) == ("", f"{count}\n")


def test_nothing_loaded() -> None:
    code = "from tfdist.launcher.warm.zygote_program import set_threads; set_threads(2)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert "RuntimeError: NumPy's BLAS cannot be told to use 2 threads: expected OpenBLAS." in result.stderr
