"""Schedules of pipeline parallelism: in which order each device computes forwards and backwards of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Literal, NamedTuple


class Instruction(NamedTuple):
    """One computation: the forward or the backward of one micro-batch through one chunk of the model.

    Example:
        >>> Instruction("forward", chunk=0, microbatch=3).kind
        'forward'
    """

    kind: Literal["forward", "backward"]
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.microbatch} through chunk {self.chunk}"


@dataclass(frozen=True)
class Schedule:
    """What each device computes, in order. Chunk `c` of the model is on device `c % devices`.

    Attributes:
        name: name of the schedule, such as "1f1b".
        devices: number of devices, K.
        microbatches: number of micro-batches of a step, M.
        chunks_per_device: number of chunks on each device, V.
        orders: instructions of each device.

    Raises:
        ValueError: if a count is no whole number of at least 1, or `orders` does not fit them.

    Example:
        >>> schedule = one_f_one_b(devices=2, microbatches=4)
        >>> schedule.in_flight(), schedule.bubble()
        ((2, 1), 0.2)
    """

    name: str
    devices: int
    microbatches: int
    chunks_per_device: int
    orders: tuple[tuple[Instruction, ...], ...]

    def __post_init__(self) -> None:
        _check_counts(self.devices, self.microbatches, self.chunks_per_device)
        if len(self.orders) != self.devices:
            raise ValueError(
                f"Schedule {self.name!r} has {len(self.orders)} orders for {self.devices} devices: "
                "give each device one."
            )
        for device, order in enumerate(self.orders):
            for instruction in order:
                if not 0 <= instruction.chunk < self.chunks or self.device_of(instruction.chunk) != device:
                    raise ValueError(
                        f"Schedule {self.name!r} has the {instruction} on device {device}, which has chunks "
                        f"{list(range(device, self.chunks, self.devices))} only: put it on its chunk's device."
                    )

    @property
    def chunks(self) -> int:
        """The number of chunks of the model."""
        return self.devices * self.chunks_per_device

    def device_of(self, chunk: int) -> int:
        """The device that a chunk is on."""
        return chunk % self.devices

    def requirements(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that must be done before this one can begin.

        Those of the neighbouring chunks are enough, also where connections skip chunks: they need what lies before.

        Example:
            >>> gpipe(2, 1).requirements(Instruction("backward", 0, 0))
            [Instruction(kind='forward', chunk=0, microbatch=0), Instruction(kind='backward', chunk=1, microbatch=0)]
        """
        kind, chunk, microbatch = instruction
        if kind == "forward":
            return [Instruction("forward", chunk - 1, microbatch)] if chunk > 0 else []
        own = [Instruction("forward", chunk, microbatch)]
        return [*own, Instruction("backward", chunk + 1, microbatch)] if chunk + 1 < self.chunks else own

    def linear_order(self) -> list[tuple[int, Instruction]]:
        """All instructions with their devices, in one order that one program can follow.

        It keeps the order of each device, and puts each instruction behind all that it requires. The devices take
        turns, so that a program that starts the computations in this order, without waiting for them, keeps all devices
        busy.

        Raises:
            ValueError: if the schedule deadlocks: every device waits for another one, or for an instruction that no
                device has.

        Example:
            >>> [(device, i.kind) for device, i in gpipe(2, 1).linear_order()]
            [(0, 'forward'), (1, 'forward'), (1, 'backward'), (0, 'backward')]
        """
        result: list[tuple[int, Instruction]] = []
        done: set[Instruction] = set()
        positions = [0] * self.devices
        while waiting := [(d, order[positions[d]]) for d, order in enumerate(self.orders) if positions[d] < len(order)]:
            ready = [(d, i) for d, i in waiting if done.issuperset(self.requirements(i))]
            if not ready:
                raise ValueError(f"Schedule {self.name!r} deadlocks: {self._why_stuck(waiting, done)}.")
            for device, instruction in ready:
                positions[device] += 1
                done.add(instruction)
            result += ready
        return result

    def in_flight(self) -> tuple[int, ...]:
        """For each chunk, the most micro-batches at a time between forward and backward: their activations need memory.

        Micro-batches without a backward, as in `evaluate`, do not count: nothing has to be kept for them.
        """
        most = [0] * self.chunks
        now = [0] * self.chunks
        returning = {(i.chunk, i.microbatch) for order in self.orders for i in order if i.kind == "backward"}
        for order in self.orders:
            for kind, chunk, microbatch in order:
                if (chunk, microbatch) in returning:
                    now[chunk] += 1 if kind == "forward" else -1
                    most[chunk] = max(most[chunk], now[chunk])
        return tuple(most)

    def bubble(self) -> float:
        """The ideal idle share (K-1)/(V*M+K-1): for chunks that take equally long, and transfers that take no time.

        An interleaved schedule reaches it only if the number of micro-batches is a multiple of the number of devices.
        """
        return (self.devices - 1) / (self.chunks_per_device * self.microbatches + self.devices - 1)

    def _why_stuck(self, waiting: list[tuple[int, Instruction]], done: set[Instruction]) -> str:
        reasons = []
        for device, instruction in waiting:
            missing = next(i for i in self.requirements(instruction) if i not in done)
            reasons.append(f"the {instruction}, next on device {device}, needs the {missing}")
        return "; ".join(reasons)


def gpipe(devices: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards; every micro-batch is in flight at once.

    GPipe, arXiv 1811.06965. The paper takes the backwards in reverse. Here, all schedules begin with micro-batch 0: so
    they add up gradients in the same order, and get the same sums bit for bit.

        stage 0 |F0 F1 F2 F3             B0 B1 B2 B3
        stage 1 |   F0 F1 F2 F3       B0 B1 B2 B3
        stage 2 |      F0 F1 F2 F3 B0 B1 B2 B3

    Raises:
        ValueError: if a count is no whole number of at least 1.
    """
    _check_counts(devices, microbatches)
    return _phased("gpipe", devices, microbatches, 1, [microbatches] * devices)


def one_f_one_b(devices: int, microbatches: int) -> Schedule:
    """One forward, one backward, in turn: as fast as GPipe, with at most K-s micro-batches in flight on stage s.

    PipeDream, arXiv 1806.03377, in the form that waits for all backwards before it updates weights (PipeDream-flush).

        stage 0 |F0 F1 F2       B0 F3 B1    B2    B3
        stage 1 |   F0 F1    B0 F2 B1 F3 B2    B3
        stage 2 |      F0 B0 F1 B1 F2 B2 F3 B3

    Raises:
        ValueError: if a count is no whole number of at least 1.
    """
    _check_counts(devices, microbatches)
    return _phased("1f1b", devices, microbatches, 1, [devices - 1 - device for device in range(devices)])


def eager_one_f_one_b(devices: int, microbatches: int) -> Schedule:
    """1F1B that begins with more forwards: transfers take place while the devices compute.

    In 1F1B a stage has nothing to do while a micro-batch is on its way to the next stage and back, and that for each
    micro-batch. With up to 2(K-s)-1 micro-batches in flight on stage s there is something to do, as long as a transfer
    takes no longer than half of a forward and a backward (arXiv 2211.05322).

        stage 0 |F0 F1 F2 F3 F4 B0 F5 B1    B2    B3    B4    B5
        stage 1 |   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3    B4    B5
        stage 2 |      F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    Raises:
        ValueError: if a count is no whole number of at least 1.
    """
    _check_counts(devices, microbatches)
    return _phased("eager-1f1b", devices, microbatches, 1, [2 * (devices - 1 - device) for device in range(devices)])


def interleaved(devices: int, microbatches: int, chunks_per_device: int) -> Schedule:
    """1F1B with several chunks (a, b, ...) on each device: a shorter bubble for more transfers and activations.

    Megatron-LM, arXiv 2104.04473. Where M is no multiple of K, this is the schedule for the next multiple, less the
    micro-batches that do not exist; its bubble is longer than the ideal one. With one chunk per device it is 1F1B.

        stage 0 |F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a     B2b     B3b B2a B3a
        stage 1 |    F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a

    Raises:
        ValueError: if a count is no whole number of at least 1.
    """
    _check_counts(devices, microbatches, chunks_per_device)
    # With one chunk, the longer warm-up that feeds later chunks would only keep more micro-batches in flight.
    turns = 2 if chunks_per_device > 1 else 1
    warm_ups = [turns * (devices - 1 - d) + (chunks_per_device - 1) * devices for d in range(devices)]
    return _phased("interleaved", devices, microbatches, chunks_per_device, warm_ups)


def forward_only(devices: int, microbatches: int, chunks_per_device: int = 1) -> Schedule:
    """Forwards alone, for `evaluate` and `predict`.

        stage 0 |F0 F1 F2 F3
        stage 1 |   F0 F1 F2 F3
        stage 2 |      F0 F1 F2 F3

    Raises:
        ValueError: if a count is no whole number of at least 1.
    """
    _check_counts(devices, microbatches, chunks_per_device)
    visits = _visits(devices, microbatches, chunks_per_device)
    orders = tuple(
        tuple(Instruction("forward", v * devices + d, m) for v, m in visits if m < microbatches) for d in range(devices)
    )
    return Schedule("forward_only", devices, microbatches, chunks_per_device, orders)


def make_schedule(name: str, devices: int, microbatches: int, chunks_per_device: int = 1) -> Schedule:
    """The schedule of a name: "gpipe", "1f1b", "eager-1f1b" or "interleaved".

    Raises:
        ValueError: for another name, a count that is no whole number of at least 1, or several chunks per device for a
            schedule that has one.

    Example:
        >>> make_schedule("gpipe", 4, 8).bubble() == 3 / 11
        True
    """
    if name == "interleaved":
        return interleaved(devices, microbatches, chunks_per_device)
    if name not in _WITH_ONE_CHUNK:
        names = ", ".join(map(repr, _WITH_ONE_CHUNK))
        raise ValueError(f"schedule is {name!r}, but must be one of {names} and 'interleaved'.")
    if chunks_per_device != 1:
        raise ValueError(
            f"chunks_per_device is {chunks_per_device!r}, but must be 1 with schedule {name!r}: "
            "leave it out, or take schedule 'interleaved'."
        )
    return _WITH_ONE_CHUNK[name](devices, microbatches)


_WITH_ONE_CHUNK = {"gpipe": gpipe, "1f1b": one_f_one_b, "eager-1f1b": eager_one_f_one_b}


def _phased(name: str, devices: int, microbatches: int, chunks_per_device: int, warm_ups: list[int]) -> Schedule:
    """A schedule in which each device begins with some forwards, then takes one forward and one backward in turn.

    Args:
        warm_ups: for each device, the number of forwards before its first backward.
    """
    visits = _visits(devices, microbatches, chunks_per_device)
    orders = []
    for device in range(devices):
        forwards = [Instruction("forward", v * devices + device, m) for v, m in visits]
        backwards = [Instruction("backward", (chunks_per_device - 1 - v) * devices + device, m) for v, m in visits]
        order = forwards[: warm_ups[device]]
        for forward, backward in zip(forwards[warm_ups[device] :], backwards, strict=False):
            order += [forward, backward]
        order += backwards[len(forwards[warm_ups[device] :]) :]
        orders.append(tuple(i for i in order if i.microbatch < microbatches))
    return Schedule(name, devices, microbatches, chunks_per_device, tuple(orders))


def _visits(devices: int, microbatches: int, chunks_per_device: int) -> list[tuple[int, int]]:
    """The order in which a device takes `(chunk of the device, micro-batch)`, in groups of one micro-batch per device.

    The last group is always full: the caller leaves out the micro-batches that do not exist.
    """
    if chunks_per_device == 1:
        return [(0, microbatch) for microbatch in range(microbatches)]
    return [
        (chunk, first + member)
        for first in range(0, microbatches, devices)
        for chunk in range(chunks_per_device)
        for member in range(devices)
    ]


def _check_counts(devices: int, microbatches: int, chunks_per_device: int = 1) -> None:
    counts = {"devices": devices, "microbatches": microbatches, "chunks_per_device": chunks_per_device}
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
            raise ValueError(f"{name} is {count!r}, but must be a whole number of at least 1: pass 1 or more.")
