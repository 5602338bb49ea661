"""`tfdist.callbacks.TensorBoard` on two processes: one set of files, with what all processes have done."""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.cluster.attempt import found_on
from tests.cluster.file_checks import DEADLINE, FileChecks, built, on_two_processes
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


def events_of_hosts(folder: Path) -> dict[str, int]:
    """How many events of the host each profile below a folder has, by host."""
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

    found: dict[str, int] = {}
    for path in sorted(folder.rglob("*.xplane.pb")):
        hosts = [plane for plane in XSpace.FromString(path.read_bytes()).planes if plane.name.startswith("/host:")]
        found[path.name.removesuffix(".xplane.pb")] = sum(len(line.events) for host in hosts for line in host.lines)
    return found


def fit(strategy: object, folder: Path, data: Any = None, everywhere: bool = True, **options: Any) -> dict[str, Any]:
    """A fit with the callback; what it returned, what was written, and the loss that a process saw in each step."""
    import tfdist

    seen: list[float] = []

    class Own(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            seen.append(logs["loss"])

    steps_per_execution = options.pop("steps_per_execution", 1)
    model = built(strategy)
    with strategy.scope():
        model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    boards = [tfdist.callbacks.TensorBoard(folder, **options)]
    if not everywhere and not getattr(strategy, "is_chief", True):
        boards = []
    data = {"x": rows(ROWS)[0], "y": rows(ROWS)[1], "batch_size": BATCH} if data is None else {"x": data}
    history = model.fit(
        **data,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        validation_data=rows(40, seed=2),
        validation_batch_size=BATCH,
        callbacks=[*boards, Own()],
    )
    return {"history": history.history, "seen": seen, "files": sorted(map(str, folder.rglob("*tfevents*")))}


def own_shards(strategy: Any) -> Any:
    """A dataset of which each process has other rows, in batches of the global size."""
    import tensorflow as tf

    worker = strategy._peers.rank
    x, y = rows(ROWS + 4)
    dataset = tf.data.Dataset.from_tensor_slices((x[worker::2], y[worker::2])).batch(BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def embedded(strategy: Any, folder: Path) -> None:
    """Sparse gradients: how long they take is not known before they are there."""
    import tfdist

    with strategy.scope():
        words = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(9, 2), keras.layers.Flatten()]
        model = keras.Sequential([*words, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((32, 3), "int32"), np.ones((32, 1)), verbose=0, callbacks=[tfdist.callbacks.TensorBoard(folder)])


def everything(checks: FileChecks) -> None:
    """Runs on every process."""
    strategy, folder = checks.strategy, checks.folder
    checks.note("epochs", fit, strategy, folder / "epochs")
    checks.note("updates", functools.partial(fit, update_freq=4, steps_per_execution=3), strategy, folder / "updates")
    checks.note("batches", functools.partial(fit, update_freq="batch"), strategy, folder / "batches")
    checks.note("chief alone", functools.partial(fit, update_freq=2, everywhere=False), strategy, folder / "chief")
    checks.note("own rows", shards, strategy, folder / "own")
    silent = functools.partial(fit, write_steps_per_second=False)
    checks.note("silent", silent, strategy, folder / "silent")
    checks.note("seldom", functools.partial(fit, communication_freq=2), strategy, folder / "seldom")
    checks.note("profile", functools.partial(fit, profile_batch=(2, 4)), strategy, folder / "profile")
    checks.note("profile of the chief", profile_of_the_chief, strategy, folder / "profile of the chief")
    checks.note("profile asked", profile_asked_for_on_the_chief, strategy, folder / "profile asked for on the chief")
    checks.note("embedded", embedded, strategy, folder / "embedded")
    names = ("epochs", "updates", "batches", "chief", "own", "silent", "seldom", "embedded")
    strategy._peers.gather("written", True, "write its files")
    checks.seen["profiles"] = {
        name: [str(path.relative_to(folder / name)) for path in sorted((folder / name).rglob("*.xplane.pb"))]
        for name in ("profile", "profile of the chief", "profile asked for on the chief")
    }
    checks.seen["events of hosts"] = events_of_hosts(folder / "profile")
    checks.seen["scalars"] = {name: scalars(folder / name) for name in names}
    strategy._peers.acknowledge("read", "read the files")


def profile_of_the_chief(strategy: Any, folder: Path) -> dict[str, Any]:
    return fit(strategy, folder, everywhere=False, profile_batch=2)


def profile_asked_for_on_the_chief(strategy: Any, folder: Path) -> dict[str, Any]:
    return fit(strategy, folder, profile_batch=2 if strategy.is_chief else 0)


def shards(strategy: Any, folder: Path) -> dict[str, Any]:
    return fit(strategy, folder, own_shards(strategy))


@functools.cache
def results() -> list[dict]:
    return on_two_processes(everything)


def check(rank: int, name: str) -> Any:
    return found_on(results(), rank, name)


def values(name: str, tag: str) -> list[float]:
    """The only value of each step."""
    found = results()[0]["scalars"][name].get(tag, {})
    assert all(len(several) == 1 for several in found.values()), found
    return [value for (value,) in found.values()]


def steps(name: str, tag: str) -> list[int]:
    return list(results()[0]["scalars"][name].get(tag, {}))


SPEEDS = [
    f"train/epoch_{name}"
    for name in ("communication", "data_wait", "examples_per_second", "seconds", "steps_per_second")
]
METRICS = [f"{folder}/epoch_{name}" for folder in ("train", "validation") for name in ("loss", "mae")]
EVALUATION = [f"validation/evaluation_{name}_vs_iterations" for name in ("loss", "mae")]


@pytest.mark.exhaustive
@pytest.mark.timeout(DEADLINE + 30)
class TestTensorBoard:
    @pytest.mark.parametrize("name", ["epochs", "updates", "batches", "chief alone", "own rows"])
    def test_the_chief_alone_writes_one_set_of_files(self, name):
        files = check(0, name)["files"]
        assert [Path(path).parent.name for path in files] == ["train", "validation"]
        assert {path.split(".")[-3] for path in files} == {str(results()[0]["pid"])}

    def test_a_profile_of_every_process_in_one_run(self):
        paths = [Path(path) for path in results()[0]["profiles"]["profile"]]
        (run,) = {path.parent for path in paths}
        assert run.parent == Path("train/plugins/profile")
        chief, other = sorted(path.name.removesuffix(".xplane.pb") for path in paths)
        assert other == f"{chief}-worker-1"

    def test_the_chief_alone_records_its_host(self):
        # Of another process TensorFlow's recorder of hosts writes to freed memory.
        chief, other = sorted(results()[0]["events of hosts"].items())
        assert chief[1] > 0
        assert other[1] == 0

    def test_a_profile_of_the_chief_alone(self):
        check(1, "profile of the chief")
        assert len(results()[0]["profiles"]["profile of the chief"]) == 1

    def test_a_profile_that_the_chief_alone_asks_for(self):
        check(1, "profile asked")
        assert len(results()[0]["profiles"]["profile asked for on the chief"]) == 1

    def test_the_tags(self):
        expected = sorted([*METRICS, *EVALUATION, *SPEEDS, "train/epoch_learning_rate"])
        assert sorted(results()[0]["scalars"]["epochs"]) == expected

    @pytest.mark.parametrize("name", ["epochs", "updates", "batches", "chief alone", "own rows", "silent"])
    def test_metrics_of_epochs_are_those_of_the_history(self, name):
        folder = {"chief alone": "chief", "own rows": "own"}.get(name, name)
        for rank in (0, 1):
            history = check(rank, name)["history"]
            for metric in ("loss", "mae"):
                assert values(folder, f"train/epoch_{metric}") == pytest.approx(history[metric], rel=1e-6)
                assert values(folder, f"validation/epoch_{metric}") == pytest.approx(history[f"val_{metric}"], rel=1e-6)
        assert steps(folder, "train/epoch_loss") == [0, 1, 2]

    @pytest.mark.parametrize(
        ("name", "rows_of_epochs", "steps_of_epochs"),
        [
            # The first execution, which traces, is not counted.
            ("epochs", [ROWS - BATCH, ROWS, ROWS], [STEPS - 1, STEPS, STEPS]),
            ("updates", [ROWS - 3 * BATCH, ROWS, ROWS], [STEPS - 3, STEPS, STEPS]),
            # Each has 48 of 96 rows.
            ("own", [ROWS + 4 - BATCH, ROWS + 4, ROWS + 4], [STEPS - 1, STEPS, STEPS]),
        ],
    )
    def test_speeds_are_counts_over_seconds(self, name, rows_of_epochs, steps_of_epochs):
        seconds = values(name, "train/epoch_seconds")
        assert len(seconds) == EPOCHS and all(0 < each < DEADLINE for each in seconds)
        counted = np.multiply(values(name, "train/epoch_examples_per_second"), seconds)
        assert counted == pytest.approx(rows_of_epochs, rel=1e-5)
        counted = np.multiply(values(name, "train/epoch_steps_per_second"), seconds)
        assert counted == pytest.approx(steps_of_epochs, rel=1e-5)

    def test_shares(self):
        waits, communication = (values("epochs", f"train/epoch_{name}") for name in ("data_wait", "communication"))
        assert len(waits) == len(communication) == EPOCHS
        assert all(0 < wait < 1 for wait in waits)
        assert all(share > 0 for share in communication)
        assert steps("seldom", "train/epoch_communication") == [1]

    def test_what_cannot_be_measured_is_not_written(self):
        assert values("embedded", "train/epoch_communication") == []
        assert len(values("embedded", "train/epoch_data_wait")) == 0, "one step, which traces"
        assert len(values("embedded", "train/epoch_loss")) == 1
        assert not set(results()[0]["scalars"]["silent"]) & set(SPEEDS)

    def test_updates_are_at_training_steps_whatever_an_execution_is(self):
        # Executions end at 3, 6, 9, ...; of these steps 4, 8, 12, 16 are in those that end at 6, 9, 12, 18.
        assert steps("updates", "train/batch_loss") == [6, 9, 12, 18]
        assert steps("updates", "train/batch_examples_per_second") == [6, 9, 12, 18]
        assert steps("batches", "train/batch_loss") == list(range(1, EPOCHS * STEPS + 1))

    def test_metrics_within_epochs_are_those_of_all_processes(self):
        history, written = check(0, "batches")["history"]["loss"], values("batches", "train/batch_loss")
        assert written[STEPS - 1 :: STEPS] == pytest.approx(history, rel=1e-6)
        # What each process sees is another thing: the mean over its own rows, here as many as the other's.
        seen = [check(rank, "batches")["seen"] for rank in (0, 1)]
        assert np.mean(seen, axis=0) == pytest.approx(written, rel=1e-5)
        assert max(abs(a - b) for a, b in zip(seen[0], written, strict=True)) > 1e-3

    def test_a_chief_that_has_it_alone_waits_for_nobody(self):
        tags = set(results()[0]["scalars"]["chief"])
        assert "train/batch_loss" not in tags and "train/epoch_communication" not in tags
        assert {"train/epoch_data_wait", "train/epoch_examples_per_second", "train/batch_steps_per_second"} <= tags

    def test_what_is_trained_is_the_same(self):
        losses = [
            check(0, name)["history"]["loss"] for name in ("epochs", "updates", "batches", "chief alone", "silent")
        ]
        for one, other in itertools.pairwise(losses):
            assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"update_freq": 0}, "Received: update_freq=0. Expected: 'epoch', 'batch', or a number of training steps."),
        ({"update_freq": "step"}, "Received: update_freq='step'."),
        ({"communication_freq": -1}, "Received: communication_freq=-1. Expected: a number of epochs, or 0 for never."),
    ],
)
def test_mistakes(options: dict[str, Any], text: str) -> None:
    import tfdist

    with pytest.raises(ValueError) as caught:
        tfdist.callbacks.TensorBoard("logs", **options)
    assert str(caught.value).startswith(text)


def test_what_needs_the_package_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import tfdist

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"Received: histogram_freq=1\. .*pip install tensorboard"):
        tfdist.callbacks.TensorBoard(tmp_path, histogram_freq=1)
    tfdist.callbacks.TensorBoard(tmp_path)
    assert os.listdir(tmp_path) == []
