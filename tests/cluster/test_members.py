"""`LocalStepsStrategy(min_workers=...)`: real workers that are killed, stopped and started again while others train."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.attempt import error_of
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
_DEADLINE = 200.0


def mistakes(done: str) -> list[tuple[str, str]]:
    """Runs on every process; rank 0 stays until the other one is done."""
    import keras
    import tensorflow as tf

    import tfdist

    x = np.ones((8, 2), "float32")
    make = functools.partial(tfdist.LocalStepsStrategy, 2, start_timeout=60)
    strategy = make(min_workers=1)

    def fit(data: tuple, **compiled: int) -> None:
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", **compiled)
        model.fit(*data, verbose=0)

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    sharded = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    own = strategy.distribute_datasets_from_function(lambda _: sharded)
    found = [
        error_of(make, min_workers=0),
        error_of(make, min_workers=3),
        error_of(make, min_workers=1, fragments=2),
        error_of(make, min_workers=1, patience=0),
        error_of(model.train_on_batch, x, x[:, :1]),
        error_of(fit, (x, x[:, :1]), steps_per_execution=2),
        error_of(fit, (sharded.with_options(options),)),
        error_of(fit, (own,)),
    ]
    wait_for_the_other(strategy.workers[1], done)
    return found


def wait_for_the_other(rank: int, done: str) -> None:
    """Rank 0 keeps what the other one asks."""
    if rank:
        Path(done).touch()
    end = time.monotonic() + 100
    while not Path(done).exists() and time.monotonic() < end:
        time.sleep(0.1)


def test_what_is_refused(tmp_path: Path) -> None:
    for found in run_local(mistakes, 2, args=(str(tmp_path / "done"),), timeout=240):
        assert [kind for kind, _ in found] == ["ValueError"] * 8
        texts = [text for _, text in found]
        expected = ["min_workers=0", "min_workers=3, 2 workers", "fragments=2", "patience=0", "train_on_batch"]
        expected += ["steps_per_execution=2", "AutoShardPolicy.OFF", "distribute_datasets_from_function"]
        for text, part in zip(texts, expected, strict=True):
            assert part in text
            assert "Expected: " in text


def other_arguments(done: str) -> tuple[str, str]:
    """Runs on every process; rank 0 stays until the other one has heard of its arguments."""
    import tfdist

    rank = tfdist.discover().rank
    found = error_of(lambda: tfdist.LocalStepsStrategy(4 + rank, min_workers=1, start_timeout=60)._sync_every)
    wait_for_the_other(rank, done)
    return found


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    first, second = run_local(other_arguments, 2, args=(str(tmp_path / "done"),), timeout=240)
    assert first == ("no error", "4")
    assert second[0] == "ValueError"
    assert "sync_every: 5" in second[1]


class Run:
    """A `tfdist run` of three workers."""

    def __init__(self, folder: Path, fault: str) -> None:
        self.folder, self._log = folder, folder / "run.log"
        options = [
            "-n",
            "3",
            "--replace-workers",
            "--hang-timeout",
            "200",
            "--output",
            "all",
            "--log-dir",
            str(folder / "logs"),
        ]
        program = ["-m", "tests.cluster.coming_program", str(folder), fault]
        with self._log.open("wb") as log:
            words = [sys.executable, "-m", "tfdist", "run", *options, *program]
            self.process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        if any(error):
            print(self.said)

    @property
    def said(self) -> str:
        """All output so far."""
        return self._log.read_text(errors="replace")

    def until(self, condition: Callable[[], object]) -> None:
        """Waits for an event."""
        end = time.monotonic() + _DEADLINE
        while not condition():
            assert time.monotonic() < end, self.said
            assert self.process.poll() in (None, 0), self.said
            time.sleep(0.1)

    def found(self) -> list[dict]:
        """What the workers have written, after the end."""
        self.until(lambda: self.process.poll() is not None)
        return [json.loads((self.folder / f"found-{rank}.json").read_text()) for rank in range(3)]


def check(run: Run, processes: list[int], epochs: int | None = None) -> None:
    """All have the same model and history, and each rank had so many processes that have trained."""
    first, *others = run.found()
    for one in others:
        for mine, theirs in zip(first["weights"], one["weights"], strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert one["history"] == first["history"]
        assert one["rate"] == first["rate"]
    if epochs is None:
        assert first["rate"] < 0.01, "ReduceLROnPlateau has seen nothing"
    else:
        assert len(first["history"]["val_mae"]) == epochs
    assert np.isfinite(first["loss"])
    assert first["loss"] < 0.5 * first["history"]["loss"][0]
    trained = [sum(name.name.startswith(f"trains-{rank}-") for name in run.folder.iterdir()) for rank in range(3)]
    assert trained == processes


def test_a_worker_that_is_killed_comes_again_while_the_others_train(tmp_path: Path) -> None:
    with Run(tmp_path, "kill") as run:
        check(run, [1, 1, 2])
        assert "worker 2" in run.said
        assert "is gone: the others (2 of 3) go on without it" in run.said
        assert "takes part from here on" in run.said


@pytest.mark.nightly
def test_a_worker_that_stands_still_is_left_out_and_taken_in_again(tmp_path: Path) -> None:
    with Run(tmp_path, "stop") as run:
        run.until(lambda: "has not come for" in run.said)
        (tmp_path / "left-out").touch()
        (pid,) = (int(path.name.rpartition("-")[2]) for path in tmp_path.glob("trains-2-*"))
        os.kill(pid, signal.SIGCONT)
        check(run, [1, 1, 1])
        assert "goes on from it" in run.said


@pytest.mark.nightly
def test_all_go_on_from_the_backup_of_rank_0(tmp_path: Path) -> None:
    """In the middle of an epoch and of a period; the others take its state, and hear the epochs before."""
    with Run(tmp_path, "chief") as run:
        check(run, [2, 2, 2], epochs=8)
        assert "restart 1 of 3" in run.said


@pytest.mark.nightly
def test_all_stop_where_one_does(tmp_path: Path) -> None:
    """One that stops in the middle of a period."""
    with Run(tmp_path, "alone") as run:
        check(run, [1, 1, 1], epochs=2)
