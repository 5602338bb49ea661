"""Simulated pipelined steps: how long they take, what is idle, and that they respect devices and data."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tfdist.strategies.pipeline.schedule import (
    Instruction,
    Schedule,
    eager_one_f_one_b,
    forward_only,
    gpipe,
    interleaved,
    make_schedule,
    one_f_one_b,
)
from tfdist.strategies.pipeline.timeline import Interval, idle_share, makespan, simulate, speed_up, write_trace

# Chosen as in `test_pipeline_schedule.py`.
SIZES = [(1, 1), (1, 4), (2, 1), (2, 3), (2, 4), (3, 2), (3, 3), (3, 7), (4, 8), (4, 1), (8, 7), (8, 32)]


def simulate_equal(schedule: Schedule) -> list[Interval]:
    """Forwards of a whole device take 1, backwards 2."""
    share = 1 / schedule.chunks_per_device
    return simulate(schedule, [share] * schedule.chunks, [2 * share] * schedule.chunks)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_makespan_and_idle_share_are_those_of_the_formula(name: str, devices: int, microbatches: int) -> None:
    schedule = make_schedule(name, devices, microbatches)
    intervals = simulate_equal(schedule)
    assert makespan(intervals) == (microbatches + devices - 1) * 3
    assert idle_share(intervals) == pytest.approx(schedule.bubble(), abs=1e-12)
    assert speed_up(intervals) == pytest.approx(devices * microbatches / (microbatches + devices - 1))


@pytest.mark.parametrize("chunks_per_device", [2, 3])
@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_interleaved_is_shorter(devices: int, microbatches: int, chunks_per_device: int) -> None:
    schedule = interleaved(devices, microbatches, chunks_per_device)
    intervals = simulate_equal(schedule)
    plain = (microbatches + devices - 1) * 3
    if devices > 1 and microbatches > 1:
        assert makespan(intervals) < plain - 1e-9
    else:
        assert makespan(intervals) == pytest.approx(plain)
    if microbatches % devices == 0:
        assert makespan(intervals) == pytest.approx(
            (chunks_per_device * microbatches + devices - 1) * 3 / chunks_per_device
        )
        assert idle_share(intervals) == pytest.approx(schedule.bubble(), abs=1e-12)
    else:
        assert idle_share(intervals) > schedule.bubble()


@pytest.mark.parametrize("chunks_per_device", [1, 2, 3])
@pytest.mark.parametrize(("devices", "microbatches"), [(4, 8), (3, 9), (8, 8)])
def test_forwards_alone_take_as_long_as_the_formula_says(
    devices: int, microbatches: int, chunks_per_device: int
) -> None:
    intervals = simulate_equal(forward_only(devices, microbatches, chunks_per_device))
    assert makespan(intervals) == pytest.approx((chunks_per_device * microbatches + devices - 1) / chunks_per_device)


@pytest.mark.parametrize("seed", range(20))
def test_devices_do_one_thing_at_a_time_and_wait_for_their_inputs(seed: int) -> None:
    draw = random.Random(seed)
    name = draw.choice(("gpipe", "1f1b", "eager-1f1b", "interleaved"))
    per_device = draw.choice((1, 2, 3)) if name == "interleaved" else 1
    schedule = make_schedule(name, draw.randint(1, 6), draw.randint(1, 12), per_device)
    times = {kind: [draw.uniform(0.1, 2) for _ in range(schedule.chunks)] for kind in ("forward", "backward")}
    transfer = draw.uniform(0, 0.5)
    intervals = simulate(schedule, times["forward"], times["backward"], transfer)
    done = {interval.instruction: interval for interval in intervals}
    assert len(done) == len(intervals) == 2 * schedule.chunks * schedule.microbatches
    for device, order in enumerate(schedule.orders):
        free = 0.0
        for instruction in order:
            begin = free
            for needed in needs(schedule, instruction):
                arrives = done[needed].end + (transfer if done[needed].device != device else 0)
                begin = max(begin, arrives)
            end = begin + times[instruction.kind][instruction.chunk]
            assert done[instruction] == (device, instruction, pytest.approx(begin), pytest.approx(end))
            free = done[instruction].end


def needs(schedule: Schedule, instruction: Instruction) -> list[Instruction]:
    """All that must be done before, with connections that skip chunks."""
    kind, chunk, microbatch = instruction
    if kind == "forward":
        return [Instruction("forward", earlier, microbatch) for earlier in range(chunk)]
    later = [Instruction("backward", c, microbatch) for c in range(chunk + 1, schedule.chunks)]
    return [Instruction("forward", chunk, microbatch), *later]


def test_transfers_delay_only_what_crosses_devices() -> None:
    assert makespan(simulate(gpipe(3, 1), [1] * 3, [2] * 3, transfer=0.25)) == 9 + 4 * 0.25
    assert makespan(simulate(interleaved(1, 4, 3), [1] * 3, [2] * 3, transfer=0.25)) == 36


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 8), (4, 8), (4, 16)])
def test_1f1b_waits_for_each_transfer_and_its_eager_form_does_not(devices: int, microbatches: int) -> None:
    """Those on the way of the first and of the last micro-batch are left; GPipe has no others, either."""
    times = [1] * devices, [2] * devices, 0.25
    without = 3 * (microbatches + devices - 1)
    fewest = without + 2 * (devices - 1) * 0.25
    assert makespan(simulate(gpipe(devices, microbatches), *times)) == fewest
    assert makespan(simulate(eager_one_f_one_b(devices, microbatches), *times)) == fewest
    assert makespan(simulate(one_f_one_b(devices, microbatches), *times)) >= without + microbatches * 0.25


def test_a_slow_stage_holds_all_up() -> None:
    intervals = simulate(one_f_one_b(2, 4), [1, 3], [2, 6])
    assert makespan(intervals) == 1 + 4 * 9 + 2
    assert speed_up(intervals) == (4 * 3 + 4 * 9) / 39
    assert idle_share(intervals) == pytest.approx(1 - 48 / 78)


def test_overlapping_measurements_count_once() -> None:
    intervals = [
        Interval(0, Instruction("forward", 0, 0), 10.0, 14.0),
        Interval(0, Instruction("forward", 0, 1), 11.0, 12.0),
        Interval(0, Instruction("forward", 0, 2), 13.0, 15.0),
        Interval(1, Instruction("forward", 1, 0), 15.0, 20.0),
    ]
    assert speed_up(intervals) == 1.0
    assert idle_share(intervals) == 0.5


@pytest.mark.parametrize(
    ("forward", "backward", "transfer", "message"),
    [
        ([1], [1, 1], 0, "forward has 1 times, but schedule 'gpipe' has 2 chunks: give one time per chunk"),
        ([1, 1], [1, 1, 1], 0, "backward has 3 times, but schedule 'gpipe' has 2 chunks"),
        ([1, -1], [1, 1], 0, "A time is -1 s: forward, backward and transfer must all be 0 or more"),
        ([1, 1], [1, 1], -0.5, "A time is -0.5 s"),
    ],
)
def test_wrong_times(forward: list[float], backward: list[float], transfer: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(gpipe(2, 2), forward, backward, transfer)


@pytest.mark.parametrize("function", [makespan, idle_share, speed_up])
def test_no_intervals_and_no_time(function) -> None:
    with pytest.raises(ValueError, match="There are no intervals, but at least one is needed: record or simulate"):
        function([])
    with pytest.raises(ValueError, match=r"The intervals take 0\.0 s in all, but must take more than 0"):
        function([Interval(0, Instruction("forward", 0, 0), 1.0, 1.0)])


def test_a_trace_file_has_a_process_for_each_step_and_a_thread_for_each_stage(tmp_path: Path) -> None:
    predicted = simulate(gpipe(2, 1), [0.25, 0.5], [1, 1])
    measured = [interval._replace(begin=interval.begin + 100, end=interval.end + 100.5) for interval in predicted]
    write_trace(tmp_path / "step.json", measured, predicted)
    trace = json.loads((tmp_path / "step.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] in ("process_name", "thread_name")
    }
    assert names == {
        ("process_name", 1, 0): "measured",
        ("thread_name", 1, 0): "stage 0",
        ("thread_name", 1, 1): "stage 1",
        ("process_name", 2, 0): "predicted",
        ("thread_name", 2, 0): "stage 0",
        ("thread_name", 2, 1): "stage 1",
    }
    boxes = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(boxes) == 8
    assert boxes[0] == {
        "ph": "X",
        "pid": 1,
        "tid": 0,
        "name": "forward 0",
        "cat": "forward",
        "ts": 0.0,
        "dur": 750000.0,
        "args": {"chunk": 0, "microbatch": 0},
    }
    last = boxes[-1]
    assert (last["pid"], last["tid"], last["name"], last["ts"], last["dur"]) == (2, 0, "backward 0", 1.75e6, 1e6)


@pytest.mark.parametrize("measured", [None, []])
def test_a_trace_file_without_measurements(tmp_path: Path, measured) -> None:
    write_trace(tmp_path / "step.json", measured, simulate(gpipe(2, 3), [1, 1], [1, 1]))
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {2}
    assert sum(event["ph"] == "X" for event in events) == 12


def test_a_trace_file_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_trace(tmp_path / "nowhere" / "step.json", None, simulate(gpipe(1, 1), [1], [1]))
