"""TensorFlow's tutorial on parameter servers, both of its parts, with one name changed."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.processes import forked

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(150)]

_DEADLINE = 120
_SCRIPT = Path(__file__).with_name("tutorial") / "main.py"


@functools.cache
def results() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tfdist-tutorial-") as folder:
        environment = {**os.environ, "TF_NUM_INTEROP_THREADS": "4", "TF_CPP_MIN_LOG_LEVEL": "2"}
        output = Path(folder, "output")
        process = forked([str(_SCRIPT), folder], output, Path(folder), environment)
        try:
            code = process.wait(_DEADLINE)
        finally:
            process.kill()
        printed = output.read_text()
    assert code == 0, printed[-4000:]
    return json.loads(printed.splitlines()[-1])


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
