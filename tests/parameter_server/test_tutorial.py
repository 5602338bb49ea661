"""TensorFlow's tutorial on parameter servers, both of its parts, with one name changed."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import tfdist

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(150)]

_DEADLINE = 120
_SCRIPT = Path(__file__).with_name("tutorial") / "main.py"


@functools.cache
def results() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tfdist-tutorial-") as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(tfdist.__file__).parent.parent),
            "TF_NUM_INTEROP_THREADS": "4",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        process = subprocess.run(
            [sys.executable, str(_SCRIPT), folder], env=environment, capture_output=True, text=True, timeout=_DEADLINE
        )
    assert process.returncode == 0, f"{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
    return json.loads(process.stdout.splitlines()[-1])


def test_fit():
    found = results()["fit"]
    assert found["iterations"] == 100
    assert len(found["losses"]) == 5
    assert found["losses"][-1] < found["losses"][0]
    assert {"ckpt.keras", "log.csv"} <= set(found["files"])


def test_custom_loop():
    found = results()["loop"]
    assert found["iterations"] == 41
    assert found["accuracies"][-1] > 0.95 > found["accuracies"][0]
    assert found["places"] == [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(2)]
