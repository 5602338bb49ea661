"""TensorFlow's tutorial "Multi-worker training with Keras", with one import changed, as its readers would run it."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path

import pytest

from tests.launcher.conftest import WarmLaunch

pytest.importorskip("sklearn")

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.exhaustive]

_DEADLINE = 240
_SCRIPT = Path(__file__).with_name("tutorial") / "main.py"


@functools.cache
def run() -> tuple[int, str, dict[str, str], list[str]]:
    """Returns exit code, everything printed, the logs by task, and the files and folders that are left."""
    with tempfile.TemporaryDirectory(prefix="tfdist-tutorial-") as folder:
        launch = WarmLaunch(Path(folder), ["run", "-n", "2", str(_SCRIPT)], {})
        try:
            result = launch.finish(_DEADLINE)
            launch.assert_nothing_is_left()
        finally:
            launch.clean_up()
        logs = {path.stem: path.read_text(errors="replace") for path in Path(folder).glob("tfdist-logs/*/*.log")}
        left = sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith("launcher-"))
    return result.code, result.out + result.err, logs, left


def printed_by(task: str, label: str) -> str:
    """What one task has printed behind a label."""
    _, _, logs, _ = run()
    (text,) = re.findall(rf"^{label}: (.*)$", logs[task], re.MULTILINE)
    return text


@pytest.fixture(params=["worker-0", "worker-1"])
def task(request) -> str:
    return request.param


@pytest.mark.timeout(_DEADLINE + 30)
class TestTutorial:
    def test_exit_code(self):
        code, printed, logs, _ = run()
        last_lines = "\n".join(f"--- {task}\n{log[-3000:]}" for task, log in logs.items())
        assert code == 0, f"{printed[-3000:]}\n{last_lines}"

    def test_accuracy_improves(self, task):
        first, _, last = json.loads(printed_by(task, "accuracy"))
        assert last > first + 0.1
        assert last > 0.5

    def test_all_workers_see_the_same_accuracy(self):
        assert printed_by("worker-0", "accuracy") == printed_by("worker-1", "accuracy")

    def test_every_worker_writes_its_own_path(self, task):
        assert printed_by(task, "written") == "True"

    def test_saved_model_is_the_trained_one(self, task):
        assert float(printed_by(task, "loaded model")) > json.loads(printed_by(task, "accuracy"))[-1] - 0.05

    def test_with_callbacks(self, task):
        losses = json.loads(printed_by(task, "with callbacks"))
        assert len(losses) == 3
        assert losses[2] < losses[0]

    def test_files_that_are_left(self):
        *_, left = run()
        temporary = [name for name in left if name.startswith("workertemp")]
        assert [name for name in left if name not in temporary] == [
            "best.keras",
            "ckpt",
            "keras-model.keras",
            "tfdist-logs",
        ]
