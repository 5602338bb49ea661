"""A measured step: every instruction once, in the order of its schedule, and nothing that stays behind."""

from __future__ import annotations

import inspect
import json
import logging
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tfdist.strategies.pipeline.clock import Reading, clock_offsets, offset_of
from tfdist.strategies.pipeline.schedule import Schedule, make_schedule
from tfdist.strategies.pipeline.timeline import Interval

pytest.importorskip("matplotlib")
MICROBATCHES = 4
STEPS = 6
SECONDS = 0.05


class NoteTimed(keras.callbacks.Callback):
    """Whether the function that has run a step takes the time anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.timed: list[bool] = []

    def on_train_batch_end(self, batch, logs=None):
        traced = inspect.getclosurevars(self.model.train_function).nonlocals["multi_step_on_iterator"]
        (concrete,) = traced._list_all_concrete_functions()
        graph = concrete.graph.as_graph_def()
        bodies = [graph.node, *(function.node_def for function in graph.library.function)]
        self.timed.append(any(node.op == "Timestamp" for body in bodies for node in body))


class Sleep(layers.Layer):
    """Takes its time in the forward pass, without a core."""

    def call(self, inputs):
        @tf.custom_gradient
        def sleep(x):
            def wait(value):
                time.sleep(SECONDS)
                return value

            return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype, stateful=False), x.shape), lambda dy: dy

        return sleep(inputs)


def fit(strategy, *callbacks, loss="mse", **compiled) -> keras.Model:
    """Trains a small network for some steps."""
    x = np.random.default_rng(0).normal(size=(8 * STEPS, 8)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), *(layers.Dense(16, "relu") for _ in range(3)), layers.Dense(1)])
        model.compile("sgd", loss, **compiled)
    model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


@pytest.fixture
def strategy(four_devices) -> tfdist.PipelineStrategy:
    return tfdist.PipelineStrategy(four_devices[:2], num_microbatches=MICROBATCHES)


def assert_follows(intervals: list[Interval], schedule: Schedule) -> None:
    """Each stage does one instruction after the other, in the schedule's order, and what it takes is there."""
    ends = {interval.instruction: interval.end for interval in intervals}
    for device, order in enumerate(schedule.orders):
        own = sorted((i for i in intervals if i.device == device), key=lambda interval: interval.begin)
        assert [interval.instruction for interval in own] == list(order)
        times = [time for interval in own for time in (interval.begin, interval.end)]
        assert times == sorted(times)
    assert len(intervals) == sum(map(len, schedule.orders))
    for interval in intervals:
        assert all(ends[required] <= interval.begin for required in schedule.requirements(interval.instruction))


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks", "compiled"),
    [
        pytest.param("1f1b", 3, 1, {"steps_per_execution": 2}, marks=pytest.mark.exhaustive),
        pytest.param("gpipe", 2, 1, {}, marks=pytest.mark.exhaustive),
        ("interleaved", 2, 2, {}),
    ],
)
def test_every_instruction_once_and_in_order(four_devices, tmp_path, schedule, stages, chunks, compiled):
    strategy = tfdist.PipelineStrategy(four_devices[:stages], num_microbatches=MICROBATCHES, schedule=schedule)
    timeline = tfdist.callbacks.PipelineTimeline(tmp_path / "new" / "step.png")
    fit(strategy, timeline, **compiled)
    expected = make_schedule(schedule, stages, MICROBATCHES, chunks)
    assert_follows(timeline.measured, expected)
    assert_follows(timeline.predicted, expected)
    assert min(interval.begin for interval in timeline.measured) == 0.0
    assert (tmp_path / "new" / "step.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    events = json.loads((tmp_path / "new" / "step.json").read_text())["traceEvents"]
    for process, intervals in ((1, timeline.measured), (2, timeline.predicted)):
        boxes = [event for event in events if event["ph"] == "X" and event["pid"] == process]
        assert [(e["tid"], e["cat"], e["args"]["chunk"], e["args"]["microbatch"]) for e in boxes] == [
            (device, *instruction) for device, instruction, _, _ in intervals
        ]
        assert [(e["ts"], e["dur"]) for e in boxes] == [
            pytest.approx((1e6 * begin, 1e6 * (end - begin))) for _, _, begin, end in intervals
        ]


@pytest.mark.parametrize(
    ("step", "steps_per_execution", "timed"),
    [
        pytest.param(1, 1, [True, False, False, False, False, False], marks=pytest.mark.exhaustive),
        (3, 1, [False, True, True, False, False, False]),
        pytest.param(6, 1, [False, False, False, False, True, True], marks=pytest.mark.exhaustive),
        pytest.param(3, 2, [True, True, False], marks=pytest.mark.exhaustive),
        pytest.param(6, 3, [True, True], marks=pytest.mark.exhaustive),
    ],
)
def test_only_the_step_and_the_one_before_are_timed(strategy, tmp_path, step, steps_per_execution, timed):
    timeline = tfdist.callbacks.PipelineTimeline(tmp_path / "step.svg", step, trace=False)
    noted = NoteTimed()
    # Callbacks are called in their order: what is noted is the function that has just run.
    model = fit(strategy, noted, timeline, steps_per_execution=steps_per_execution)
    assert noted.timed == timed
    assert len(timeline.measured) == 2 * 2 * MICROBATCHES
    assert [path.name for path in tmp_path.iterdir()] == ["step.svg"]
    assert strategy._clock is None
    after = NoteTimed()
    model.fit(np.ones((8, 8)), np.ones((8, 1)), batch_size=8, verbose=0, callbacks=[after])
    assert after.timed == [False]


def test_stages_work_side_by_side_while_they_are_timed(four_devices, tmp_path):
    strategy = tfdist.PipelineStrategy(four_devices[:2], num_microbatches=8, schedule="gpipe", cuts=["first"])
    with strategy.scope():
        stages = [Sleep(), layers.Dense(4, name="first"), Sleep(), layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *stages])
        model.compile("sgd", "mse")
    timeline = tfdist.callbacks.PipelineTimeline(tmp_path / "step.png", step=2)
    model.fit(np.ones((16, 4)), np.ones((16, 1)), batch_size=8, verbose=0, callbacks=[timeline])
    forwards = [interval for interval in timeline.measured if interval.instruction.kind == "forward"]
    assert min(interval.end - interval.begin for interval in forwards) > 0.9 * SECONDS
    # Seven of the eight forwards of a stage can be beside one of the other; on a busy machine some of them are not.
    both = [(a, b) for a in forwards for b in forwards if a.device < b.device]
    overlap = sum(max(0.0, min(a.end, b.end) - max(a.begin, b.begin)) for a, b in both)
    assert overlap > 2 * SECONDS


def test_training_is_the_same(strategy, tmp_path):
    def weights(*callbacks):
        keras.utils.set_random_seed(1)
        return fit(strategy, *callbacks).get_weights()

    timeline = tfdist.callbacks.PipelineTimeline(tmp_path / "step.png")
    for plain, timed in zip(weights(), weights(timeline), strict=True):
        np.testing.assert_array_equal(plain, timed)
    assert len(timeline.measured) == 4 * MICROBATCHES


@pytest.mark.exhaustive
def test_a_second_fit_measures_anew_also_after_one_that_failed(strategy, tmp_path):
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("on purpose")

    timeline = tfdist.callbacks.PipelineTimeline(tmp_path / "step.png", step=2)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(strategy, timeline, Fail())
    assert timeline.measured == []
    noted = NoteTimed()
    fit(strategy, noted, timeline)
    first = timeline.measured
    assert noted.timed == [True, True, False, False, False, False]
    fit(strategy, timeline)
    assert len(timeline.measured) == len(first)
    assert timeline.measured != first


@pytest.mark.parametrize(
    ("compiled", "reason"),
    [
        ({"loss": keras.losses.MeanSquaredError(reduction="sum")}, "but the loss 'mean_squared_error' has reduction"),
        ({"run_eagerly": True}, "the model is compiled with run_eagerly=True"),
    ],
)
def test_steps_without_stages_in_turn_are_reported(strategy, tmp_path, caplog, compiled, reason):
    with caplog.at_level(logging.WARNING, "tfdist"):
        fit(strategy, tfdist.callbacks.PipelineTimeline(tmp_path / "step.png"), **compiled)
    (message,) = (record.getMessage() for record in caplog.records if "PipelineTimeline" in record.getMessage())
    assert message.startswith("PipelineTimeline draws nothing: ")
    assert reason in message
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_never_comes_is_reported(strategy, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "tfdist"):
        fit(strategy, tfdist.callbacks.PipelineTimeline(tmp_path / "step.png", step=7))
    assert "the fit had 6 steps, and step=7 was to be measured" in caplog.text
    assert strategy._clock is None


@pytest.mark.parametrize(
    ("other", "name"), [(tf.distribute.get_strategy, "no strategy"), (tfdist.MirroredStrategy, "MirroredStrategy")]
)
def test_other_strategies_are_refused(four_devices, tmp_path, other, name):
    timeline = tfdist.callbacks.PipelineTimeline(tmp_path / "step.png")
    with pytest.raises(
        ValueError, match=rf"^Received: PipelineTimeline in a fit under {name}\. Expected: a model that"
    ):
        fit(other(), timeline)


@pytest.mark.parametrize("step", [0, -1, 1.5, True, "3"])
def test_a_step_is_a_whole_number(step):
    with pytest.raises(ValueError, match=r"^Received: step=.*Expected: a whole number of at least 1"):
        tfdist.callbacks.PipelineTimeline("step.png", step=step)


@pytest.mark.parametrize("path", ["step", "step.json", "step.bmp", Path("step.txt")])
def test_a_picture_has_a_known_format(path):
    with pytest.raises(ValueError, match=rf"^Received: PipelineTimeline\('{path}'\).*\.pdf.*\.png.*\.svg"):
        tfdist.callbacks.PipelineTimeline(path)


def test_without_matplotlib_the_error_comes_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(ImportError, match=r"PipelineTimeline draws with matplotlib.*: pip install 'matplotlib>=3.7'$"):
        tfdist.callbacks.PipelineTimeline("step.png")


class TestClocks:
    def test_the_quickest_answer_counts(self):
        slow, quick = Reading(100.0, 207.0, 108.0), Reading(200.0, 303.001, 200.002)
        assert offset_of([slow, quick]) == pytest.approx(103.0)
        assert offset_of([slow]) == pytest.approx(103.0)

    @pytest.mark.parametrize("there", [10.0, 10.01, 10.19, 10.2])
    def test_an_answer_between_question_and_arrival_is_no_offset(self, there):
        assert offset_of([Reading(10.0, there, 10.2)]) == 0.0

    def test_a_clock_that_is_behind(self):
        assert offset_of([Reading(10.0, 3.1, 10.2)]) == pytest.approx(-7.0)

    def test_devices_of_one_process_have_one_clock(self, four_devices):
        assert clock_offsets(four_devices) == [0.0, 0.0, 0.0, 0.0]

    def test_offsets_are_taken_off(self, strategy, tmp_path, monkeypatch):
        monkeypatch.setattr("tfdist.callbacks.pipeline_timeline.clock_offsets", lambda devices: [0.0, -100.0])
        timeline = tfdist.callbacks.PipelineTimeline(tmp_path / "step.png")
        fit(strategy, timeline)
        begins = [min(i.begin for i in timeline.measured if i.device == device) for device in (0, 1)]
        assert begins[0] == 0.0
        assert 100.0 < begins[1] < 110.0
