"""`tfdist.callbacks.TensorBoard` on two processes: one set of files, with what all processes have done."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfdist
from tests.cluster.attempt import found_on
from tests.cluster.file_checks import DEADLINE, built, on_two_processes
from tests.features.table import rows

pytestmark = pytest.mark.cluster

ROWS, BATCH, EPOCHS = 92, 16, 3
STEPS = 6  # the last one has 12 rows


def scalars(folder: Path) -> dict[str, dict[int, list[float]]]:
    """What the event files below a folder say: values by tag and step. TensorBoard's own reader is not needed."""
    import tensorflow as tf
    from tensorflow.core.util.event_pb2 import Event

    found: dict[str, dict[int, list[float]]] = {}
    for path in sorted(folder.rglob("*tfevents*")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = Event.FromString(record)
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    name = f"{path.parent.name}/{value.tag}"
                    found.setdefault(name, {}).setdefault(event.step, []).append(float(tf.make_ndarray(value.tensor)))
    return found


SPEEDS = [f"train/epoch_{name}" for name in ("data_wait", "examples_per_second", "seconds", "steps_per_second")]
METRICS = [f"{folder}/epoch_{name}" for folder in ("train", "validation") for name in ("loss", "mae")]
EVALUATION = [f"validation/evaluation_{name}_vs_iterations" for name in ("loss", "mae")]


def fit(strategy: Any, folder: Path, data: Any = None, everywhere: bool = True, **options: Any) -> dict[str, Any]:
    """A fit with the callback; what it returned, what was written, and the loss that a process saw in each step."""
    seen: list[float] = []
    own = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))
    steps_per_execution = options.pop("steps_per_execution", 1)
    model = built(strategy)
    with strategy.scope():
        model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    boards = [tfdist.callbacks.TensorBoard(folder, **options)] if everywhere or strategy.is_chief else []
    data = {"x": rows(ROWS)[0], "y": rows(ROWS)[1], "batch_size": BATCH} if data is None else {"x": data}
    history = model.fit(
        **data,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        validation_data=rows(40, seed=2),
        validation_batch_size=BATCH,
        callbacks=[*boards, own],
    )
    return {"history": history.history, "seen": seen, "files": sorted(map(str, folder.rglob("*tfevents*")))}


class Written:
    """What is below a folder once all processes have written; the chief's files, and no others.

    Attributes:
        values: the values of each step, by tag.
        steps: the steps, by tag.
        profiles: the paths of profiles.
    """

    def __init__(self, strategy: Any, folder: Path) -> None:
        strategy._peers.gather("written", True, "write its files")
        found = scalars(folder)
        self.values = {tag: [value for (value,) in of_steps.values()] for tag, of_steps in found.items()}
        self.steps = {tag: list(of_steps) for tag, of_steps in found.items()}
        self.profiles = sorted(folder.rglob("*.xplane.pb"))
        files = [*folder.rglob("*tfevents*")]
        assert sorted(path.parent.name for path in files) == [*("train", "validation")][: len(files)]
        written_by = {path.name.split(".")[-3] == str(os.getpid()) for path in files}
        assert written_by == {strategy.is_chief}
        strategy._peers.acknowledge("read", "read the files")

    def assert_metrics(self, history: dict[str, list[float]]) -> None:
        for metric in ("loss", "mae"):
            assert self.values[f"train/epoch_{metric}"] == pytest.approx(history[metric], rel=1e-6)
            assert self.values[f"validation/epoch_{metric}"] == pytest.approx(history[f"val_{metric}"], rel=1e-6)
        assert self.steps["train/epoch_loss"] == [0, 1, 2]

    def assert_counts(self, count: int, of_first: int) -> None:
        """Speeds are counts of rows and steps over seconds; the first execution, which traces, is not counted."""
        seconds = self.values["train/epoch_seconds"]
        assert len(seconds) == EPOCHS and all(0 < each < DEADLINE for each in seconds)
        counted = np.multiply(self.values["train/epoch_examples_per_second"], seconds)
        assert counted == pytest.approx([count - of_first * BATCH, count, count], rel=1e-5)
        counted = np.multiply(self.values["train/epoch_steps_per_second"], seconds)
        assert counted == pytest.approx([STEPS - of_first, STEPS, STEPS], rel=1e-5)


def every_epoch(strategy: Any, folder: Path, _: Any) -> list[float]:
    """With a profile of the chief alone."""
    history = fit(strategy, folder, profile_batch=(2, 4))["history"]
    written = Written(strategy, folder)
    assert sorted(written.values) == sorted([*METRICS, *EVALUATION, *SPEEDS, "train/epoch_learning_rate"])
    written.assert_metrics(history)
    written.assert_counts(ROWS, 1)
    waits = written.values["train/epoch_data_wait"]
    assert len(waits) == EPOCHS and all(0 < wait < 1 for wait in waits)
    (profile,) = written.profiles
    assert profile.is_relative_to(folder / "train/plugins/profile")
    return history["loss"]


def every_fourth_step(strategy: Any, folder: Path, _: Any) -> list[float]:
    """Steps of training, whatever an execution is."""
    history = fit(strategy, folder, update_freq=4, steps_per_execution=3)["history"]
    written = Written(strategy, folder)
    written.assert_metrics(history)
    written.assert_counts(ROWS, 3)
    # Executions end at 3, 6, 9, ...; of these steps 4, 8, 12, 16 are in those that end at 6, 9, 12, 18.
    for name in ("loss", "examples_per_second"):
        assert written.steps[f"train/batch_{name}"] == [6, 9, 12, 18]
    return history["loss"]


def every_batch(strategy: Any, folder: Path, _: Any) -> list[float]:
    """Metrics are those of all processes."""
    found = fit(strategy, folder, update_freq="batch")
    written = Written(strategy, folder)
    written.assert_metrics(found["history"])
    losses = written.values["train/batch_loss"]
    assert written.steps["train/batch_loss"] == list(range(1, EPOCHS * STEPS + 1))
    assert losses[STEPS - 1 :: STEPS] == pytest.approx(found["history"]["loss"], rel=1e-6)
    # What each process sees is another thing: the mean over its own rows, here as many as the other's.
    seen = list(strategy._peers.gather("seen", found["seen"], "tell"))
    assert np.mean(seen, axis=0) == pytest.approx(losses, rel=1e-5)
    assert max(abs(a - b) for a, b in zip(seen[0], losses, strict=True)) > 1e-3
    return found["history"]["loss"]


def on_the_chief_alone(strategy: Any, folder: Path, _: Any) -> list[float]:
    """It waits for nobody, nor does its profile."""
    history = fit(strategy, folder, update_freq=2, everywhere=False, profile_batch=2)["history"]
    written = Written(strategy, folder)
    written.assert_metrics(history)
    assert "train/batch_loss" not in written.values
    tags = {"train/epoch_data_wait", "train/epoch_examples_per_second", "train/batch_steps_per_second"}
    assert tags <= set(written.values)
    assert len(written.profiles) == 1
    return history["loss"]


def rows_of_each_process(strategy: Any, folder: Path, _: Any) -> None:
    """Each process has 48 of 96 rows, in batches of the global size."""
    import tensorflow as tf

    worker = strategy._peers.rank
    x, y = rows(ROWS + 4)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = tf.data.Dataset.from_tensor_slices((x[worker::2], y[worker::2])).batch(BATCH).with_options(options)
    history = fit(strategy, folder, dataset)["history"]
    written = Written(strategy, folder)
    written.assert_metrics(history)
    written.assert_counts(ROWS + 4, 1)


SAME = {f.__name__: f for f in (every_epoch, every_fourth_step, every_batch, on_the_chief_alone)}
SECTIONS = {**SAME, rows_of_each_process.__name__: rows_of_each_process}


@functools.cache
def results() -> list[dict]:
    return on_two_processes(*SECTIONS.values())


@pytest.mark.nightly
@pytest.mark.timeout(DEADLINE + 30)
@pytest.mark.parametrize("name", SECTIONS)
def test_section(name):
    losses = [found_on(results(), rank, name) for rank in (0, 1)]
    assert losses[0] == losses[1]
    if name in SAME:
        assert losses[0] == pytest.approx(found_on(results(), 0, "every_epoch"), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"update_freq": 0}, "Received: update_freq=0. Expected: 'epoch', 'batch', or a number of training steps."),
        ({"update_freq": "step"}, "Received: update_freq='step'."),
    ],
)
def test_mistakes(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        tfdist.callbacks.TensorBoard("logs", **options)
    assert str(caught.value).startswith(text)


def test_what_needs_the_package_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"Received: histogram_freq=1\. .*pip install tensorboard"):
        tfdist.callbacks.TensorBoard(tmp_path, histogram_freq=1)
    tfdist.callbacks.TensorBoard(tmp_path)
    assert os.listdir(tmp_path) == []
