"""The guide of parameter servers prints what it says, and its example survives a killed worker."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.launcher.conftest import SOURCE, wait_until
from tests.processes import forked

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


@pytest.mark.nightly
def test_the_guides_program(warm_launch, tmp_path: Path) -> None:
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (program,) = [text for text in programs if "ParameterServerStrategy()" in text]
    (expected,) = re.findall(
        r"^\$ tfdist run -n 2 --ps 2 train.py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "train.py").write_text(program)
    started = warm_launch("", command=["run", *CLUSTER, "train.py"])
    result = started.finish(DEADLINE)
    assert result.code == 0, f"{result.out[-3000:]}\n{result.err[-3000:]}"
    assert result.out.splitlines()[-1:] == expected.splitlines()
    started.assert_nothing_is_left()


@pytest.mark.nightly
def test_the_example_survives_a_killed_worker(warm_launch, tmp_path: Path) -> None:
    started = warm_launch("", command=["run", *CLUSTER, str(EXAMPLE), *SMALL])
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

    words = [str(EXAMPLE), *SMALL, "--model-path", "alone.keras", "--backup-dir", "alone.backup"]
    alone = forked(words, tmp_path / "alone", tmp_path, os.environ)
    assert alone.wait(DEADLINE) == 0, (tmp_path / "alone").read_text()[-3000:]
    expected, _ = scores((tmp_path / "alone").read_text())
    assert expected > best - 0.02
    # Asynchronous training takes another way to the same place.
    assert found == pytest.approx(expected, abs=0.005)
