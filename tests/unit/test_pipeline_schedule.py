"""Pipeline schedules: their orders, what they keep in flight, their pictures, and their errors."""

from __future__ import annotations

import pytest

from tests.schedule_pictures import draw
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

# Pairs (devices, micro-batches), chosen so that there are fewer micro-batches than devices, as many, a multiple of them
# and no multiple; one of each; and a large pipeline.
SIZES = [(1, 1), (1, 4), (2, 1), (2, 3), (2, 4), (3, 2), (3, 3), (3, 7), (4, 8), (4, 1), (8, 7), (8, 32)]
CHUNKS_PER_DEVICE = (1, 2, 3)
SCHEDULES = [
    *(make(k, m) for make in (gpipe, one_f_one_b, eager_one_f_one_b) for k, m in SIZES),
    *(make(k, m, v) for make in (interleaved, forward_only) for k, m in SIZES for v in CHUNKS_PER_DEVICE),
]


def name_of(schedule: Schedule) -> str:
    return f"{schedule.name}-{schedule.devices}-{schedule.microbatches}-{schedule.chunks_per_device}"


def everything(schedule: Schedule) -> set[Instruction]:
    kinds = ("forward",) if schedule.name == "forward_only" else ("forward", "backward")
    return {
        Instruction(kind, chunk, microbatch)
        for kind in kinds
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
        else:
            assert chunk in forwards[microbatch]
            assert backwards[microbatch] >= set(range(chunk + 1, schedule.chunks))
            backwards[microbatch].add(chunk)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name_of)
def test_each_chunk_takes_micro_batches_in_their_order(schedule: Schedule) -> None:
    for kind in {instruction.kind for instruction in everything(schedule)}:
        for chunk in range(schedule.chunks):
            order = schedule.orders[schedule.device_of(chunk)]
            taken = [i.microbatch for i in order if (i.kind, i.chunk) == (kind, chunk)]
            assert taken == list(range(schedule.microbatches))


@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_what_is_in_flight(devices: int, microbatches: int) -> None:
    assert gpipe(devices, microbatches).in_flight() == (microbatches,) * devices
    few = tuple(min(devices - stage, microbatches) for stage in range(devices))
    assert one_f_one_b(devices, microbatches).in_flight() == few
    more = tuple(min(2 * (devices - stage) - 1, microbatches) for stage in range(devices))
    assert eager_one_f_one_b(devices, microbatches).in_flight() == more
    assert forward_only(devices, microbatches).in_flight() == (0,) * devices


@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_the_bubble_is_that_of_the_formula(devices: int, microbatches: int) -> None:
    ideal = (devices - 1) / (microbatches + devices - 1)
    for make in (gpipe, one_f_one_b, eager_one_f_one_b):
        assert make(devices, microbatches).bubble() == ideal
    assert interleaved(devices, microbatches, 3).bubble() == (devices - 1) / (3 * microbatches + devices - 1)


def test_known_bubbles() -> None:
    assert gpipe(4, 8).bubble() == 3 / 11
    assert interleaved(4, 8, 2).bubble() == 3 / 19
    assert gpipe(1, 1).bubble() == 0


def test_the_in_flight_micro_batches_of_an_interleaved_schedule() -> None:
    assert interleaved(2, 4, 2).in_flight() == (4, 3, 2, 1)


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    assert interleaved(4, 7, 1).orders == one_f_one_b(4, 7).orders


def test_a_ragged_interleaved_schedule_leaves_micro_batches_out() -> None:
    for ragged, whole in zip(interleaved(4, 6, 2).orders, interleaved(4, 8, 2).orders, strict=True):
        assert ragged == tuple(instruction for instruction in whole if instruction.microbatch < 6)


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (gpipe, (3, 4)),
        (one_f_one_b, (3, 4)),
        (eager_one_f_one_b, (3, 6)),
        (interleaved, (2, 4, 2)),
        (forward_only, (3, 4)),
    ],
)
def test_the_pictures_in_the_docstrings_are_true(make, sizes: tuple[int, ...]) -> None:
    picture = [line.strip() for line in make.__doc__.splitlines() if "|" in line]
    assert picture == draw(make(*sizes)).splitlines()[1:]


def test_make_schedule_knows_the_names() -> None:
    assert make_schedule("gpipe", 4, 8) == gpipe(4, 8)
    assert make_schedule("1f1b", 4, 8) == one_f_one_b(4, 8)
    assert make_schedule("eager-1f1b", 4, 8) == eager_one_f_one_b(4, 8)
    assert make_schedule("interleaved", 4, 8, chunks_per_device=2) == interleaved(4, 8, 2)


def test_an_unknown_name() -> None:
    with pytest.raises(
        ValueError, match=r"^schedule is 'pipedream', but must be one of 'gpipe', '1f1b', 'eager-1f1b' and 'inter"
    ):
        make_schedule("pipedream", 4, 8)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_several_chunks_for_a_schedule_that_has_one(name: str) -> None:
    expected = f"chunks_per_device is 2, but must be 1 with schedule '{name}': leave it out, or take schedule 'inter"
    with pytest.raises(ValueError, match=f"^{expected}"):
        make_schedule(name, 4, 8, chunks_per_device=2)


@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [
        ((0, 8, 1), "devices is 0"),
        ((4, -1, 1), "microbatches is -1"),
        ((4, 8.0, 1), "microbatches is 8.0"),
        ((4, True, 1), "microbatches is True"),
        ((4, 8, 0), "chunks_per_device is 0"),
        ((4, "8", 1), "microbatches is '8'"),
    ],
)
def test_a_count_that_is_none(sizes: tuple, wrong: str) -> None:
    for make in (interleaved, forward_only):
        with pytest.raises(ValueError, match=f"^{wrong}, but must be a whole number of at least 1: pass 1 or more"):
            make(*sizes)
    for name in ("gpipe", "1f1b", "eager-1f1b"):
        if sizes[2] == 1:
            with pytest.raises(ValueError, match=f"^{wrong}"):
                make_schedule(name, *sizes)


F0, F1 = Instruction("forward", 0, 0), Instruction("forward", 1, 0)
B0, B1 = Instruction("backward", 0, 0), Instruction("backward", 1, 0)


def test_a_deadlock_says_who_waits_for_what() -> None:
    with pytest.raises(ValueError) as error:
        Schedule("mine", 2, 1, 1, ((F0, B0), (B1, F1))).linear_order()
    assert str(error.value) == (
        "Schedule 'mine' deadlocks: the backward of micro-batch 0 through chunk 0, next on device 0, needs the backward"
        " of micro-batch 0 through chunk 1; the backward of micro-batch 0 through chunk 1, next on device 1, needs the"
        " forward of micro-batch 0 through chunk 1."
    )


def test_a_missing_instruction_is_a_deadlock() -> None:
    with pytest.raises(ValueError, match=r"next on device 1, needs the forward of micro-batch 0 through chunk 0\."):
        Schedule("mine", 2, 1, 1, ((), (F1,))).linear_order()


def test_an_instruction_on_the_wrong_device() -> None:
    message = r"has the forward of micro-batch 0 through chunk 1 on device 0, which has chunks \[0, 2\] only"
    with pytest.raises(ValueError, match=message):
        Schedule("mine", 2, 1, 2, ((F0, F1), ()))


def test_too_few_orders() -> None:
    with pytest.raises(ValueError, match="'mine' has 1 orders for 2 devices: give each device one"):
        Schedule("mine", 2, 1, 1, ((F0,),))


def test_drawing_has_a_title_and_wraps() -> None:
    lines = draw(one_f_one_b(2, 3), width=21).splitlines()
    assert lines == [
        "1f1b: 2 stages, 3 micro-batches, 25% idle",
        "stage 0 |F0 F1    B0",
        "stage 1 |   F0 B0 F1",
        "",
        "stage 0 |F2 B1    B2",
        "stage 1 |B1 F2 B2",
    ]
    assert max(map(len, draw(interleaved(8, 32, 2), width=80).splitlines())) <= 80


def test_drawing_aligns_the_names_of_many_stages() -> None:
    lines = draw(gpipe(11, 1)).splitlines()
    assert lines[0] == "gpipe: 11 stages, 1 micro-batch, 91% idle"
    assert lines[1].startswith(" stage 0 |F0")
    assert lines[11].startswith("stage 10 |")
    assert draw(interleaved(1, 1, 2)).splitlines()[0] == "interleaved: 1 stage of 2 chunks, 1 micro-batch, 0% idle"


def test_drawing_in_little_room_has_one_column_a_line() -> None:
    lines = draw(gpipe(1, 2), width=1).splitlines()
    assert lines[1:] == ["stage 0 |F0", "", "stage 0 |F1", "", "stage 0 |B0", "", "stage 0 |B1"]
