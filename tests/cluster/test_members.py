"""`LocalStepsStrategy(min_workers=...)`: real workers that are killed, stopped and started again while others train."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.attempt import attempt, error_of, found_on, logged
from tests.cluster.counting import EPOCHS, ROWS, SIZE, Seen, counting_model, one_hot_rows, times_seen
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


def other_arguments(done: str) -> list[tuple[str, str]]:
    """Runs on every process; rank 0 stays until the other one has heard of its arguments, and of its data."""
    import keras
    import tensorflow as tf

    import tfdist

    rank = tfdist.discover().rank
    make = functools.partial(tfdist.LocalStepsStrategy, min_workers=1, start_timeout=60)
    found = [error_of(lambda: make(4 + rank)._sync_every)]
    strategy, x = make(4), np.ones((8, 2), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def interrupt(logs: object) -> None:
        raise InterruptedError

    keras.utils.set_random_seed(rank)
    rows = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    for data in (rows.shuffle(8).batch(4), rows.take(8 - rank * 4).batch(4)):
        found.append(error_of(model.fit, data, callbacks=[keras.callbacks.LambdaCallback(on_train_begin=interrupt)]))
    wait_for_the_other(rank, done)
    return found


def test_other_arguments_and_data_are_refused(tmp_path: Path) -> None:
    first, second = run_local(other_arguments, 2, args=(str(tmp_path / "done"),), timeout=240)
    assert [kind for kind, _ in first] == ["no error", "InterruptedError", "InterruptedError"]
    assert [kind for kind, _ in second] == ["ValueError"] * 3
    for (_, text), said in zip(second, ("sync_every: 5", "seeds of its shuffling: ", "batches: 1; on"), strict=True):
        assert said in text


def rows_that_nobody_has_seeded(make: Callable, folder: Path) -> None:
    """Each is used once an epoch, also where nothing has a seed."""
    import tensorflow as tf

    strategy = make(2)
    x, y = one_hot_rows()
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS).batch(SIZE)
    for data, more in (((x, y), {"batch_size": SIZE}), ((shuffled,), {})):
        assert times_seen(strategy, *data, **more) == pytest.approx([EPOCHS] * ROWS)
    lost = shuffled.map(lambda *row: row, num_parallel_calls=2, deterministic=False)
    for data, expected in ((shuffled, 0), (lost, 1)):
        said = logged(functools.partial(times_seen, strategy, data))
        assert sum("data without an order" in text for text in said) == expected, said


def logs_of_all_kinds(make: Callable, folder: Path) -> None:
    """Those of a step, metrics with several values, and what callbacks add; exchanged after each step."""
    import keras
    import tensorflow as tf

    class Logs(keras.Sequential):
        def train_step(self, data: tuple) -> dict:
            return {**super().train_step(data), "largest": tf.reduce_max(data[0])}

    class Adds(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict) -> None:
            logs |= {"words": "good", "table": [[1, 2], [3]]}

    x = np.random.default_rng(2).normal(size=(32, 3)).astype("float32")
    y = (x[:, :2] > 0).astype("float32")

    def history(strategy: Any) -> dict:
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = Logs([keras.Input((3,)), keras.layers.Dense(2, "sigmoid")])
            metrics = [keras.metrics.F1Score(threshold=0.5), "mae"]
            model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=metrics)
        arguments = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (x, y)}
        return model.fit(x, y, callbacks=[Adds()], **arguments).history

    found, expected = history(make(1)), history(tf.distribute.get_strategy())
    assert found.keys() == expected.keys()
    assert found.pop("words") == expected.pop("words")
    assert found.pop("table") == expected.pop("table")
    expected["largest"] = [np.mean([x[24:28].max(), x[28:].max()])] * 2  # of the last step of each
    for name, values in expected.items():
        np.testing.assert_allclose(np.array(found[name]), np.array(values), atol=1e-5, err_msg=name)


def one_that_stops(make: Callable, folder: Path) -> None:
    """In the middle of a period, and at its end: the others do not wait for it in vain."""
    import keras

    class Stops(keras.callbacks.Callback):
        def __init__(self, batch: int) -> None:
            super().__init__()
            self._batch = batch

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            self.model.stop_training |= strategy.workers[1] == 1 and batch == self._batch

    strategy, x = make(4), np.ones((80, 2), "float32")
    for batch in (5, 3):
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        fit = functools.partial(model.fit, x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=[Stops(batch)])
        assert [text for text in logged(fit) if "has not come" in text or "left" in text] == []
        assert model.history.epoch == [0]


def loggers_that_evaluate(make: Callable, folder: Path) -> None:
    """They do so on all workers, and write on rank 0."""
    import keras

    strategy, x = make(2), np.ones((16, 2), "float32")

    class Table(keras.callbacks.CSVLogger):
        def on_train_begin(self, logs: dict | None = None) -> None:
            self.before = self.model.evaluate(x, x[:, :1], verbose=0)
            super().on_train_begin(logs)

        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            logs["again"] = self.model.evaluate(x, x[:, :1], verbose=0)
            super().on_epoch_end(epoch, logs)

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    file = folder / f"log-{strategy.workers[1]}.csv"
    table = Table(file)
    data = {"x": x, "y": x[:, :1], "validation_data": (x, x[:, :1])}
    fit = functools.partial(model.fit, **data, batch_size=8, epochs=2, verbose=0, callbacks=[table])
    assert [text for text in logged(fit) if "has not come" in text] == []
    assert file.exists() == strategy.is_chief and table.filename == str(file)
    history = model.history.history
    assert table.before > history["again"][0] > history["again"][1]
    assert history["val_loss"] == pytest.approx(history["again"])


STRANGERS = (rows_that_nobody_has_seeded, logs_of_all_kinds, one_that_stops, loggers_that_evaluate)


def strangers(done: str) -> dict[str, Any]:
    """Runs on every process; rank 0 stays until the other one is done."""
    import keras

    import tfdist

    mean = functools.partial(keras.optimizers.SGD, 1.0)
    make = functools.partial(tfdist.LocalStepsStrategy, outer_optimizer=mean, min_workers=1, patience=20)
    found = {one.__name__: attempt(one.__name__, one, make, Path(done).parent) for one in STRANGERS}
    wait_for_the_other(tfdist.discover().rank, done)
    return found


@functools.cache
def of_strangers() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="tfdist-members-") as folder:
        return run_local(strangers, 2, args=(f"{folder}/done",), timeout=240)


@pytest.mark.parametrize("name", [one.__name__ for one in STRANGERS])
def test_what_strangers_do(name: str) -> None:
    for rank in (0, 1):
        found_on(of_strangers(), rank, name)


def counted(folder: str, is_first: bool) -> list[float]:
    """How often each row was used; the first job ends in the second epoch. Runs on every process."""
    import keras

    import tfdist

    mean = functools.partial(keras.optimizers.SGD, 1.0)
    strategy = tfdist.LocalStepsStrategy(2, outer_optimizer=mean, min_workers=1, start_timeout=60)
    model, steps = counting_model(strategy, Seen, ROWS, float(SIZE)), []

    def interrupt(batch: int, logs: object) -> None:
        steps.append(batch)
        if is_first and len(steps) == ROWS // SIZE + 3:
            raise InterruptedError

    backup = tfdist.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=1, asynchronous=False)
    callbacks = [backup, keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)]
    with contextlib.suppress(InterruptedError):
        model.fit(*one_hot_rows(), batch_size=SIZE, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    wait_for_the_other(strategy.workers[1], f"{folder}/done-{is_first}")
    return (-model.get_weights()[0][:, 0]).tolist()


@pytest.mark.nightly
def test_rows_that_nobody_has_seeded_are_used_once_also_after_a_restart(tmp_path: Path) -> None:
    run_local(counted, 2, args=(str(tmp_path), True), timeout=240)
    for found in run_local(counted, 2, args=(str(tmp_path), False), timeout=240):
        assert found == pytest.approx([EPOCHS] * ROWS)


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
