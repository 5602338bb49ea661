"""`tfdist goodput` of a run of `tfdist run` whose worker is killed, beside what the run itself has seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.launcher.conftest import SOURCE, WarmLaunch
from tests.launcher.training import of_kind

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(500)]

TRAIN = """
    import keras, numpy as np, tfdist

    begun = time.time()

    def note(what, **more):
        with open(f"seen-{index}", "a") as file:
            print(json.dumps({"time": time.time(), "what": what, **more}), file=file)

    class Seen(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.begun = time.time()

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.2)
            step = int(self.model.optimizer.iterations)
            note("step", step=step, seconds=time.time() - self.begun)
            if os.environ["TFDIST_RESTART"] == "0" and index == 1 and step == 18:
                note("killed")
                os.kill(os.getpid(), signal.SIGKILL)

        def on_test_begin(self, logs=None):
            self.validation = time.time()

        def on_test_batch_end(self, batch, logs=None):
            time.sleep(0.05)

        def on_test_end(self, logs=None):
            note("validation", seconds=time.time() - self.validation)

    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = np.random.default_rng(0).normal(size=(40, 4)), np.ones((40, 1))
    backup = tfdist.callbacks.BackupAndRestore("backup", save_freq=7, asynchronous=False)
    model.fit(
        *data, batch_size=4, epochs=3, shuffle=False, verbose=0, validation_data=data, callbacks=[Seen(), backup]
    )
    note("trained")
"""


def goodput(started: WarmLaunch, *arguments: str) -> dict[str, Any]:
    """What the command says of the newest run in the folder, or of the one that is named."""
    command = [sys.executable, "-m", "tfdist", "goodput", *arguments, "--json"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, cwd=started.folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["status"].startswith("complete after") and facts["has_trained"]
    assert sum(facts["seconds"].values()) == pytest.approx(facts["total_seconds"])
    return facts


def run_with_a_kill(warm_launch) -> tuple[WarmLaunch, list[list[dict[str, Any]]]]:
    """A run whose worker 1 is killed, and what its processes have noted."""
    started = warm_launch(TRAIN)
    result = started.finish(400)
    assert result.code == 0, result.err
    return started, [list(map(json.loads, (started.folder / f"seen-{i}").read_text().splitlines())) for i in (0, 1)]


@pytest.mark.nightly
def test_a_killed_worker_costs_the_steps_that_the_run_has_seen(warm_launch) -> None:
    started, seen = run_with_a_kill(warm_launch)
    facts = goodput(started)
    seconds = facts["seconds"]
    assert seconds.pop("stopped") == 0.0 and all(value > 0 for value in seconds.values()), seconds

    # Steps 15 to 18 were done twice. Both processes have done the last of them, or the chief not yet.
    numbers = [note["step"] for note in seen[0] if note["what"] == "step"]
    assert numbers in ([*range(1, 19), *range(15, 31)], [*range(1, 18), *range(15, 31)])
    (failure,) = facts["interruptions"]
    (again,) = of_kind(started.folder, "training-again")
    assert failure["steps_redone"] == again["steps_redone"] == 4
    assert "worker 1 was killed by SIGKILL at step 18" in failure["cause"]


@pytest.mark.timing
def test_a_killed_worker_costs_the_seconds_that_the_run_has_seen(warm_launch) -> None:
    started, seen = run_with_a_kill(warm_launch)
    facts = goodput(started)
    seconds = facts["seconds"]
    (failure,) = facts["interruptions"]
    (again,) = of_kind(started.folder, "training-again")
    assert seconds["data"] < seconds["training"]
    # From the kill to the end of the first step afterwards, in which the callback of this test sleeps, too.
    (killed,) = [note["time"] for note in seen[1] if note["what"] == "killed"]
    first = next(note for note in seen[0] if note.get("step") == 15 and note["time"] > killed)
    assert first["time"] - 1.0 - killed <= failure["restart"] <= first["time"] - killed + 5.0
    assert failure["restart"] == pytest.approx(again["seconds"], abs=5.0)
    # The steps 16 to 18, which were done again after the first one.
    redone = [note for note in seen[0] if note.get("step") in (16, 17, 18) and note["time"] > killed]
    assert 0.3 <= failure["redone"] <= sum(note["seconds"] for note in redone) + 3.0
    # What has slept in the callbacks is in the kinds, and nothing of it twice. The first validation may be behind the
    # last line before the kill, and counts as restart then.
    validations = [note["seconds"] for note in seen[0] if note["what"] == "validation"]
    assert len(validations) == 3 and 1.0 <= seconds["validation"] <= sum(validations) + 3.0
    steps = [note["seconds"] for note in seen[0] if note["what"] == "step"]
    assert (len(steps) - 5) * 0.2 <= seconds["training"] + seconds["redone"] + seconds["data"]
    assert seconds["training"] + seconds["redone"] + seconds["data"] <= facts["total_seconds"] - failure["restart"]
    assert seconds["start"] < first["time"] - facts["begin"]
