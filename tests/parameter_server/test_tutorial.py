"""The custom loop of TensorFlow's tutorial on parameter servers, with one name changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.processes import forked

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(150)]

_DEADLINE = 120


def test_custom_loop(tmp_path: Path) -> None:
    environment = {**os.environ, "TF_NUM_INTEROP_THREADS": "4", "TF_CPP_MIN_LOG_LEVEL": "2"}
    script = Path(__file__).with_name("tutorial") / "main.py"
    process = forked([str(script)], tmp_path / "output", tmp_path, environment)
    try:
        code = process.wait(_DEADLINE)
    finally:
        process.kill()
    printed = (tmp_path / "output").read_text()
    assert code == 0, printed[-4000:]
    found = json.loads(printed.splitlines()[-1])
    assert found["iterations"] == 41
    assert found["accuracies"][-1] > 0.95 > found["accuracies"][0]
    assert found["places"] == [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(2)]
