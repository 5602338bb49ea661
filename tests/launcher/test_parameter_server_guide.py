"""The guide of parameter servers prints what it says, and its example survives a killed worker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import SOURCE, wait_until

PAGE = SOURCE / "docs" / "parameter-server.md"
EXAMPLE = SOURCE / "examples" / "recommender.py"
SMALL = ["--rows=300000", "--users=500", "--items=200", "--batch-size=512"]
CLUSTER = ["-n", "2", "--ps", "2", "--log-dir", "logs"]
DEADLINE = 120.0

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE + 30)]


def scores(printed: str) -> tuple[float, float]:
    """AUC, and the best that is possible."""
    ((found, best),) = re.findall(
        r"AUC on held-out data: ([\d.]+) \(best possible: ([\d.]+), by chance: 0.500\)", printed
    )
    return float(found), float(best)


def test_the_guides_program(launch, tmp_path: Path) -> None:
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (program,) = [text for text in programs if "ParameterServerStrategy()" in text]
    (expected,) = re.findall(
        r"^\$ tfdist run -n 2 --ps 2 train.py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "train.py").write_text(program)
    started = launch("", command=[sys.executable, "-m", "tfdist", "run", *CLUSTER, "train.py"])
    result = started.finish(DEADLINE)
    assert result.code == 0, f"{result.out[-3000:]}\n{result.err[-3000:]}"
    assert result.out.splitlines()[-1:] == expected.splitlines()
    started.assert_nothing_is_left()


@pytest.mark.exhaustive
def test_the_example_survives_a_killed_worker(launch, tmp_path: Path) -> None:
    started = launch("", command=[sys.executable, "-m", "tfdist", "run", *CLUSTER, str(EXAMPLE), *SMALL])
    chief, worker = tmp_path / "logs" / "chief-0.log", tmp_path / "logs" / "worker-1.log"
    wait_until(lambda: chief.exists() and "Epoch 2/4" in chief.read_text(), DEADLINE, "the first epoch's end")
    (process,) = re.findall(r"^tfdist: worker 1 \(\S+\) serves .*, as process (\d+)$", worker.read_text(), re.MULTILINE)
    os.kill(int(process), signal.SIGKILL)
    result = started.finish(DEADLINE)
    assert result.code == 0, f"{result.out[-3000:]}\n{result.err[-3000:]}"
    assert "worker 1 was killed by SIGKILL" in result.err
    assert "restart" not in result.err.replace("started again (replacement 1 of 3), the others go on", "")
    started.assert_nothing_is_left()
    found, best = scores(result.out)
    assert best > 0.7

    alone = subprocess.run(
        [sys.executable, str(EXAMPLE), *SMALL, "--model-path", "alone.keras", "--backup-dir", "alone.backup"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert alone.returncode == 0, alone.stderr[-3000:]
    expected, _ = scores(alone.stdout)
    assert expected > best - 0.02
    # Asynchronous training takes another way to the same place.
    assert found == pytest.approx(expected, abs=0.005)
