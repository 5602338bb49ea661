"""Pipeline schedules: orders, what they keep in flight, pictures, errors, and how long simulated steps take."""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path

import pytest

from tests.schedule_pictures import draw
from tfdist.strategies.pipeline import schedule
from tfdist.strategies.pipeline.schedule import (
    Instruction,
    Interval,
    Schedule,
    forward_only,
    idle_share,
    make_schedule,
    makespan,
    simulate,
    speed_up,
)

gpipe, one_f_one_b, eager_one_f_one_b, interleaved, zero_bubble = (
    functools.partial(make_schedule, name) for name in ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1")
)

# Pairs (devices, micro-batches), chosen so that there are fewer micro-batches than devices, as many, a multiple of them
# and no multiple; and one of each.
SIZES = [(1, 1), (1, 4), (2, 4), (3, 2), (3, 3), (3, 7), (4, 8)]
CHUNKS_PER_DEVICE = (1, 3)
SCHEDULES = [
    *(make(k, m) for make in (gpipe, one_f_one_b, eager_one_f_one_b, zero_bubble) for k, m in SIZES),
    *(make(k, m, v) for make in (interleaved, forward_only) for k, m in SIZES for v in CHUNKS_PER_DEVICE),
]


def name_of(schedule: Schedule) -> str:
    return f"{schedule.name}-{schedule.devices}-{schedule.microbatches}-{schedule.chunks_per_device}"


def everything(schedule: Schedule) -> set[Instruction]:
    kinds = {"forward_only": ("forward",), "zb-h1": ("forward", "backward", "weights")}
    return {
        Instruction(kind, chunk, microbatch)
        for kind in kinds.get(schedule.name, ("forward", "backward"))
        for chunk in range(schedule.devices * schedule.chunks_per_device)
        for microbatch in range(schedule.microbatches)
    }


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name_of)
def test_every_instruction_is_there_once_on_its_device(schedule: Schedule) -> None:
    listed = [instruction for order in schedule.orders for instruction in order]
    assert len(listed) == len(set(listed))
    assert set(listed) == everything(schedule)
    for device, order in enumerate(schedule.orders):
        assert {instruction.chunk % schedule.devices for instruction in order} == {device}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name_of)
def test_the_linear_order_keeps_each_devices_order_and_all_dependencies(schedule: Schedule) -> None:
    order = schedule.linear_order()
    for device in range(schedule.devices):
        assert tuple(i for d, i in order if d == device) == schedule.orders[device]
    forwards: dict[int, set[int]] = {m: set() for m in range(schedule.microbatches)}
    backwards: dict[int, set[int]] = {m: set() for m in range(schedule.microbatches)}
    for _, (kind, chunk, microbatch) in order:
        if kind == "forward":
            assert forwards[microbatch] >= set(range(chunk))
            forwards[microbatch].add(chunk)
        elif kind == "weights":
            assert chunk in backwards[microbatch]
        else:
            assert chunk in forwards[microbatch]
            assert backwards[microbatch] >= set(range(chunk + 1, schedule.chunks))
            backwards[microbatch].add(chunk)


@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_what_is_in_flight(devices: int, microbatches: int) -> None:
    assert gpipe(devices, microbatches).in_flight() == (microbatches,) * devices
    few = tuple(min(devices - stage, microbatches) for stage in range(devices))
    assert one_f_one_b(devices, microbatches).in_flight() == few
    # What 1F1B has on its first device, on all.
    assert zero_bubble(devices, microbatches).in_flight() == (few[0],) * devices
    more = tuple(min(2 * (devices - stage) - 1, microbatches) for stage in range(devices))
    assert eager_one_f_one_b(devices, microbatches).in_flight() == more
    assert forward_only(devices, microbatches).in_flight() == (0,) * devices


@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_the_bubble_is_that_of_the_formula(devices: int, microbatches: int) -> None:
    ideal = (devices - 1) / (microbatches + devices - 1)
    for make in (gpipe, one_f_one_b, eager_one_f_one_b):
        assert make(devices, microbatches).bubble() == ideal
    assert interleaved(devices, microbatches, 3).bubble() == (devices - 1) / (3 * microbatches + devices - 1)
    assert zero_bubble(devices, microbatches).bubble() == (devices - 1) / (3 * microbatches + devices - 1)


def test_a_ragged_interleaved_schedule_leaves_micro_batches_out() -> None:
    for ragged, whole in zip(interleaved(4, 6, 2).orders, interleaved(4, 8, 2).orders, strict=True):
        assert ragged == tuple(instruction for instruction in whole if instruction.microbatch < 6)


def test_the_pictures_in_the_table_are_true() -> None:
    source = Path(schedule.__file__).read_text(encoding="utf-8")
    pictures = re.findall(r"^#.*(stage \d \|.*)$", source, re.MULTILINE)
    drawn = [gpipe(3, 4), one_f_one_b(3, 4), eager_one_f_one_b(3, 6), interleaved(2, 4, 2), zero_bubble(3, 4)]
    assert pictures == [line for each in drawn for line in draw(each).splitlines()[1:]]


F0, F1 = Instruction("forward", 0, 0), Instruction("forward", 1, 0)
B0, B1 = Instruction("backward", 0, 0), Instruction("backward", 1, 0)


def test_a_deadlock_is_refused() -> None:
    with pytest.raises(ValueError, match="Schedule 'mine' deadlocks"):
        Schedule("mine", 2, 1, 1, ((F0, B0), (B1, F1))).linear_order()


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


@pytest.mark.parametrize(("devices", "microbatches"), [*SIZES, (4, 4), (4, 16), (8, 32)])
def test_gradients_of_weights_fill_two_thirds_of_the_bubble(devices: int, microbatches: int) -> None:
    """arXiv 2401.10241, where a device has at least as many micro-batches as there are devices."""
    schedule = zero_bubble(devices, microbatches)
    unit = [1.0] * devices
    intervals = simulate(schedule, unit, unit, weights=unit)
    if microbatches >= devices:
        assert makespan(intervals) == 3 * microbatches + devices - 1
        assert idle_share(intervals) == pytest.approx(schedule.bubble(), abs=1e-12)
    assert makespan(intervals) < 3 * (microbatches + devices - 1) or devices == 1
    # Weights that take no time leave 1F1B.
    without = simulate(one_f_one_b(devices, microbatches), unit, unit)
    assert makespan(simulate(schedule, unit, unit, weights=[0.0] * devices)) == makespan(without)


@pytest.mark.parametrize("chunks_per_device", [2])
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


@pytest.mark.parametrize("seed", range(10))
def test_devices_do_one_thing_at_a_time_and_wait_for_their_inputs(seed: int) -> None:
    draw = random.Random(seed)
    name = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1")[seed % 5]
    per_device = draw.choice((1, 2, 3)) if name == "interleaved" else 1
    schedule = make_schedule(name, draw.randint(1, 6), draw.randint(1, 12), per_device)
    kinds = ("forward", "backward", "weights")
    times = {kind: [draw.uniform(0.1, 2) for _ in range(schedule.chunks)] for kind in kinds}
    transfer = draw.uniform(0, 0.5)
    intervals = simulate(schedule, times["forward"], times["backward"], transfer, times["weights"])
    done = {interval.instruction: interval for interval in intervals}
    assert done.keys() == everything(schedule)
    assert len(done) == len(intervals)
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
    if kind == "weights":
        return [Instruction("backward", chunk, microbatch)]
    later = [Instruction("backward", c, microbatch) for c in range(chunk + 1, schedule.chunks)]
    return [Instruction("forward", chunk, microbatch), *later]


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 8), (4, 8), (4, 16)])
def test_1f1b_waits_for_each_transfer_and_its_eager_form_does_not(devices: int, microbatches: int) -> None:
    """Those on the way of the first and of the last micro-batch are left; GPipe has no others, either."""
    times = [1] * devices, [2] * devices, 0.25
    without = 3 * (microbatches + devices - 1)
    fewest = without + 2 * (devices - 1) * 0.25
    assert makespan(simulate(gpipe(devices, microbatches), *times)) == fewest
    assert makespan(simulate(eager_one_f_one_b(devices, microbatches), *times)) == fewest
    assert makespan(simulate(one_f_one_b(devices, microbatches), *times)) >= without + microbatches * 0.25
