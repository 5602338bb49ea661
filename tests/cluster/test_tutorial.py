"""TensorFlow's tutorial "Multi-worker training with Keras", with one import changed, as its readers would run it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

import tfdist

pytest.importorskip("sklearn")

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

_DEADLINE = 240
_SCRIPT = Path(__file__).with_name("tutorial") / "main.py"
_MARK = "TUTORIAL_TEST_MARK"


def kill_marked(mark: str) -> list[int]:
    """Kills the processes that carry a mark in their environment; returns their ids."""
    killed = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
                killed.append(int(entry.name))
    return killed


@functools.cache
def run() -> tuple[int, str, dict[str, str], list[str]]:
    """Returns exit code, everything printed, the logs by task, and the files and folders that are left."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="tfdist-tutorial-") as folder:
        environment = {**os.environ, "PYTHONPATH": str(Path(tfdist.__file__).parent.parent), _MARK: mark}
        command = [sys.executable, "-m", "tfdist", "run", "-n", "2", str(_SCRIPT)]
        launcher = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            printed, _ = launcher.communicate(timeout=_DEADLINE)
        except subprocess.TimeoutExpired:
            launcher.send_signal(signal.SIGTERM)
            try:
                printed, _ = launcher.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                kill_marked(mark)
                printed, _ = launcher.communicate()
            printed += f"\n(ended by the test after {_DEADLINE} s)"
        assert kill_marked(mark) == [], "the launcher left processes behind"
        logs = {path.stem: path.read_text(errors="replace") for path in Path(folder).glob("tfdist-logs/*/*.log")}
        left = sorted(str(path.relative_to(folder)) for path in Path(folder).iterdir())
    return launcher.returncode, printed, logs, left


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
