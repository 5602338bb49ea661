"""What each strategy would need for a model: time, memory and messages of a step. Pipelines are in `pipelines`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.memory.estimation.block_options import Option, Rates, options, peak
from tfdist.memory.estimation.liveness import MARGIN
from tfdist.planning.hardware import Device, Hardware, all_reduce_seconds, ring_bytes
from tfdist.planning.profile import ModelProfile, Sample, StepCost

# Stands for the program until it is known.
PROGRAM = "train.py"
IN_ONE_PROCESS = f"python {PROGRAM}"
MODES = ("none", "recompute", "recompute+swap", "swap")
_WORKERS_PER_SERVER = 4


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
        bubble: share of the time in which the devices of a pipeline wait for each other.
        is_exact: whether it computes the same as one process.
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
    bubble: float | None = None
    is_exact: bool = True
    is_sharded: bool = False
    mode: str = "none"

    @property
    def code(self) -> str:
        """The expression that makes the strategy; empty if none is needed.

        Example:
            >>> Prediction("", "MirroredStrategy", {"memory": "swap"}, "", 2, 1.0, 1.0, 0.0, 1.0, 1.0).code
            "tfdist.MirroredStrategy(memory='swap')"
        """
        if not self.strategy:
            return ""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        sharded = ", with optimizer=tfdist.ShardedOptimizer(...)" if self.is_sharded else ""
        return f"tfdist.{self.strategy}({arguments}){sharded}"

    @property
    def family(self) -> str:
        """The name without memory mode, number of micro-batches and the like."""
        return self.name.partition(",")[0]

    @property
    def fits(self) -> bool:
        """Whether the memory is large enough."""
        return self.memory <= self.available


def start_of(hardware: Hardware, devices: int, how: str = "", by_mpi: bool = False) -> str:
    """The command that starts the script; on several hosts one of several ways: Slurm or MPI.

    Args:
        hardware: what it runs on.
        devices: how many it uses, each in a process of its own.
        how: options of the launcher; empty for one worker a device.
        by_mpi: whether it is started by MPI on several hosts, because `tfdist submit` cannot start it.

    Example:
        >>> from tfdist.planning.hardware import PRESETS
        >>> start_of(PRESETS["v100-nvlink"], 8), start_of(PRESETS["v100-nvlink"], 16)
        ('tfdist run -n 8 train.py', 'tfdist submit --scheduler slurm -n 16 train.py')
    """
    how = how or f"-n {devices}"
    if devices <= hardware.per_host:
        return f"tfdist run {how} {PROGRAM}"
    return f"mpirun -n {devices} python {PROGRAM}" if by_mpi else f"tfdist submit --scheduler slurm {how} {PROGRAM}"


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
    """One device, or each strategy with a replica on each device, with every memory mode."""
    modes = [mode for mode in MODES if mode in ("none", "recompute") or hardware.device(devices).host_link]
    for mode in modes:
        if devices == 1:
            yield _replica(profile, hardware, 1, mode, "one device", "" if mode == "none" else "MirroredStrategy")
        elif hardware.kind == "GPU" and devices <= hardware.per_host:
            yield _replica(profile, hardware, devices, mode, "Mirrored", "MirroredStrategy", in_one_process=True)
        if devices > 1:
            yield _replica(profile, hardware, devices, mode, "MultiWorker", "MultiWorkerMirroredStrategy")
            if hardware.horovod is not None:
                yield _replica(profile, hardware, devices, mode, "Horovod", "HorovodStrategy", horovod=True)
    if devices > 1 and profile.slots > 0:
        yield _replica(profile, hardware, devices, "none", "MultiWorker, ZeRO-1", "MultiWorkerMirroredStrategy", True)


def _replica(
    profile: ModelProfile,
    hardware: Hardware,
    devices: int,
    mode: str,
    name: str,
    strategy: str,
    sharded: bool = False,
    horovod: bool = False,
    in_one_process: bool = False,
) -> Prediction:
    device, link = hardware.device(devices), hardware.link(devices, horovod)
    # The slowest replica is the one with the most rows.
    sample = profile.at(-(-profile.rows // devices))
    shards = devices if sharded else 1
    chosen, added = in_mode(sample, device, mode)
    alone = devices == 1 or in_one_process
    update = _sharded(sample.update, shards, profile.trainable) if sharded else sample.update
    compute = sample.compute.seconds(device) + update.seconds(device) + added
    compute += hardware.step if alone else hardware.cluster_step
    # A sharded optimizer collects the updated parts of the weights by a second sum.
    sums = 2 if sharded else 1
    communication = 0.0
    if devices > 1:
        communication = sums * all_reduce_seconds(profile.trainable, devices, link)
        # Batch statistics are summed in the forward pass, their gradients in the backward pass.
        communication += 2 * profile.normalizations * all_reduce_seconds(0, devices, link)
    # Gradients are packed into one tensor before they are sent.
    packed = profile.trainable if devices > 1 else 0
    memory = profile.weights + profile.slots / shards + sample.batch + MARGIN * chosen + packed + device.reserved
    arguments = {**(gpus(hardware, devices) if alone else {}), **({} if mode == "none" else {"memory": mode})}
    how = f"--transport horovod -n {devices}" if horovod else ""
    start = IN_ONE_PROCESS if alone else start_of(hardware, devices, how, by_mpi=horovod)
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
        sums * ring_bytes(profile.trainable, devices),
        is_sharded=sharded,
        mode=mode,
    )


def _sharded(update: StepCost, shards: int, trainable: float) -> StepCost:
    """Each replica updates its part. Packing and unpacking gradients and weights reads and writes them four times."""
    return StepCost(update.flops / shards, update.bytes / shards + 4 * trainable, update.operations)


def in_mode(sample: Sample, device: Device, mode: str) -> tuple[float, float]:
    """The peak bytes of a step if all blocks have this memory mode, and the seconds that it adds."""
    if mode == "none" or not sample.blocks:
        return sample.peak, 0.0
    # Without a link, `with_host` is false, and the rate is not used.
    rates = Rates(device.flops, device.host_link or 1.0)
    every = options(sample.blocks, rates, with_host=bool(device.host_link))
    plain = [of_block[0] for of_block in every]
    chosen = [next((o for o in of_block if o.mode == mode), of_block[0]) for of_block in every]
    beside = max(sample.peak - peak(plain), 0.0)
    return beside + peak(chosen), _added(chosen, sample, device)


def _added(chosen: list[Option], sample: Sample, device: Device) -> float:
    """The options' seconds count arithmetic alone: scaled to a real forward pass, which is a third of the step."""
    by_flops = sum(block.flops for block in sample.blocks) / device.flops
    forward = sample.compute.seconds(device) / 3
    return sum(option.seconds for option in chosen) * (forward / by_flops if by_flops else 1.0)


def offloaded(profile: ModelProfile, hardware: Hardware) -> Prediction | None:
    """`HostOffloadStrategy`: one layer at a time is on the device (arXiv 2002.05645). `None` if that is the host."""
    device = hardware.device(1)
    if not device.host_link or not profile.layers:
        return None
    sample = profile.at(profile.rows)
    # The layer that is computed, its gradient, and the layer that is fetched ahead.
    largest = 3 * max(layer.parameters for layer in profile.layers)
    kept = max((block.kept + block.inputs for block in sample.blocks), default=sample.peak)
    compute = sample.compute.seconds(device) * 4 / 3 + hardware.step
    # Weights are fetched twice, gradients are sent once. The host updates; its memory is assumed as fast as the link.
    moved = 3 * profile.trainable
    update = sample.update.bytes / device.host_link + sample.update.operations * device.operation
    seconds = max(compute, moved / device.host_link) + update
    return Prediction(
        "HostOffload",
        "HostOffloadStrategy",
        {},
        IN_ONE_PROCESS,
        1,
        seconds,
        compute,
        seconds - compute,
        largest + sample.batch + kept + device.reserved,
        device.memory,
        profile.trainable,
    )


def parameter_servers(profile: ModelProfile, hardware: Hardware, workers: int) -> Prediction:
    """Workers that take batches at their own pace, and fetch all weights and send all gradients for each batch."""
    servers = -(-workers // _WORKERS_PER_SERVER)
    device, link = hardware.device(workers), hardware.link(workers)
    # Each worker has a batch of the whole size; `workers` batches are computed at a time.
    sample = profile.at(profile.rows)
    compute = sample.compute.seconds(device) + hardware.cluster_step
    there_and_back = 2 * link.seconds(profile.trainable)
    # All workers together are not faster than the servers' links.
    seconds = max((compute + there_and_back) / workers, 2 * profile.trainable / (servers * link.bandwidth))
    # The chief hands out every step, which takes about as long as Keras needs for a step.
    seconds = max(seconds, sample.update.seconds(device) / servers, hardware.step)
    memory = 2 * profile.weights + sample.batch + MARGIN * sample.peak + device.reserved
    return Prediction(
        "ParameterServer",
        "ParameterServerStrategy",
        {},
        start_of(hardware, workers, f"-n {workers} --ps {servers}"),
        workers,
        seconds,
        compute / workers,
        max(seconds - compute / workers, 0.0),
        memory,
        device.memory,
        profile.trainable,
        is_exact=False,
    )
