"""What the processes of a training write to the event log."""

from __future__ import annotations

import itertools
import json
import socket
import statistics
from typing import Any

import pytest

from tfdist.jobs.status import Progress, last_progress
from tfdist.supervision.events import events_in
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]


def written(path: str) -> dict[str, Any]:
    """Runs in each of two processes, each of which has a log of its own: what fits write."""
    import os
    import pathlib
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist
    from tfdist.runtime.progress import ProgressReporter, add_reporter
    from tfdist.supervision.events import VARIABLE, EventLog

    own = f"{path}-{tfdist.discover().rank}"
    with tfdist.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = np.random.default_rng(0).normal(size=(32, 3)), np.ones((32, 1))

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.3)

    os.environ[VARIABLE] = f"{own}-fit"
    history = model.fit(*data, batch_size=8, epochs=3, verbose=0, callbacks=[Slow()])

    # Data take 0.5 s, of which the callback gives them 0.15, a busy machine some more; validation counts for nothing.
    def slow(number):
        time.sleep(0.5)
        return number

    def rows(number):
        return tf.ones((8, 3)), tf.ones((8, 1))

    class AsSlow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.15)

        def on_test_batch_end(self, batch, logs=None):
            time.sleep(0.2)

    os.environ[VARIABLE] = f"{own}-waits"
    time.sleep(1.1)
    dataset = tf.data.Dataset.range(6).map(lambda n: tf.numpy_function(slow, [n], tf.int64)).map(rows)
    model.fit(dataset, epochs=2, verbose=0, validation_data=data, validation_batch_size=8, callbacks=[AsSlow()])

    now = [0.0]

    def reporter(suffix: str, **more: Any) -> ProgressReporter:
        log = ProgressReporter(
            None, EventLog(None, "one", f"{own}-{suffix}"), {"step": 0.0, "end": 0.0}, lambda: now[0], **more
        )
        log.set_params({"epochs": 5, "steps": None})
        log.on_train_begin()
        return log

    log = reporter("resumed")
    log.on_epoch_begin(2)
    # The first step of a process takes long, several are executed at once, and the epoch was begun by another one.
    for batch, now[0] in ((31, 60.0), (33, 62.0), (35, 64.0), (39, 68.0)):
        log.on_train_batch_end(batch, {"loss": 0.5})
    log.on_epoch_end(2, {"loss": 0.25})
    log.on_epoch_begin(3)
    now[0] = 72.0
    log.on_train_batch_end(3, {"loss": 0.125})
    # Of sixteen processes each one but the chief writes a line in four seconds.
    for rank in (0, 5):
        log = reporter(f"rank{rank}", rank=rank, size=16)
        log.on_epoch_begin(0)
        for batch in range(17):
            now[0] += 0.5
            log.on_train_batch_end(batch, {"loss": 0.5})

    # A pipe that a person reads: nobody would put together what several of them print.
    os.environ[VARIABLE] = "-"
    callbacks: list = []
    add_reporter(callbacks, model)
    kinds = ("fit", "waits", "resumed", "rank0", "rank5")
    lines = {kind: pathlib.Path(f"{own}-{kind}").read_text().splitlines() for kind in kinds}
    return {"pid": os.getpid(), "loss": history.history["loss"][-1], "to standard output": len(callbacks), **lines}


def progress_in(lines: list[str]) -> Progress | None:
    return last_progress(events_in("\n".join(lines)))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("progress") / "events.jsonl"
    return run_local(written, 2, args=(str(path),), timeout=180)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_process_says_who_and_where_it_is(results: list[dict[str, Any]], rank: int) -> None:
    events = [json.loads(line) for line in results[rank]["fit"]]
    assert {(event["name"], event["rank"]) for event in events} == {(f"worker {rank}", rank)}
    assert {(event["host"], event["pid"]) for event in events} == {(socket.gethostname(), results[rank]["pid"])}


def test_status_is_told_by_the_chief_alone(results: list[dict[str, Any]]) -> None:
    chief, other = (results[rank]["fit"] for rank in (0, 1))
    assert progress_in([chief[0], *other]) == progress_in([chief[0]]) != progress_in([chief[-1]])
    assert progress_in(other) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_the_lines_of_a_fit(results: list[dict[str, Any]], rank: int) -> None:
    events = [json.loads(line) for line in results[rank]["fit"]]
    # 12 steps of 0.3 s, or more on a busy machine; one line a second, and one for the end.
    assert 3 <= len(events) <= 13
    assert {event["event"] for event in events} == {"progress"}
    places = [(event["epoch"], event["step"]) for event in events]
    assert places == sorted(places) and places[0] == (1, 1) and places[-1] == (3, 4)
    assert {(event["epochs"], event["steps"]) for event in events} == {(3, 4)}
    assert events[0]["seconds_left"] is None and events[-1]["seconds_left"] == 0
    assert events[-1]["loss"] == pytest.approx(results[rank]["loss"], rel=1e-6)
    assert events[0]["steps_per_second"] is None and events[0]["data_wait"] is None
    # A step sleeps 0.3 s. On a busy machine, there is none between the last two lines.
    later = [event for event, place, before in zip(events[1:], places[1:], places, strict=False) if place != before]
    assert all(0 < event["steps_per_second"] <= 1 / 0.3 for event in later)
    assert min(event["data_wait"] for event in later) > 0


@pytest.mark.timing
@pytest.mark.parametrize("rank", [0, 1])
def test_the_pace_of_the_lines_of_a_fit(results: list[dict[str, Any]], rank: int) -> None:
    events = [json.loads(line) for line in results[rank]["fit"]]
    took = events[-1]["time"] - events[0]["time"]
    assert len(events) <= took / 0.95 + 2
    times = [event["time"] for event in events[:-1]]
    assert all(later - earlier > 0.95 for earlier, later in itertools.pairwise(times))
    # At the first line with a speed, seconds for each of the steps that are left of the twelve.
    done = (events[1]["epoch"] - 1) * 4 + events[1]["step"]
    assert 0.3 <= events[1]["seconds_left"] / (12 - done) < 2 * took / 11
    # The data are there.
    waits = [event["data_wait"] for event in events[1:]]
    assert statistics.median(waits) < 0.2, waits


@pytest.mark.timing
@pytest.mark.parametrize("rank", [0, 1])
def test_the_share_of_waiting_for_data(results: list[dict[str, Any]], rank: int) -> None:
    events = [json.loads(line) for line in results[rank]["waits"]]
    waits = [event["data_wait"] for event in events if event["data_wait"] is not None]
    assert len(waits) >= 2
    # Two thirds; but at the beginning of the second epoch its data have been made during the validation.
    assert 0.4 < max(waits) < 0.9, waits


def test_very_many_processes_write_no_more_than_a_few(results: list[dict[str, Any]]) -> None:
    # 17 steps of 0.5 s: a line after the first one, and then in each second; or in each four seconds.
    assert len(results[0]["rank0"]) == 9
    assert len(results[0]["rank5"]) == 3
    assert [result["to standard output"] for result in results] == [1, 0]


def test_a_resumed_fit_counts_from_where_it_is(results: list[dict[str, Any]]) -> None:
    events = [json.loads(line) for line in results[0]["resumed"]]
    assert [(event["epoch"], event["step"], event["steps"], event["seconds_left"]) for event in events] == [
        *[(3, 32, None, None), (3, 34, None, None), (3, 36, None, None), (3, 40, None, None), (4, 4, 40, 36 + 40)],
    ]
    assert [event["loss"] for event in events] == [0.5, 0.5, 0.5, 0.5, 0.125]
