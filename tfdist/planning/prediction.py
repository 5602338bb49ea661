"""What replicas of a model, and its pipelines, would need: time, memory and messages of a step. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tfdist.layer_graph.partition import balance
from tfdist.memory.budget import peak
from tfdist.memory.estimate import MARGIN
from tfdist.planning.hardware import Device, Hardware, all_reduce_seconds, ring_bytes
from tfdist.planning.profile import LayerProfile, ModelProfile, Sample, StepCost
from tfdist.strategies.pipeline.schedule import Interval, Schedule, idle_share, make_schedule, makespan, simulate

# Stands for the program until it is known.
PROGRAM = "train.py"
IN_ONE_PROCESS = f"python {PROGRAM}"
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved")
_CHUNKS = {"interleaved": 2}
# Longer pipelines are not simulated: models hardly ever have enough layers.
_MOST_STAGES = 32
# Multiples of the number of stages. More micro-batches shorten the bubble, but their matrices are small.
_MICRO_BATCHES = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One row of a plan.

    Attributes:
        name: of the strategy, with its most important arguments.
        strategy: name of its class in tfdist; empty if none is needed.
        options: its arguments.
        start: the command that starts the script.
        devices: how many it uses.
        seconds: of a step on the global batch.
        compute: the part of them in which a device computes.
        communication: the part in which devices wait for messages.
        memory: bytes that the fullest device needs.
        available: bytes that a device has.
        sent: bytes that a device sends in a step.
        resident: bytes of weights and slots on that device, which it holds between steps, too.
        gathered: bytes of whole weights and gradients that it has, at most, where weights are split.
        bubble: share of the time in which the devices of a pipeline wait for each other.
        is_sharded: whether the optimizer is a `ShardedOptimizer`.
        mode: how activations are kept for the backward pass, see `tfdist.memory.MemoryPolicy`.

    Example:
        >>> row = Prediction("one device", "", {}, "python train.py", 1, 0.02, 0.019, 0.0, 10**9, 8 * 10**9)
        >>> row.fits
        True
    """

    name: str
    strategy: str
    options: Mapping[str, Any]
    start: str
    devices: int
    seconds: float
    compute: float
    communication: float
    memory: float
    available: float
    sent: float = 0.0
    resident: float = 0.0
    gathered: float = 0.0
    bubble: float | None = None
    is_sharded: bool = False
    mode: str = "none"

    @property
    def code(self) -> str:
        """The expression that makes the strategy; empty if none is needed.

        Example:
            >>> Prediction("", "MirroredStrategy", {"memory": "recompute"}, "", 2, 1.0, 1.0, 0.0, 1.0, 1.0).code
            "tfdist.MirroredStrategy(memory='recompute')"
        """
        if not self.strategy:
            return ""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        sharded = ", with optimizer=tfdist.ShardedOptimizer(...)" if self.is_sharded else ""
        return f"tfdist.{self.strategy}({arguments}){sharded}"

    def __str__(self) -> str:
        code = f": {self.code}" if self.code else ""
        memory = f"{self.memory / 1e9:.3g} of {self.available / 1e9:.3g} GB on a device"
        return f"{self.name}{code} ({1e3 * self.seconds:.3g} ms a step, {memory})"

    @property
    def family(self) -> str:
        """The name without memory mode, number of micro-batches and the like."""
        return self.name.partition(",")[0]

    @property
    def fits(self) -> bool:
        """Whether the memory is large enough."""
        return self.memory <= self.available


def start_of(hardware: Hardware, devices: int, how: str = "") -> str:
    """The command that starts the script; on several hosts by Slurm, one of several ways.

    Args:
        hardware: what it runs on.
        devices: how many it uses, each in a process of its own.
        how: options of the launcher; empty for one worker a device.

    Example:
        >>> from tfdist.planning.hardware import PRESETS
        >>> start_of(PRESETS["v100-nvlink"], 8), start_of(PRESETS["v100-nvlink"], 16)
        ('tfdist run -n 8 train.py', 'tfdist submit --scheduler slurm -n 16 --gpus-per-worker 1 train.py')
    """
    # Else the workers of a host share all of its GPUs, and Slurm gives none.
    takes_some = hardware.kind == "GPU" and devices != hardware.per_host
    how = how or f"-n {devices}" + " --gpus-per-worker 1" * takes_some
    command = "run" if devices <= hardware.per_host else "submit --scheduler slurm"
    return f"tfdist {command} {how} {PROGRAM}"


def gpus(hardware: Hardware, devices: int) -> dict[str, list[str]]:
    """The argument that names the first GPUs of this process; empty if the strategy would take all of them anyway.

    Example:
        >>> from tfdist.planning.hardware import PRESETS
        >>> gpus(PRESETS["v100-nvlink"], 2), gpus(PRESETS["v100-nvlink"], 8)
        ({'devices': ['GPU:0', 'GPU:1']}, {})
    """
    if hardware.kind != "GPU" or devices >= hardware.per_host:
        return {}
    return {"devices": [f"GPU:{number}" for number in range(devices)]}


def replicated(profile: ModelProfile, hardware: Hardware, devices: int) -> Iterator[Prediction]:
    """One device, or each strategy with a replica on each device, with and without recomputation."""
    for mode in ("none", "recompute"):
        if devices == 1:
            yield _replica(profile, hardware, 1, mode, "one device", "" if mode == "none" else "MirroredStrategy")
        elif hardware.kind == "GPU" and devices <= hardware.per_host:
            yield _replica(profile, hardware, devices, mode, "Mirrored", "MirroredStrategy", in_one_process=True)
        if devices > 1:
            yield _replica(profile, hardware, devices, mode, "MultiWorker", "MultiWorkerMirroredStrategy")
    if devices > 1 and profile.slots > 0:
        yield _replica(profile, hardware, devices, "none", "MultiWorker, ZeRO-1", "MultiWorkerMirroredStrategy", True)
    if devices > 1 and profile.gathered:
        yield _fully_sharded(profile, hardware, devices, "FullySharded", {})
        yield _fully_sharded(profile, hardware, devices, "FullySharded, kept", {"reshard_after_forward": False})
        yield _fully_sharded(profile, hardware, devices, "FullySharded, recompute", {"memory": "recompute"})
        # It is refused with NCCL, and needs whole hosts of several processes.
        are_whole = devices > hardware.per_host > 1 and devices % hardware.per_host == 0
        if hardware.kind == "CPU" and are_whole:
            yield _fully_sharded(profile, hardware, devices, "FullySharded, within hosts", {"shard_within": "host"})


def _replica(
    profile: ModelProfile,
    hardware: Hardware,
    devices: int,
    mode: str,
    name: str,
    strategy: str,
    sharded: bool = False,
    in_one_process: bool = False,
) -> Prediction:
    device, link = hardware.device(devices), hardware.link(devices)
    # The slowest replica is the one with the most rows.
    sample = profile.at(-(-profile.rows // devices))
    shards = devices if sharded else 1
    peak_bytes, added = (sample.peak, 0.0) if mode == "none" else recomputed(sample, device)
    alone = devices == 1 or in_one_process
    update = _sharded(sample.update, shards, profile.trainable) if sharded else sample.update
    compute = sample.compute.seconds(device) + update.seconds(device) + added
    compute += hardware.step if alone else hardware.cluster_step
    communication = 0.0
    if devices > 1:
        # A sharded optimizer does the first half with the gradients, and the second with the updated weights.
        communication = all_reduce_seconds(profile.trainable, devices, link)
        # Batch statistics are summed in the forward pass, their gradients in the backward pass.
        communication += 2 * profile.normalizations * all_reduce_seconds(0, devices, link)
    # What gradients are packed into before they are sent; by the direct transport, their sums.
    packed = profile.trainable if devices > 1 else 0
    resident = profile.weights + profile.slots / shards
    memory = resident + sample.batch + MARGIN * peak_bytes + packed + device.reserved
    arguments = {**(gpus(hardware, devices) if alone else {}), **({} if mode == "none" else {"memory": mode})}
    start = IN_ONE_PROCESS if alone else start_of(hardware, devices)
    return Prediction(
        name if mode == "none" else f"{name}, {mode}",
        strategy,
        arguments,
        start,
        devices,
        compute + communication,
        compute,
        communication,
        memory,
        device.memory,
        ring_bytes(profile.trainable, devices),
        resident,
        is_sharded=sharded,
        mode=mode,
    )


def _sharded(update: StepCost, shards: int, trainable: float) -> StepCost:
    """Each replica updates its part. Packing and unpacking gradients and weights reads and writes them four times."""
    return StepCost(update.flops / shards, update.bytes / shards + 4 * trainable, update.operations)


def _fully_sharded(
    profile: ModelProfile, hardware: Hardware, devices: int, name: str, options: Mapping[str, Any]
) -> Prediction:
    """Each replica has a part of every weight, gradient and slot. What it gathers and reduces counts as not hidden."""
    # How many devices have the parts of a weight, and on how many hosts the same parts are.
    shards = hardware.per_host if "shard_within" in options else devices
    hosts = devices // shards
    device, link = hardware.device(devices), hardware.link(shards)
    sample, blocks = profile.at(-(-profile.rows // devices)), profile.gathered
    keeps, again = "reshard_after_forward" in options, "memory" in options
    split = sum(blocks)
    # Without the gradients of all weights, of which there is one block's at a time.
    sample = sample._replace(peak=max(sample.peak - profile.trainable, peak(sample.blocks, ())))
    peak_bytes, added = recomputed(sample, device) if again else (sample.peak, 0.0)
    # Each block is gathered, and gathered again unless its backward pass follows at once. Its gradients are reduced to
    # parts: NCCL, between GPUs of several processes, sends the sums whole.
    gathers = [*blocks, *(() if keeps else blocks[:-1])]
    sent = [*gathers, *blocks, *(blocks if hardware.kind == "GPU" else ())]
    communication = sum(all_reduce_seconds(size, shards, link) / 2 for size in sent)
    # All devices of a host share the network, and each sums its parts.
    communication += sum(all_reduce_seconds(size, hosts, hardware.between) for size in blocks)
    communication += 2 * profile.normalizations * all_reduce_seconds(0, devices, hardware.link(devices))
    compute = sample.compute.seconds(device) + _sharded(sample.update, shards, sum(sent) / 2).seconds(device) + added
    compute += hardware.cluster_step
    # Two blocks, the second one while it is unpacked, or all; and the gradients of one, while they are packed.
    largest = max(blocks, default=0.0)
    gathered = (split if keeps else 2 * largest) + 2 * largest
    # At the end of the backward pass, a part of all gradients stands where the activations of all blocks but one were.
    at_end = profile.trainable / shards + max((block.kept for block in sample.blocks), default=0.0)
    resident = profile.weights - split + (split + profile.slots) / shards
    memory = resident + gathered + sample.batch + MARGIN * max(peak_bytes, at_end) + device.reserved
    return Prediction(
        name,
        "FullyShardedStrategy",
        options,
        start_of(hardware, devices),
        devices,
        compute + communication,
        compute,
        communication,
        memory,
        device.memory,
        sum(ring_bytes(size, shards) / 2 for size in sent) + ring_bytes(split, hosts) / shards,
        resident,
        gathered,
        mode="recompute" if again else "none",
    )


def recomputed(sample: Sample, device: Device) -> tuple[float, float]:
    """The peak bytes of a step if each block runs its forward pass again, and the seconds that it adds."""
    if not sample.blocks:
        return sample.peak, 0.0
    # All blocks but those whose inputs are more than what they keep.
    again = {number for number, block in enumerate(sample.blocks) if block.kept > block.inputs}
    # A forward pass is a third of the step.
    share = sum(sample.blocks[number].flops for number in again) / (sum(block.flops for block in sample.blocks) or 1)
    beside = max(sample.peak - peak(sample.blocks, ()), 0.0)
    return beside + peak(sample.blocks, again), share * sample.compute.seconds(device) / 3


def pipelines(profile: ModelProfile, hardware: Hardware, stages: int) -> Iterator[Prediction]:
    """The best number of micro-batches of each schedule, with and without recomputation."""
    for name in SCHEDULES if stages <= _MOST_STAGES else ():
        for recompute in (False, True):
            found = [
                predicted
                for times in _MICRO_BATCHES
                if times * stages <= profile.rows
                and (predicted := pipeline(profile, hardware, stages, times * stages, name, recompute)) is not None
            ]
            if found:
                yield min(found, key=lambda each: (not each.fits, each.seconds))


def pipeline(
    profile: ModelProfile, hardware: Hardware, stages: int, microbatches: int, name: str, recompute: bool = False
) -> Prediction | None:
    """One pipeline; `None` if the model cannot be cut into as many pieces.

    Args:
        stages: number of devices, K.
        microbatches: into how many parts a batch is cut, M.
        name: of the schedule.
        recompute: whether backward passes run the forward pass again.
    """
    schedule = make_schedule(name, stages, microbatches, _CHUNKS.get(name, 1))
    pieces = cut(profile.layers, schedule.chunks)
    if pieces is None:
        return None
    device = hardware.device(stages)
    micro = profile.at(profile.rows / microbatches)
    intervals = timeline(profile, hardware, schedule, pieces, recompute)
    update = profile.at(profile.rows).update.seconds(device)
    parameters = sum(layer.parameters for layer in profile.layers) or 1.0
    on_device = [[layer for piece in pieces[d::stages] for layer in piece] for d in range(stages)]
    largest = max(sum(layer.parameters for layer in layers) for layers in on_device) / parameters
    span = makespan(intervals)
    idle = idle_share(intervals)
    seconds = span + update * largest + hardware.step
    busy = span * (1 - idle)
    variables = profile.weights + profile.slots + profile.trainable
    memory = max(
        variables * sum(layer.parameters for layer in layers) / parameters
        + _held(profile, micro, schedule, pieces, d, recompute)
        for d, layers in enumerate(on_device)
    )
    in_one_process = hardware.kind == "GPU" and stages <= hardware.per_host
    mode = "recompute" if recompute else "none"
    options: dict[str, Any] = {
        **(gpus(hardware, stages) if in_one_process else {}),
        **{"num_microbatches": microbatches, "schedule": name, "memory": mode},
    }
    return Prediction(
        f"Pipeline {name}, M={microbatches}" + (", recompute" if recompute else ""),
        "PipelineStrategy",
        options,
        # The workers of a job on several hosts are its stages.
        IN_ONE_PROCESS
        if in_one_process
        else start_of(hardware, stages, f"--stages {stages}" if stages <= hardware.per_host else ""),
        stages,
        seconds,
        busy + update * largest + hardware.step,
        max(seconds - busy - update * largest - hardware.step, 0.0),
        memory + micro.batch * microbatches + device.reserved,
        device.memory,
        profile.rows * max(_sent(pieces, d, stages) for d in range(stages)),
        (profile.weights + profile.slots) * largest,
        bubble=idle,
        mode=mode,
    )


def _sent(pieces: Sequence[Sequence[LayerProfile]], device: int, stages: int) -> float:
    """Bytes that a device sends for a row: outputs of its pieces to the next ones, and gradients of their inputs."""
    arrives = [piece[0].arrives for piece in pieces]
    own = range(device, len(pieces), stages)
    return sum(arrives[chunk + 1] for chunk in own if chunk + 1 < len(pieces)) + sum(arrives[c] for c in own if c > 0)


def cut(layers: Sequence[LayerProfile], parts: int) -> list[list[LayerProfile]] | None:
    """Consecutive pieces of about the same work, as `PipelineStrategy` cuts; `None` if there are too few layers.

    Example:
        >>> layers = [LayerProfile(str(i), work=1.0, parameters=4, outputs=4, arrives=4) for i in range(4)]
        >>> [[layer.name for layer in piece] for piece in cut(layers, 2)]
        [['0', '1'], ['2', '3']]
    """
    forbidden = [position for position, layer in enumerate(layers) if not layer.cuttable]
    try:
        positions = balance([layer.work for layer in layers], parts, (), forbidden)
    except ValueError:
        return None
    return [list(layers[begin:end]) for begin, end in pairwise([0, *positions, len(layers)])]


def timeline(
    profile: ModelProfile,
    hardware: Hardware,
    schedule: Schedule,
    pieces: Sequence[Sequence[LayerProfile]],
    recompute: bool,
) -> list[Interval]:
    """What each device computes at which time of a step, without the update of the weights."""
    device, link = hardware.device(schedule.devices), hardware.link(schedule.devices)
    rows = profile.rows / schedule.microbatches
    seconds = profile.at(rows).compute.seconds(device)
    works = [sum(layer.work for layer in piece) for piece in pieces]
    all_work = sum(works) or 1.0
    # For each product of the forward pass, the backward pass computes two. It also adds gradients to earlier ones.
    forward = [seconds * work / all_work / 3 for work in works]
    sums = [3 * sum(layer.parameters for layer in piece) / device.bandwidth for piece in pieces]
    backward = [(3 if recompute else 2) * value + add for value, add in zip(forward, sums, strict=True)]
    messages = [rows * piece[0].arrives for piece in pieces[1:]]
    if hardware.kind == "GPU" or not messages:
        return simulate(schedule, forward, backward, max(map(link.seconds, messages), default=0.0))
    # Processes on cores copy the messages themselves, at both ends: that is time in which they do not compute.
    for chunk, size in enumerate(messages):
        for times in (forward, backward):
            times[chunk] += size / link.bandwidth
            times[chunk + 1] += size / link.bandwidth
    return simulate(schedule, forward, backward, link.latency)


def _held(
    profile: ModelProfile,
    micro: Sample,
    schedule: Schedule,
    pieces: Sequence[Sequence[LayerProfile]],
    device: int,
    recompute: bool,
) -> float:
    """Bytes that the micro-batches in flight keep on a device, and that one of them needs while it computes."""
    outputs = sum(layer.outputs for layer in profile.layers) or 1.0
    in_flight = schedule.in_flight()
    held, most = 0.0, 0.0
    for chunk in range(device, schedule.chunks, schedule.devices):
        of_one = micro.peak * sum(layer.outputs for layer in pieces[chunk]) / outputs
        stays = micro.rows * pieces[chunk][0].arrives if recompute else of_one
        held += stays * in_flight[chunk]
        most = max(most, of_one if recompute else 0.0)
    return MARGIN * (held + most)
