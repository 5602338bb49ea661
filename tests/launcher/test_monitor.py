"""`tfdist monitor` of runs of `tfdist run`: while they train, after a worker was killed, and when they are over."""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launcher.conftest import DEADLINE, SOURCE, Launch, wait_until
from tests.launcher.training import of_kind, program

TRAIN = """
    import json, os, signal, sys, time
    from pathlib import Path
    import keras, numpy as np, tfdist

    class Pace(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.1)
            if int(self.model.optimizer.iterations) == 12:
                while not Path("go").exists(): time.sleep(0.02)
            if os.environ["TFDIST_RESTART"] == "0" and index == 1 and int(self.model.optimizer.iterations) == 20:
                os.kill(os.getpid(), signal.SIGKILL)

    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = np.random.default_rng(0).normal(size=(40, 4)), np.ones((40, 1))
    backup = tfdist.callbacks.BackupAndRestore("backup", save_freq=5, asynchronous=False)
    model.fit(*data, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[Pace(), backup])
"""


def monitor(started: Launch, *arguments: str) -> list[str]:
    """What `tfdist monitor` prints in the folder of a run."""
    command = [sys.executable, "-m", "tfdist", "monitor", *arguments]
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "120"}
    done = subprocess.run(command, cwd=started.folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    return [line.strip() for line in done.stdout.splitlines() if line.strip(" ─")]


def log_of(folder: Path) -> Path:
    (path,) = folder.glob("tfdist-logs/*/events.jsonl")
    return path


def wait_for_start(folder: Path) -> None:
    """Waits until the launcher has noted that the processes have started."""
    logs = functools.partial(folder.glob, "tfdist-logs/*/events.jsonl")
    wait_until(lambda: any('"start"' in log.read_text() for log in logs()), DEADLINE, "the start in the event log")


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.nightly
def test_a_training_whose_worker_is_killed(launch) -> None:
    started = launch(TRAIN)

    def at_step_12() -> bool:
        lines = [json.loads(line) for line in log_of(started.folder).read_text().splitlines()]
        return {one["name"] for one in lines if one["event"] == "progress"} == {"worker 0", "worker 1"} and any(
            one["event"] == "saved" and one["step"] == 10 for one in lines
        )

    wait_for_start(started.folder)
    wait_until(at_step_12, 200, "step 12")
    during = monitor(started, "--once")
    name = log_of(started.folder).parent.name
    assert re.fullmatch(rf"tfdist-logs/{name}: running for \d+ (s|min)", during[0])
    assert re.match(r"epoch [12]/3, step \d+/10, loss ", during[1])
    assert re.fullmatch(r"2 processes, restarts: 0, last backup \d+ (s|min) ago, after step 10", during[2])
    assert during[-3].split() == "process host pid epoch step steps/s waits for data loss state".split()  # noqa: SIM905
    rows = [line.split() for line in during[-2:]]
    processes = of_kind(started.folder, "start")[0]["processes"]
    assert [" ".join(row[:2]) for row in rows] == ["worker 0", "worker 1"]
    assert [int(row[3]) for row in rows] == [processes["worker 0"], processes["worker 1"]]
    assert all(row[4] in ("1/3", "2/3") and row[5].endswith("/10") and row[-1] == "running" for row in rows)

    (started.folder / "go").touch()
    assert started.finish(240).code == 0
    after = monitor(started)
    assert re.fullmatch(rf"tfdist-logs/{name}: complete after \d+ (s|min)", after[0])
    assert after[1].startswith("epoch 3/3, step 10/10, loss ") and "left" not in after[1]
    assert re.fullmatch(r"2 processes, restarts: 1, last backup after step 30", after[2])
    assert all(line.endswith("ended, exit code 0") for line in after[-2:])
    told = "\n".join(after[3:-3])
    assert "worker 1 was killed by SIGKILL at step 20\n" in told
    assert re.search(r"^\d\d:\d\d:\d\d  training again after \d+\.\d s, [0-5] steps redone$", told, re.MULTILINE)
    assert after[-4].endswith("  complete")


WAIT = """
    writer.begin()
    writer.report("training", 1)
    while not (Path("go").exists() and Path("go").read_text()): time.sleep(0.02)
    if index == 1: sys.exit(int(Path("go").read_text()))
"""


def test_a_run_without_keras_has_states_only(launch) -> None:
    started = launch(program(WAIT), "--max-restarts", "0")
    wait_for_start(started.folder)
    during = monitor(started)
    assert during[1] == "2 processes, restarts: 0, no backup"
    assert [line.split()[-1] for line in during[-2:]] == ["starting", "starting"]
    (started.folder / "go").write_text("3")
    assert started.finish().code == 3
    after = monitor(started, f"tfdist-logs/{log_of(started.folder).parent.name}")
    assert re.search(r": failed after \d+ s: exit code 3$", after[0])
    assert [line.split("   ")[-1].strip() for line in after[-2:]] == ["ended", "ended, exit code 3"]


def test_a_launcher_that_is_killed_is_missed(launch) -> None:
    started = launch(program(WAIT))
    wait_for_start(started.folder)
    assert ": running for " in monitor(started)[0]
    os.kill(started.popen.pid, signal.SIGKILL)
    started.popen.wait(DEADLINE)
    assert monitor(started)[0].endswith(": lost: its launcher is gone, and has not said how the run ended")


class OnTerminal:
    """`tfdist monitor` on a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self._end, own = pty.openpty()
        env = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "110", "LINES": "40", "TERM": "xterm"}
        command = [sys.executable, "-m", "tfdist", "monitor"]
        streams = {"stdin": own, "stdout": own, "stderr": own}
        # Shells let what they start in the background ignore it, which would be inherited.
        heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        self.popen = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, preexec_fn=heeds, **streams)
        os.close(own)
        os.set_blocking(self._end, False)
        self.text = ""

    def shows(self, text: str) -> bool:
        try:
            self.text += os.read(self._end, 1 << 16).decode(errors="replace")
        except OSError:
            time.sleep(0.02)
        return text in self.text

    def ended(self) -> bool:
        # It cannot end while nobody reads what it writes.
        self.shows("")
        return self.popen.poll() is not None

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(DEADLINE)
        os.close(self._end)


def test_on_a_terminal(launch) -> None:
    started = launch(program(WAIT))
    wait_for_start(started.folder)
    left, stayed = OnTerminal(started.folder), OnTerminal(started.folder)
    try:
        wait_until(lambda: all([view.shows("worker 1") for view in (left, stayed)]), DEADLINE, "the table")
        left.popen.send_signal(signal.SIGINT)
        wait_until(left.ended, DEADLINE, "the end of the view")
        assert left.popen.returncode == 0
        assert "Traceback" not in left.text
        # The run has not noticed, and the other one goes on until it is over.
        assert started.popen.poll() is None and stayed.popen.poll() is None
        (started.folder / "go").write_text("0")
        assert started.finish().code == 0
        wait_until(
            lambda: stayed.shows("exit code 0") and "complete after" in stayed.text, DEADLINE, "the end of the run"
        )
        wait_until(stayed.ended, DEADLINE, "the end of the view")
        assert stayed.popen.returncode == 0
    finally:
        left.close()
        stayed.close()


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.nightly
def test_the_program_of_the_guide(launch) -> None:
    guide = (SOURCE / "docs" / "monitoring.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    # It stands at the left margin, as the preamble of these tests does.
    started = launch(text)
    result = started.finish(240)
    assert result.code == 0, result.err
    files = sorted(path.relative_to(started.folder).parts[:2] for path in started.folder.glob("logs/*/*tfevents*"))
    assert files == [("logs", "train"), ("logs", "validation")]
    lines = monitor(started, "--once")
    assert lines[1].startswith("epoch 3/3, step 9/9, loss ")
